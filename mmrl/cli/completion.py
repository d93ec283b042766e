"""Completes names of configurations, runs and kinds in the shell; imports nothing heavy, since it
runs at every key press."""

from __future__ import annotations

import os
from pathlib import Path

from mmrl.core.paths import config_names

KINDS = (
    "policies objectives advantages rewards data optimizers sde_types timestep_schedules "
    "noise_windows solvers surrogates timestep_samplers estimators stages monitors judges "
    "benchmarks artifacts presets configs samplers"
).split()


def of_configs(incomplete: str) -> list[str]:
    """Complete a configuration: a shipped name, or a file or folder below the working
    directory."""
    names = [name for name in config_names() if name.startswith(incomplete)]
    return names + _files(incomplete, (".yaml", ".yml"))


def of_runs(incomplete: str) -> list[str]:
    """Complete the folder of a run."""
    return _files(incomplete, ())


def of_runs_and_configs(incomplete: str) -> list[str]:
    """Complete a run or a configuration."""
    return list(dict.fromkeys([*of_runs(incomplete), *of_configs(incomplete)]))


def of_list(incomplete: str) -> list[str]:
    """Complete a kind of ``mmrl list``."""
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def _files(incomplete: str, endings: tuple[str, ...]) -> list[str]:
    """List folders, and files with these endings, that begin with what was typed."""
    folder, start = os.path.split(incomplete)
    try:
        places = sorted(Path(folder or ".").iterdir())
    except OSError:
        return []
    return [
        os.path.join(folder, place.name) + ("/" if place.is_dir() else "")
        for place in places
        if place.name.startswith(start)
        and (start.startswith(".") or not place.name.startswith("."))
        and (place.is_dir() or place.name.endswith(endings or ("\0",)))
    ]
