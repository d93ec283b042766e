"""Prints tables on the terminal."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from mmrl.config import renamed
from mmrl.config.presets import PRESETS, described
from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import ALL, describe, load_built_in, options

FAMILIES = {"samplers": ("sde_types", "timestep_schedules", "noise_windows")}


def evaluation_table(rows: list[dict[str, Any]]) -> None:
    """Print a table of models down and rewards across: mean and half the 95 % interval."""
    names = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    table = Table("model", *names, title="held-out rewards, mean ± 95 % interval")
    for row in rows:
        estimates = [row["rewards"].get(name) for name in names]
        table.add_row(row["model"], *map(_estimate, estimates))
    Console().print(table)


def _estimate(estimate: dict[str, Any] | None) -> str:
    """Return mean and half the interval; of a measure of the whole set the value alone."""
    if estimate is None:
        return ""
    half = estimate["high"] - estimate["mean"]
    return (
        f"{estimate['mean']:.3f} ± {half:.3f}" if math.isfinite(half) else f"{estimate['mean']:.3f}"
    )


def plugin_tables(kind: str | None) -> None:
    """Print name, options and first docstring line of every registered plug-in."""
    load_built_in()
    kinds = [*ALL, *FAMILIES, "presets"]
    if kind is not None and kind not in kinds:
        if kind in renamed.KINDS:
            raise UserError(f"`mmrl list {kind}` is now `mmrl list {renamed.KINDS[kind]}`")
        raise UserError(f"no plug-ins called {kind!r}; {suggest(kind, kinds, renamed.KINDS)}")
    for plural, registry in ALL.items():
        if kind in (None, plural) or plural in FAMILIES.get(kind, ()):
            table = Table(
                "name", "what it is", "options", title=plural, title_justify="left", min_width=80
            )
            for name in sorted(registry):
                # what stages and monitors are made from stands under `train:`, not under their name
                takes = () if plural in ("stages", "monitors") else options(registry[name])
                table.add_row(name, describe(registry[name]), ", ".join(takes))
            Console().print(table)
    if kind in (None, "presets"):
        names = Column("name", no_wrap=True)
        table = Table(names, "for", "what it sets", title="presets", title_justify="left")
        for name in PRESETS:
            table.add_row(name, *described(name), end_section=True)
        Console().print(table)
