"""Holds the architectures of published models: what their config files say, without their weights.

``published.json`` holds, for every hub id in ``configs/``, the values by which a model differs from
its class's defaults, the classes of its text encoders, and parameters counted from these on the
meta device.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

FILE = Path(__file__).with_name("published.json")


@cache
def table() -> dict[str, Any]:
    """Read the table: ``models`` by hub id, ``encoders`` by name, ``others``: models that are no
    diffusers folder."""
    read: dict[str, Any] = json.loads(FILE.read_text())
    return read


@cache
def _made() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mmrl-published-")


@cache
def folder(name: str) -> Path | None:
    """Make a diffusers folder of config files alone, as that hub id has them; None if it is not in
    the table."""
    known = table()["models"].get(name)
    if known is None:
        return None
    place = Path(_made().name) / name.replace("/", "--")
    for part, config in known["parts"].items():
        file = "scheduler_config.json" if part == "scheduler" else "config.json"
        (place / part).mkdir(parents=True, exist_ok=True)
        (place / part / file).write_text(json.dumps(config))
    index = {"_class_name": known["pipeline"], **known.get("index", {})}
    index |= {part: ["diffusers", config["_class_name"]] for part, config in known["parts"].items()}
    (place / "model_index.json").write_text(json.dumps(index))
    return place


def encoders(name: str) -> int | None:
    """Count the parameters of a model's text and image encoders."""
    known = table()["models"].get(name)
    return (
        None
        if known is None
        else sum(table()["encoders"][encoder]["parameters"] for encoder in known["encoders"])
    )


def on_meta(name: str | type, config: dict[str, Any]) -> nn.Module:
    """Make a part of a diffusers model by its class or its name, without memory for its weights."""
    import diffusers

    cls: Any = getattr(diffusers, name) if isinstance(name, str) else name
    with torch.device("meta"):
        net: nn.Module = cls.from_config(
            {key: value for key, value in config.items() if key != "_class_name"}
        )
    return net


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def per_rank(net: nn.Module, suffixes: Sequence[str]) -> int:
    """Count the parameters that one rank of LoRA adds: inputs plus outputs of every adapted
    layer."""
    return sum(
        sum(layer.weight.shape)
        for name, layer in net.named_modules()
        if isinstance(layer, nn.Linear)
        and any(name == s or name.endswith("." + s) for s in suffixes)
    )


def encoder_on_meta(spec: dict[str, Any]) -> nn.Module:
    """Make a text encoder of transformers by its classes' names and config values."""
    import transformers

    config = getattr(transformers, spec["config_class"])(**spec["config"])
    with torch.device("meta"):
        encoder: nn.Module = getattr(transformers, spec["class"])(config)
    return encoder
