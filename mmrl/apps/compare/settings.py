"""Parses the arguments of ``mmrl compare``: configurations, their changes, and the budget of a
run."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import mmrl.config as config
from mmrl.config.options import Budget, TrainOptions
from mmrl.core.errors import UserError, suggest
from mmrl.core.paths import find_config

KEY = r"[A-Za-z_][\w.:/-]*="
PLUS = re.compile(rf"\+(?={KEY})")  # between a configuration and its changes
LABEL = "label="  # among the changes of a configuration: its label
UNLIMITED = 1_000_000  # iterations, if the budget ends a run


@dataclass(frozen=True)
class Setting:
    """Describes one configuration with its changes. ``arm``: index of what is compared: settings of
    one arm differ only by the sweep."""

    label: str
    config: str  # a file or a shipped name
    changes: tuple[str, ...]  # overrides
    arm: int

    @property
    def folder(self) -> str:
        """Name a folder by the label."""
        words = "".join(c if c.isalnum() or c in "._" else " " for c in self.label).split()
        return "-".join(words)[:100]


def settings_of(
    words: Sequence[str], vary: Sequence[str] = (), sweep: Sequence[str] = ()
) -> list[Setting]:
    """Read configurations ``name+key=value+...`` and overrides for all of them, ``key=value``, from
    the command line. ``vary``: changes that define a further configuration each. ``sweep``:
    ``key=v1,v2``, a grid for each configuration. A change ``label=GSPO`` names its
    configuration."""
    shared = tuple(word for word in words if re.match(KEY, word))
    specs = [tuple(PLUS.split(word)) for word in words if word not in shared]
    if vary and len(specs) != 1:
        raise UserError("--vary changes one configuration; name one, or write name+key=value")
    changed = [(*specs[0], *shlex.split(change)) for change in vary]
    arms = [*specs, *changed]
    for change in (c for arm in arms for c in arm[1:]):
        if not re.match(KEY, change):
            raise UserError(f"{change}: expected key=value, such as objective.clip_range=1e-3")
    names = _short([arm[0] for arm in arms])
    settings = []
    for number, (name, arm) in enumerate(zip(names, arms, strict=True)):
        for point in _grid(sweep):
            own_changes = (*(change for change in arm[1:] if not change.startswith(LABEL)), *point)
            called = [c.removeprefix(LABEL) for c in arm[1:] if c.startswith(LABEL)][-1:]
            label = " + ".join(
                [*called, *map(_brief, point)] if called else [name, *map(_brief, own_changes)]
            )
            settings.append(Setting(label, arm[0], (*shared, *own_changes), number))
    if len(settings) < 2:
        raise UserError(
            "nothing to compare with: name a second configuration, or a change of the first "
            "(--vary objective.policy_gradient.surrogate=gspo, or --sweep key=v1,v2)"
        )
    _unlike(settings)
    return settings


def _short(names: Sequence[str]) -> list[str]:
    """Drop folders if the file name is unambiguous."""
    stems = [Path(name).stem for name in names]
    full = {stem: {n for n, s in zip(names, stems, strict=True) if s == stem} for stem in stems}
    return [s if len(full[s]) == 1 else n for n, s in zip(names, stems, strict=True)]


def _brief(change: str) -> str:
    """Shorten ``objective.policy_gradient.surrogate=gspo`` to ``surrogate=gspo``."""
    key, _, value = change.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def _grid(sweep: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """List the points of the grid; one empty point without a sweep."""
    axes = []
    for text in sweep:
        key, equals, values = text.partition("=")
        points = [value for value in values.split(",") if value.strip()]
        if not equals or not re.match(KEY, text) or len(points) < 2:
            raise UserError(f"--sweep {text}: expected key=v1,v2, such as train.epochs=1,2")
        axes.append([f"{key}={value.strip()}" for value in points])
    return itertools.product(*axes)


def _unlike(settings: Sequence[Setting]) -> None:
    for names in (Counter(s.label for s in settings), Counter(s.folder for s in settings)):
        for name, count in names.items():
            if count > 1:
                raise UserError(f"{name!r} is named {count} times; nothing would differ")


def budget_of(texts: Sequence[str]) -> dict[str, float]:
    """Read ``cpu_seconds=120`` and the like: limits by name."""
    names = ["iterations", *(f.name for f in fields(Budget))]
    budget: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in names:
            raise UserError(f"--budget {text}: no such budget; {suggest(name, names)}")
        try:
            budget[name] = float(value)
        except ValueError as error:
            raise UserError(f"--budget {text}: expected {name}=NUMBER") from error
        if not 0 < budget[name] < float("inf"):
            raise UserError(f"--budget {text}: expected a number above 0")
        if name != "cpu_seconds" and budget[name] != int(budget[name]):
            raise UserError(f"--budget {text}: expected a whole number")
    return budget


def overrides_of(setting: Setting, budget: Mapping[str, float], seed: int) -> list[str]:
    """List the overrides of one run. With another budget than iterations, these are not a limit,
    unless the learning rate decays towards their end or a change sets them."""
    limits = {name: limit for name, limit in budget.items() if name != "iterations"}
    texts = [f"{key}: {value:.17g}" for key, value in limits.items()]
    overrides = [*setting.changes, f"train.seed={seed}", "evaluate.split=development"]
    if "iterations" in budget:
        overrides.append(f"train.iterations={int(budget['iterations'])}")
    if limits:
        overrides.append("train.budget={" + ", ".join(texts) + "}")
        chosen = any(change.startswith("train.iterations=") for change in setting.changes)
        if "iterations" not in budget and not chosen and _steady(setting):
            overrides.append(f"train.iterations={UNLIMITED}")
    return overrides


def _steady(setting: Setting) -> bool:
    """Tell whether the learning rate does not depend on the number of iterations."""
    configuration = config.load(find_config(setting.config), setting.changes)
    options: TrainOptions = configuration.section("train", TrainOptions)
    return options.lr_schedule == "constant"
