"""Stores the results of the soak experiments, and writes their page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from mmrl.core.files import write_json
from mmrl.core.machine import machine

HEAD = """# Trust: attacks and faults that were tried

Written by `scripts/dev/soak`; `scripts/dev/soak SECTION` measures a section again. *Tries* counts
what was tried, *failed* those with another outcome than expected. Machines, seconds and further
numbers are in `trust.json`.

| section | experiment | tries | failed | outcome |
|---|---|---|---|---|"""


@dataclass(frozen=True)
class Soak:
    """Holds what a section may use: an empty folder, its time, and its random seed."""

    folder: Path
    seconds: float
    seed: int


@dataclass(frozen=True)
class Experiment:
    """Holds one row of the table: what was tried, how often, and the failures.

    ``outcome``: a sentence on the result. ``numbers``: further measurements, for the JSON.
    """

    name: str
    tries: int
    failed: int
    outcome: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.failed and self.tries > 0

    def line(self) -> str:
        return f"{self.name}: {self.tries} tries, {self.failed} failed; {self.outcome}"


def write(
    page: Path, section: str, shows: str, experiments: Sequence[Experiment], seconds: float
) -> None:
    """Update the results of a section, and rewrite the page."""
    record = page.with_suffix(".json")
    known = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    known[section] = {
        "shows": shows,
        "date": date.today().isoformat(),
        "seconds": round(seconds),
        "machine": machine(),
        "experiments": [asdict(experiment) for experiment in experiments],
    }
    write_json(record, dict(sorted(known.items())))
    rows = [row for entry in sorted(known.items()) for row in _rows(*entry)]
    page.write_text("\n".join([HEAD, *rows, ""]), "utf-8")


def _rows(name: str, figures: Mapping[str, Any]) -> list[str]:
    """Write the rows of one section; the first says when and of which commit they are."""
    section = f"{name} ({figures['date']}, {figures['machine'].get('commit')})"
    return [
        f"| {'' if number else section} | {row['name']} | {row['tries']} | {row['failed']} "
        f"| {row['outcome']} |"
        for number, row in enumerate(figures["experiments"])
    ]
