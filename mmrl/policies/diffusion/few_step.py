"""Samples models in few steps as diffusers' LCMScheduler and FlowMatchLCMScheduler do, and writes
these schedulers into exported folders."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.libraries import library_class
from mmrl.policies.diffusion import diffusers_folder
from samplers.kernels import consistency
from samplers.windows import between_steps

# the scheduler of a family's folders, and the few-step one with the same times
BY_CLASS = {
    "FlowMatchEulerDiscreteScheduler": "FlowMatchLCMScheduler",
    "DDIMScheduler": "LCMScheduler",
    "LCMScheduler": "LCMScheduler",
}
OPTIONS: dict[str, Any] = {
    "sde_type": consistency,
    "noise_level": 1.0,
    "noise_anneal": 1.0,
    "noise_window": between_steps,
    "solver": None,
}


def check(place: str, scheduler: str) -> None:
    """Raise UserError where no few-step scheduler has the times of the folder's own."""
    config = _config(place)
    name = config.get("_class_name", "")
    flow = scheduler == "FlowMatchEulerDiscreteScheduler"
    if flow and name not in (scheduler, BY_CLASS[scheduler]):
        raise UserError(
            f"policy option scheduler: lcm is for folders with a {scheduler}, and {place!r} has "
            f"{name or 'another one'}; leave it own"
        )


def save(place: str, scheduler: str, folder: Path) -> None:
    """Write the scheduler to the exported folder; in a whole pipeline it replaces the original."""
    made(_config(place), scheduler).save_pretrained(folder / "scheduler")
    index = folder / "model_index.json"
    if index.is_file():
        parts = json.loads(index.read_text())
        parts["scheduler"] = ["diffusers", scheduler]
        index.write_text(json.dumps(parts, indent=2) + "\n")


def made(config: Mapping[str, Any], scheduler: str) -> Any:
    """Make a diffusers scheduler from the keys that it shares with another one's configuration."""

    kind = library_class("diffusers", scheduler)
    known = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in config.items() if name in known})


def _config(place: str) -> dict[str, Any]:
    """Read the configuration of a folder's scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    config: dict[str, Any] = diffusers_folder.load_config(
        FlowMatchEulerDiscreteScheduler, place, "scheduler"
    )
    return config
