"""Reads a run's YAML file, applies overrides ``a.b=c``, checks it as a whole and builds it by name.

    config = load("configs/digits/flow_grpo.yaml", ["train.iterations=3"])
    check(config)  # every name, option, file and the arithmetic; builds nothing
    policy = config.build("policy", POLICIES)

Each mistake is a ``UserError`` of one line, ``file:line: path.of.the.key: what was expected``; all
that can be found together are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.config import stages
from mmrl.config.anchors import anchored, code_beside
from mmrl.config.building import (
    Weighted,
    build,
    build_dataclass,
    build_rewards,
    raise_all,
    weighed,
)
from mmrl.config.checks import or_empty
from mmrl.config.overrides import SECTIONS, override_with, split_keys
from mmrl.config.presets import filled, unreached
from mmrl.config.values import Place, show
from mmrl.config.yamltext import read, write
from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import REWARDS, Registry

OPTIONS = ("train", "evaluate", "log", "alarms", "ray")  # sections that hold options, not a plug-in
DEFAULTS = {"advantage": "flow_grpo", "optimizer": "adamw"}
EXAMPLES = {
    "policy": 'policy: {sd3: {path: "world:digits/sd3", steps: 8}}',
    "data": "data: digits",
    "reward": "reward: {digits: 1.0}",
    "objective": "objective: {policy_gradient: {clip_range: 1e-4}}",
    "train": "train: {prompts_per_iteration: 15, group_size: 16, train_batch_size: 80, "
    "iterations: 60}",
}


@dataclass(frozen=True)
class Config:
    """Holds the resolved plain values of a configuration, and where each was written."""

    plain: dict[str, Any]
    file: str = "configuration"
    marks: Mapping[tuple[Any, ...], str] = field(default_factory=dict, repr=False)

    def __contains__(self, section: str) -> bool:
        return section in self.plain

    def __getitem__(self, section: str) -> Any:
        return self.plain[section]

    def place(self, path: str | tuple[Any, ...] = ()) -> Place:
        keys = tuple(split_keys(path, self.plain)) if isinstance(path, str) else path
        return Place(keys, self.marks, Path(self.file).parent)

    def where(self, path: str | tuple[Any, ...]) -> str:
        """Return ``file:line`` of a value, or the override that set it."""
        return self.place(path).source()

    def build(self, section: str, registry: Registry, **context: Any) -> Any:
        """Build the object a section names; ``context`` are arguments from code."""
        return build(self.plain[section], registry, self.place((section,)), **context)

    def rewards(
        self, section: str | tuple[Any, ...] = "reward", registry: Registry = REWARDS
    ) -> dict[str, Weighted]:
        place = self.place(section)
        spec: Any = self.plain
        for key in place.path:
            spec = spec[key]
        return build_rewards(spec, registry, place)

    def section(self, name: str, cls: type) -> Any:
        """Return a dataclass section; all defaults if it is missing."""
        return build_dataclass(cls, self.plain.get(name) or {}, self.place((name,)))


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    required: Collection[str] = tuple(EXAMPLES),
    added: Mapping[str, Any] = {},
    problems: list[str] | None = None,
) -> Config:
    """Read a file, apply ``a.b=c`` overrides in order, and check that the sections are the known
    ones.

    ``required``: sections that must be there; training needs all that have no default. For a
    configuration with stages the one named ``stage``, or the last. ``added``: sections from code.
    ``problems``: collects unknown and missing sections, which otherwise raise UserError, so that
    ``check`` reports them with all other problems.
    """
    alone = problems is None
    problems = [] if problems is None else problems
    file = str(path)
    plain, marks = _plain(file)
    for override in filter(_is_of_stages, overrides):
        override_with(plain, marks, override)
    if "stages" in plain or "stage" in plain:
        plain, marks = _of_stage(plain, marks, file)
    rest = [override for override in overrides if not _is_of_stages(override)]
    _apply_preset(plain, marks, rest)
    for override in rest:
        try:
            override_with(plain, marks, override)
        except UserError as error:
            problems.append(str(error))
    return of_plain(plain | dict(added), file, marks, required, problems, alone)


def from_mapping(
    sections: Mapping[str, Any],
    overrides: Sequence[str] = (),
    required: Collection[str] = tuple(EXAMPLES),
    file: str = "Python",
) -> Config:
    """Build a configuration from plain values; messages call it ``file``."""
    plain: dict[Any, Any] = deepcopy(dict(sections))
    marks: dict[tuple[Any, ...], str] = {(): file}
    _apply_preset(plain, marks, overrides)
    for override in overrides:
        override_with(plain, marks, override)
    return of_plain(plain, file, marks, required)


def of_plain(
    plain: dict[str, Any],
    file: str,
    marks: Mapping[tuple[Any, ...], str],
    required: Collection[str] = tuple(EXAMPLES),
    problems: list[str] | None = None,
    alone: bool = True,
) -> Config:
    """Build a configuration from plain values with overrides applied, and check its sections, as
    ``load`` does. ``problems``: found so far; ``alone``: they are raised here."""
    problems = [] if problems is None else problems
    plain = code_beside(plain, Path(file).parent)
    problems += [*_sections(plain, Place((), marks)), *_missing(plain, file, required)]
    if (name := plain.get("preset")) is not None and (why := unreached(plain, name)):
        problems.append(Place(("objective",), marks).say(why))
    if alone:
        raise_all(problems)
    for key in OPTIONS:  # anything else has been reported
        if not isinstance(or_empty(plain.get(key)), Mapping):
            del plain[key]
    if learns_from_answers(plain) and plain.get("reward") is None:
        plain["reward"] = {}
    evaluate = plain.get("evaluate")
    if isinstance(evaluate, Mapping) and "reward" in evaluate:
        plain["evaluate"] = {**evaluate, "reward": weighed(evaluate["reward"])}
    return Config(
        {**plain, **{key: _or(plain.get(key), default) for key, default in DEFAULTS.items()}},
        file,
        marks,
    )


def _or(value: Any, default: str) -> Any:
    return default if value is None else value


def load_stages(
    path: str | Path, overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Read the common part of a file with ``stages``, and the names of its stages; none if it has
    none, or ``stage`` names one of them."""
    plain, marks = _plain(str(path))
    for override in filter(_is_of_stages, overrides):
        override_with(plain, marks, override)
    chosen = plain.get("stage") is not None
    return plain, [] if chosen else stages.names(plain, marks)


