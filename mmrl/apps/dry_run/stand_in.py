"""Measures ``policy: pipeline`` by the family of the same pipeline: the networks and their passes
are the same, without text encoding and pipeline calls."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from os.path import isdir
from pathlib import Path
from typing import Any

from mmrl.apps.dry_run import published, untrained
from mmrl.config.schema import Resolved
from mmrl.core.libraries import find_class
from mmrl.core.registry import ARTIFACTS, POLICIES
from mmrl.core.registry import options as options_of
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy
from mmrl.worlds.cache import built
from mmrl.zoo.models.any_pipeline.any_pipeline import AnyPipeline
from mmrl.zoo.models.any_pipeline.replay_prompts import BINNING, unset

# arguments of a pipeline's call, and the families' names
OPTIONS = {
    "num_frames": "frames",
    "max_sequence_length": "text_length",
    "guidance_scale": "embedded_guidance",
}


def stand_in(resolved: Resolved) -> tuple[str, Resolved]:
    """Return (its name, the family that has the networks of a replayed pipeline, with the options
    that both have); ("", the same) for other policies, or without a family."""
    if resolved.entry is not AnyPipeline or (resolved.options.get("call") or {}).get(BINNING):
        return "", resolved  # with binning, only the pipeline knows its size
    class_name = _class_of(str(resolved.options.get("path", "")))
    for name in POLICIES:
        family = POLICIES[name]
        if not (isinstance(family, type) and issubclass(family, FolderPolicy)):
            continue
        if family.pipeline == class_name:
            return name, replace(resolved, entry=family, options=_shared(resolved, family))
    return "", resolved


def call_defaults(resolved: Resolved) -> str:
    """List the defaults of a replayed pipeline's call."""
    inputs = resolved.options.get("inputs") or {}
    return unset(call_of(resolved), resolved.options.get("call") or {}, list(inputs))


def call_of(resolved: Resolved) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a replayed pipeline's call; none if its class is unknown."""

    cls = find_class("diffusers", _class_of(str(resolved.options.get("path", ""))) or "-")
    if resolved.entry is not AnyPipeline or cls is None:
        return {}
    return inspect.signature(inspect.unwrap(cls.__call__)).parameters


def folder_of(path: str) -> Path | None:
    """Return the local folder of a model: given as such, or of the embedded world, if it is built
    or came with the package."""
    if path.startswith("world:"):
        entry = ARTIFACTS.get(path.removeprefix("world:"))
        return built(entry) if entry is not None else None
    folder = Path(path).expanduser()
    return folder if isdir(folder) else None  # also for a name too long for the system


def folder_at(path: str) -> Path | None:
    """Find the config files of a model: a local folder, what was built of the embedded world, or
    the table of published models."""
    return folder_of(path) or published.folder(path) or untrained.folder(path)


def _class_of(path: str) -> str:
    """Return the pipeline's class from the index of its folder; empty if unknown."""
    place = folder_at(path)
    index = place / "model_index.json" if place is not None else None
    if index is None or not index.is_file():
        return ""
    return str(json.loads(index.read_text()).get("_class_name", ""))


def _shared(resolved: Resolved, family: type[FolderPolicy]) -> dict[str, Any]:
    """Translate the options; those of the pipeline's call alone do not affect passes."""
    known = options_of(family)
    options = {key: value for key, value in resolved.options.items() if key in known}
    call = dict(resolved.options.get("call") or {})
    if "height" in call and "width" in call:
        options["size"] = [call["height"], call["width"]]
    for argument, option in OPTIONS.items():
        if argument in call and option in known:
            options[option] = call[argument]
    return options
