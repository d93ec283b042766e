"""Finds the results of a method in the comparisons of docs/results, and draws them.

A comparison is about a method if the candidate's configuration names it and the baseline's does
not. Used by ``scripts/dev/methods.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mmrl.core.errors import UserError  # noqa: E402
from mmrl.core.paths import find_config  # noqa: E402
from mmrl.experiment.build import read  # noqa: E402

RESULTS = ROOT / "docs" / "results"
# of a figure, in pixels
WIDTH, LABELS, ROW, MARGIN = 760, 300, 22, 34


@dataclass(frozen=True)
class Measured:
    """Holds one comparison: baseline and candidate, its page, and the difference of held-out reward
    with its 95 % interval. ``plain``, ``other``: both configurations, parsed."""

    page: str
    candidate: str
    baseline: str
    mean: float
    low: float
    high: float
    shown: bool
    plain: Mapping[str, Any] = field(compare=False)
    other: Mapping[str, Any] = field(compare=False)

    def link(self) -> str:
        """Return the link to its page."""
        return f"[{self.candidate} against {self.baseline}](../results/{self.page})"


@cache
def comparisons() -> tuple[Measured, ...]:
    """Read every committed comparison's verdict on the training reward."""
    return tuple(
        measured for path in sorted(RESULTS.glob("compare_*.json")) for measured in _of(path)
    )


def _of(path: Path) -> Iterator[Measured]:
    content = json.loads(path.read_text(encoding="utf-8"))
    plain = {setting["label"]: _plain(setting) for setting in content["settings"]}
    for entry in content["comparisons"]:
        if entry["measure"] != content["primary"]:
            continue
        bounds = entry["difference"]
        names = entry["candidate"], entry["baseline"]
        yield Measured(
            f"{path.stem}.md",
            *names,
            bounds["mean"],
            bounds["low"],
            bounds["high"],
            bool(entry["shown"]),
            plain[names[0]],
            plain[names[1]],
        )


def _plain(setting: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        known: Mapping[str, Any] = read(find_config(setting["config"]), setting["changes"]).plain
    except UserError as error:
        raise UserError(f"{setting['label']}: {error}") from error
    return known


def figure(rows: Sequence[Measured]) -> str:
    """Draw the differences with their intervals as SVG, one row each, 0 marked."""
    low = min(0.0, *(row.low for row in rows))
    high = max(0.0, *(row.high for row in rows))
    scale = (WIDTH - LABELS - 20) / (high - low or 1.0)

    def x(value: float) -> float:
        return round(LABELS + 10 + (value - low) * scale, 1)

    height = ROW * len(rows) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<line x1="{x(0)}" x2="{x(0)}" y1="0" y2="{height - 20}" stroke="#888888"/>',
    ]
    for place, row in enumerate(rows):
        y = ROW * place + ROW // 2
        colour = "#1b7837" if row.shown and row.mean > 0 else "#b2182b" if row.shown else "#2166ac"
        label = escape(f"{row.candidate} against {row.baseline}")
        parts += [
            f'<text x="{LABELS}" y="{y + 4}" text-anchor="end" fill="#222222">{label}</text>',
            f'<line x1="{x(row.low)}" x2="{x(row.high)}" y1="{y}" y2="{y}" stroke="{colour}"/>',
            f'<circle cx="{x(row.mean)}" cy="{y}" r="4" fill="{colour}"/>',
        ]
    for value in (low, 0.0, high):
        parts.append(
            f'<text x="{x(value)}" y="{height - 6}" text-anchor="middle" '
            f'fill="#222222">{value:+.2f}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
