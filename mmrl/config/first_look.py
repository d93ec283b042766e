"""Reports the commonest mistakes of a configuration before torch and all plug-ins are imported,
which takes seconds.

The messages are those of ``check``, which later also covers what the table of ``mmrl.config.known``
lacks: user code and other packages, and incompatible options.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from mmrl.config import EXAMPLES, Config, load, load_stages
from mmrl.config.building import raise_all, resolve_rewards
from mmrl.config.checks import (
    check_names,
    impossible_options,
    indivisible,
    missing_files,
    options_of_section,
)
from mmrl.config.known import Known, is_outdated
from mmrl.config.options import EvaluateOptions, TrainOptions
from mmrl.config.overrides import PLUGGED
from mmrl.config.schema import REGISTRIES, resolve
from mmrl.config.sections import SECTIONS


def first_look(file: Path, overrides: Sequence[str] = (), **use: Any) -> None:
    """Check a configuration (``look``), unless torch is already loaded or the table is older than
    the code."""
    if "torch" not in sys.modules and not is_outdated():
        look(file, overrides, **use)


def look(
    file: Path,
    overrides: Sequence[str] = (),
    sections: Collection[str] | None = None,
    every_stage: bool = False,
    processes: int | None = 1,
) -> None:
    """Raise UserError for definite mistakes in a configuration.

    ``sections``: the plug-ins that a command uses, and nothing else; default: all sections.
    ``every_stage``: for a configuration with stages check all, else the last. ``processes``: how
    many share the run; None: not known yet.
    """
    stages = load_stages(file, overrides)[1] if every_stage else []
    required = EXAMPLES if sections is None else sections
    for words in [[f"stage={stage}"] for stage in stages] or [[]]:
        problems: list[str] = []
        config = load(file, [*overrides, *words], required, problems=problems)
        known = Known(foreign=bool(config.plain.get("plugins")))
        stand_ins = REGISTRIES.set(known.kinds)
        try:
            _look_at_plug_ins(config, known, problems, sections or (*PLUGGED, "reward"))
            if sections is None:
                _look_at_options(config, known, problems, processes)
        finally:
            REGISTRIES.reset(stand_ins)
        raise_all(problems)


def _look_at_plug_ins(
    config: Config, known: Known, problems: list[str], sections: Collection[str]
) -> None:
    for name, registry in PLUGGED.items():
        if name in sections and config.plain.get(name) is not None:
            place = config.place((name,))
            supplied = ["parameters"] if name == "optimizer" else []
            resolved = resolve(config[name], known.kinds[registry.kind], place, problems, supplied)
            problems += [*missing_files(resolved), *impossible_options(resolved)]
    if "reward" in sections and config.plain.get("reward") is not None:
        _look_at_rewards(config, known, problems, "reward")


def _look_at_rewards(config: Config, known: Known, problems: list[str], *path: str) -> None:
    spec = config.plain
    for key in path:
        spec = spec[key]
    rewards = resolve_rewards(spec, known.kinds["reward"], config.place(path), problems)
    for chosen in rewards.values():
        problems += missing_files(chosen.reward)


def _look_at_options(
    config: Config, known: Known, problems: list[str], processes: int | None
) -> None:
    for name, cls in SECTIONS.items():
        missing = name == "train" and config.plain.get(name) is None  # already reported
        built = None if missing else options_of_section(config, name, cls, problems)
        if isinstance(built, TrainOptions) and processes is not None:
            problems += indivisible(config, built, processes)
        if isinstance(built, EvaluateOptions) and built.reward:
            _look_at_rewards(config, known, problems, name, "reward")
    check_names(config, problems)
