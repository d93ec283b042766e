"""Writes the table of all rewards in ``docs/rewards.md`` from the registry and the measured
speeds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mmrl.core.registry import REWARDS, Plugin, describe, load_built_in, options
from rewards.card import Card, card_of

BEGIN = "<!-- generated: scripts/dev/reward_table.py -->"
END = "<!-- end of the generated table -->"
HEAD = (
    "name",
    "what it says",
    "judges",
    "needs",
    "range",
    "scaling",
    "options",
    "source",
    "licence",
    "a second",
)
KINDS = {
    "sample": "",
    "group": "whole groups of ",
    "step": "steps of ",
    "batch": "all samples of an iteration, of ",
}


def markdown(measured: Mapping[str, float] = {}, package: str | None = None) -> str:
    """Write one line for each registered reward; ``measured``: samples a second by name;
    ``package``: only the rewards it defines."""
    load_built_in()
    known = [
        n for n in sorted(REWARDS) if package in (None, REWARDS[n].__module__.partition(".")[0])
    ]
    rows = [row(name, REWARDS[name], measured.get(name)) for name in known]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    return "\n".join(["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|", *lines]) + "\n"


def row(name: str, entry: Plugin, speed: float | None) -> list[str]:
    card = card_of(entry)
    chosen = ", ".join(f"`{key}`" for key in options(entry))
    needs = ", ".join(f"`{field}`" for field in card.needs)
    judges = KINDS[card.of] + ", ".join(card.media)
    fast = f"{speed:.3g}" if speed else ""
    source = card.source + ("; differentiable" if card.differentiable else "")
    about = describe(entry).rstrip(".").replace("``", "`")
    return [
        f"`{name}`",
        about,
        judges,
        needs,
        span(card),
        card.scaling,
        chosen,
        source,
        card.licence,
        fast,
    ]


def span(card: Card) -> str:
    """Return the range of a reward: ``0..1``, ``above 0``, ``below 0`` or nothing."""
    if card.low is None and card.high is None:
        return ""
    if card.high is None:
        return f"{card.low:g} and above"
    return f"{card.high:g} and below" if card.low is None else f"{card.low:g}..{card.high:g}"


def speeds(folder: Path) -> dict[str, float]:
    """Read samples a second by reward from the last benchmark in ``docs/results``, without
    stand-ins for real models."""
    file = folder / "results" / "rewards.json"
    measured = (
        json.loads(file.read_text()) if file.is_file() else {"samples_per_second": {}, "small": []}
    )
    return {
        name: speed
        for name, speed in measured["samples_per_second"].items()
        if name not in measured["small"]
    }


def renewed(page: str, table: str) -> str:
    """Return the page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}{END}{after}"