def _is_of_stages(override: str) -> bool:
    """Tell whether an override is for ``stages`` or ``stage``; all others apply to every stage."""
    return re.split(r"[.=]", override.strip(), maxsplit=1)[0].strip() in ("stage", "stages")


def _plain(file: str) -> tuple[dict[Any, Any], dict[tuple[Any, ...], str]]:
    """Return the plain values of a file, and where each was written."""
    plain, lines = read(_text_of(Path(file)), file)
    if not isinstance(plain, dict):
        raise UserError(
            f"{file}: {_not_a_mapping(plain)}; a configuration looks like\n{_example()}"
        )
    return plain, {keys: f"{file}:{line}" for keys, line in lines.items()} | {(): file}


def _of_stage(
    plain: dict[Any, Any], marks: dict[tuple[Any, ...], str], file: str
) -> tuple[dict[Any, Any], dict[tuple[Any, ...], str]]:
    """Return the configuration of the stage that is named, or of the last."""
    known = stages.names(plain, marks)
    if not known:
        raise UserError(f"{file}: stage={plain.get('stage')}, but it has no stages")
    chosen = plain.get("stage")
    return stages.narrowed(plain, marks, known[-1] if chosen is None else str(chosen))


def _apply_preset(
    plain: dict[Any, Any], marks: dict[tuple[Any, ...], str], overrides: Sequence[str]
) -> None:
    """Apply ``preset``, before other overrides."""
    for override in overrides:
        if override.partition("=")[0].strip() == "preset":
            override_with(plain, marks, override)
    name = plain.get("preset")
    if name is None:
        return
    try:
        sections = filled(plain, name)
    except UserError as error:
        raise UserError(Place(("preset",), marks).say(str(error))) from error
    if sections.get("policy") is not plain.get("policy"):
        ((family, options),) = sections["policy"].items()
        _marked(marks, ("policy", family), options, plain["policy"][family], name)
        plain["policy"] = sections["policy"]
    for section in ("advantage", "objective", "train"):
        marks.setdefault((section,), f"preset {name}")
        if section == "train" and isinstance(plain.get(section), dict):
            _marked(marks, (section,), sections[section], plain[section], name)
        plain[section] = sections[section]


def _marked(
    marks: dict[tuple[Any, ...], str],
    place: tuple[str, ...],
    now: Mapping[str, Any],
    before: Mapping[str, Any],
    preset: str,
) -> None:
    """Mark the options that a preset added at a place."""
    marks.update({(*place, key): f"preset {preset}" for key in set(now) - set(before)})


def dump(config: Config) -> str:
    """Write YAML that loads back to the same configuration from any folder: paths are absolute."""
    return write(anchored(config.plain, Path(config.file).parent))


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"no such configuration file: {path}") from error
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder; give the path of a .yaml file in it") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{error.object[error.start]:02x}"
        raise UserError(f"{path}:{line}: {byte} is not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _not_a_mapping(plain: Any) -> str:
    return (
        "the file is empty"
        if plain is None
        else (f"expected sections, `name: ...`, got {show(plain)}")
    )


def _example() -> str:
    return "\n".join(f"    {line}" for line in EXAMPLES.values())


def _sections(plain: Mapping[Any, Any], root: Place) -> Iterator[str]:
    for key in plain:
        if key not in SECTIONS:
            yield (root / key).say(f"unknown section; {suggest(str(key), SECTIONS)}")
    for key in OPTIONS:
        if not isinstance(or_empty(plain.get(key)), Mapping):
            yield (root / key).say(f"expected options, {{option: value}}, got {show(plain[key])}")


def learns_from_answers(plain: Mapping[Any, Any]) -> bool:
    """Tell whether a run learns from answers in the data, supervised or by preferences, which needs
    no reward."""
    train = plain.get("train")
    if isinstance(train, Mapping) and train.get("preferences") is not None:
        return True
    objective = plain.get("objective")
    return (next(iter(objective), "") if isinstance(objective, Mapping) else objective) == "sft"


def _missing(plain: Mapping[Any, Any], file: str, required: Collection[str]) -> Iterator[str]:
    for key, example in EXAMPLES.items():
        needless = key == "reward" and learns_from_answers(plain)
        if key in required and plain.get(key) is None and not needless:
            yield f"{file}: the section {key!r} is missing; for instance\n    {example}"
