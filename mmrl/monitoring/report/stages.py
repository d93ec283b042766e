"""Renders the report of a run with stages: one page that holds those of all its stages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mmrl.monitoring.report.charts import number
from mmrl.monitoring.report.runs import Run, is_run
from mmrl.monitoring.report.templates import environment

PART = re.compile(r"\d+-.+")
COLUMNS = (("loss", "loss"), ("eval/loss", "held-out loss"), ("reward/mean", "reward"))


def parts(folder: Path) -> list[Path]:
    """List the folders of a run's stages that have begun, in order, if any."""
    config = folder / "config.yaml"
    if not config.is_file() or not re.search(r"^stages:", config.read_text(), re.MULTILINE):
        return []
    begun = [part for part in folder.iterdir() if PART.fullmatch(part.name) and is_run(part)]
    return sorted(begun, key=lambda part: int(part.name.partition("-")[0]))


def render_stages(folder: Path, runs: Sequence[Run], pages: Sequence[str]) -> str:
    """Return the page as text: a row for every stage, and their whole pages below."""
    rows = [
        {
            "name": run.folder.name,
            "objective": _objective(run),
            "iterations": len(run.metrics),
            "ends": [_ends(run, key) for key, _ in COLUMNS],
            "page": page,
        }
        for run, page in zip(runs, pages, strict=True)
    ]
    page = environment().get_template("stages.html")
    labels = [label for _, label in COLUMNS]
    return str(page.render(name=folder.resolve().name, rows=rows, labels=labels))


def _objective(run: Run) -> str:
    objective = run.config.get("objective", "") if run.config else ""
    return objective if isinstance(objective, str) else str(next(iter(objective), ""))


def _ends(run: Run, key: str) -> str:
    values = [value for value in run.column(key) if value is not None]
    return f"{number(values[0])} to {number(values[-1])}" if values else ""
