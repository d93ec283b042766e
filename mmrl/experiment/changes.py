"""Compares the configuration of a resume with the one used so far.

A checkpoint holds its configuration. Values are compared after defaults and presets are filled in.
A difference is allowed, worth a warning, or refused unless the user accepts it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import mmrl.config as config
from mmrl.advantages.presets import GROUP_PRESETS
from mmrl.config import Config, effects
from mmrl.config.overrides import PLUGGED
from mmrl.config.schema import Resolved, resolve, resolve_call
from mmrl.config.sections import SECTIONS
from mmrl.config.values import show
from mmrl.config.yamltext import read
from mmrl.core.effects import Resumes
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES, ALL, REWARDS, options

# sections without effect on what is learned
FREE_SECTIONS = ("alarms", "evaluate", "log", "run")
REFUSED_SECTIONS = ("advantage", "data", "objective", "start")
NAMES = 3  # number of changes that a message names


@dataclass(frozen=True)
class Change:
    """Holds one value that differs, by its path of keys."""

    path: tuple[str, ...]
    before: Any
    after: Any
    effect: Resumes

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} was {_shown(self.before)} and is now {_shown(self.after)}"


def text_of(configuration: Config) -> str:
    """Serialise a configuration for a checkpoint."""
    return config.dump(configuration)


def admit(
    stored: str | None, configuration: Config, folder: Path, accept: bool = False
) -> list[str]:
    """Compare with the configuration stored in a checkpoint. Returns warnings; raises UserError for
    refused changes, unless ``accept``."""
    if stored is None:
        return []  # by a version that stored none
    try:
        differing = list(changes(_parsed(stored, folder), configuration))
    except UserError as error:
        reason = str(error).partition("\n")[0]
        return [f"the configuration in the checkpoint cannot be compared with this: {reason}"]
    refused = [change for change in differing if change.effect == "refused"]
    if refused and not accept:
        count = f" and {len(refused) - NAMES} more" if len(refused) > NAMES else ""
        raise UserError(
            f"{folder} cannot go on as another run: {'; '.join(map(str, refused[:NAMES]))}{count}; "
            f"take that back, begin a new run (mmrl train ... run=FOLDER), or go on all the same "
            f"with --accept-changes"
        )
    return [f"changed: {change}" for change in differing if change.effect != "free"]


def changes(before: Config, after: Config) -> Iterator[Change]:
    """List what differs between two configurations."""
    old, new = normal(before), normal(after)
    for section in sorted({*old, *new}):
        for path, first, second in _different(old.get(section), new.get(section), (section,)):
            yield Change(path, first, second, effect(path, first, second, new))


def effect(path: tuple[str, ...], before: Any, after: Any, whole: Mapping[str, Any]) -> Resumes:
    """Tell what a change means for a resumed run. ``whole`` is the new configuration."""
    section = path[0]
    if section in FREE_SECTIONS:
        return "free"
    if section == "ray":  # the placement may change, the staleness of samples may not
        return "warned" if path[1:] == ("staleness",) else "free"
    if section in REFUSED_SECTIONS or path in (("policy",), ("optimizer",), ("reward",)):
        return "refused"
    if path == ("train", "stages"):
        return effects.stages_resume(before, after)
    if path == ("train", "ema") and before is None:
        return "refused"
    if path == ("train", "iterations") and whole["train"].get("lr_schedule") != "constant":
        return "warned"
    if section in ("train", "policy"):
        return effects.resumes(path)
    return "warned"


def normal(configuration: Config) -> dict[str, Any]:
    """Return all values of a configuration, defaults and presets filled in. Raises UserError if it
    is not of this version."""
    problems: list[str] = []
    plain = configuration.plain
    values: dict[str, Any] = {}
    for section, registry in PLUGGED.items():
        supplied = ("parameters",) if section == "optimizer" else ()
        place = configuration.place((section,))
        values[section] = resolve(plain.get(section), registry, place, problems, supplied)
    for section, cls in SECTIONS.items():
        place = configuration.place((section,))
        values[section] = resolve_call(cls, plain.get(section) or {}, place, problems)
    place = configuration.place(("reward",))
    rewards = config.resolve_rewards(plain.get("reward") or {}, REWARDS, place, problems)
    config.raise_all(problems)
    normals = {name: _normal(value) for name, value in values.items()}
    for section in SECTIONS:
        (normals[section],) = normals[section].values()  # a class has one name
    normals["reward"] = {
        name: {
            "weight": chosen.weight,
            **{key: _normal(value) for key, value in vars(chosen).items() if key != "weight"},
        }
        for name, chosen in rewards.items()
    }
    rest = {key: plain.get(key) for key in ("start", "plugins")}
    return normals | rest


def _parsed(text: str, folder: Path) -> Config:
    plain, _ = read(text, str(folder))
    if not isinstance(plain, dict):
        raise UserError(f"{folder}: the stored configuration is no mapping")
    return Config(plain, str(folder / "config.yaml"))


def _normal(value: Any) -> Any:
    """Return a value as plain data; a plug-in as {name: {option: value}}, with its defaults."""
    if isinstance(value, Resolved):
        return {_name(value.entry): _options(value.entry, value.options)}
    if is_dataclass(value) and not isinstance(value, type):
        chosen = {field.name: getattr(value, field.name) for field in fields(value)}
        return {_name(type(value)): {key: _normal(item) for key, item in chosen.items()}}
    if isinstance(value, Mapping):
        return {str(key): _normal(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_normal(item) for item in value]
    if inspect.isfunction(value) or inspect.isclass(value):
        return {_name(value): _options(value, {})}
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _options(entry: Any, chosen: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: p.default for key, p in options(entry).items() if p.default is not p.empty}
    return {key: _normal(value) for key, value in {**known, **chosen}.items()}


def _name(entry: Any) -> str:
    """Return the name under which something is registered; settings of ``group`` are ``group``."""
    for registry in ALL.values():
        for name, plugin in registry.items():
            if plugin is entry:
                return "group" if registry is ADVANTAGES and name in GROUP_PRESETS else name
    return f"{entry.__module__}:{entry.__qualname__}"


def _different(
    before: Any, after: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Find the innermost values that differ."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for key in before:
            yield from _different(before[key], after[key], (*path, key))
    elif before != after and not _is_one_file(before, after):
        yield path, before, after


def _is_one_file(before: Any, after: Any) -> bool:
    """Tell whether two paths lead to one file or folder."""
    if not (isinstance(before, str) and isinstance(after, str)):
        return False
    try:
        return os.path.samefile(before, after)
    except (OSError, ValueError):
        return False


def _shown(value: Any) -> str:
    """Write a value in few words: a plug-in as its name."""
    if isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
        return ", ".join(value)
    return show(value)
