"""Writes the page and the JSON file of a comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from os.path import relpath
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.apps.compare import markdown
from mmrl.apps.compare.measures import Comparison, Measured, kind_of, plural
from mmrl.apps.compare.plan import Plan
from mmrl.apps.compare.runs import Job
from mmrl.core.errors import UserError
from mmrl.core.files import finite, write_json, write_text
from mmrl.core.machine import machine
from mmrl.core.statistics import interval, paired
from mmrl.experiment.loop import COSTS
from mmrl.monitoring.log import FINISHED
from mmrl.monitoring.report.charts import Chart, Series, number
from mmrl.monitoring.report.curves import spread_out
from mmrl.monitoring.report.pictures import Film, Tile, compare, data_uri, save_picture
from mmrl.monitoring.report.runs import Run, read_run
from mmrl.monitoring.report.templates import environment

AXES = {  # x-axis of a curve -> metric of an iteration that is summed
    "samples": "samples/total",
    "forwards": "forwards",
    "seconds": "seconds",
    "CPU seconds": "cpu_seconds",
}
MOST_POINTS = 400  # of a curve
MOST_CURVES = 6  # number of colours
PICTURES = 8


def write(
    folder: Path,
    plan: Plan,
    jobs: Sequence[Job],
    halves: Mapping[str, Mapping[str, Measured]],
    comparisons: Sequence[Comparison],
    sentences: Sequence[str],
) -> Path:
    """Write ``compare.html``, ``compare.md`` and ``compare.json``; returns the path of the first.
    ``halves``: split -> label -> scores. ``comparisons``: of the test prompts."""
    runs = {
        setting.label: [read_run(job.run) for job in jobs if job.setting is setting]
        for setting in plan.settings
    }
    measures = list(dict.fromkeys(c.measure for c in comparisons))
    content = {
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "verdict": list(sentences),
        "primary": plan.primary,
        "seeds": list(plan.seeds),
        "budget": plan.budget,
        "settings": [asdict(setting) for setting in plan.settings],
        "runs": [[job.name(), relpath(job.run, folder), *job.overrides] for job in jobs],
        "commits": commits_of(jobs),
        "prompts": {split: next(iter(m.values())).prompts for split, m in halves.items()},
        "held_out": all(s.held_out for m in halves.values() for s in m.values()),
        "measures": {m: kind_of(plan, m) for m in measures},
        "means": {split: means(measured, measures) for split, measured in halves.items()},
        "comparisons": [comparison.plain() for comparison in comparisons],
        "costs": {label: costs(seeds) for label, seeds in runs.items()},
        "curves": {axis: curves(runs, key) for axis, key in AXES.items()},
        "machine": machine(),
    }
    write_json(folder / "compare.json", finite(content))
    picture = before_after(runs)
    if picture is not None:
        save_picture(picture, folder / "compare")
    write_text(folder / "compare.md", markdown.page(finite(content)))
    write_text(folder / "compare.html", render(content, picture))
    return folder / "compare.html"


def commits_of(jobs: Sequence[Job]) -> list[str]:
    """List the commits that the runs recorded."""
    named = set()
    for job in jobs:
        try:
            text = (job.run / "machine.json").read_text(encoding="utf-8")
            named.add(str(json.loads(text)["commit"]))
        except (OSError, ValueError, KeyError, TypeError):
            named.add("unknown")
    return sorted(named)


def means(measured: Mapping[str, Measured], measures: Sequence[str]) -> dict[str, Any]:
    """Estimate by label and measure the trained model, its base, and the gain, paired."""
    return {
        label: {
            name: {
                "trained": asdict(interval(scores.trained[name], name in scores.binary)),
                "base": asdict(interval(scores.base[name], name in scores.binary)),
                "gain": asdict(
                    paired(scores.base[name], scores.trained[name], name in scores.binary)
                ),
            }
            for name in measures
            if name in scores.base
        }
        for label, scores in measured.items()
    }


def costs(runs: Sequence[Run]) -> dict[str, Any]:
    """Sum the cost of training, as means over the seeds, and say what ended it."""
    sums = {
        name: [sum(value or 0.0 for value in run.column(key)) for run in runs]
        for name, key in {**COSTS, "seconds": "seconds"}.items()
    }
    peaks = [max((x for x in run.column("memory/peak_gib") if x), default=None) for run in runs]
    known = [peak for peak in peaks if peak is not None]
    finished = (e for run in runs for e in run.events if e.get("kind") == FINISHED)
    return {
        "iterations": float(np.mean([len(run.metrics) for run in runs])),
        **{name: float(np.mean(values)) for name, values in sums.items()},
        "peak_gib": max(known) if known else None,
        "ended_by": ", ".join(sorted({str(event["message"]) for event in finished})),
    }


def curves(runs: Mapping[str, Sequence[Run]], key: str) -> dict[str, Any]:
    """Return by label the training reward over the budget: x, mean and standard deviation over the
    seeds, up to the shortest seed."""
    drawn = {}
    for label, seeds in runs.items():
        length = min(len(run.metrics) for run in seeds)
        spent = np.array([_numbers(run, key)[:length] for run in seeds]).cumsum(1)
        rewards = np.array([_numbers(run, "reward/mean", np.nan)[:length] for run in seeds])
        points = spread_out(list(range(length)), MOST_POINTS)
        drawn[label] = {
            "x": spent.mean(0)[points].tolist(),
            "y": rewards.mean(0)[points].tolist(),
            "std": (rewards.std(0, ddof=1) if len(seeds) > 1 else 0 * rewards[0])[points].tolist(),
        }
    return drawn


def _numbers(run: Run, key: str, missing: float = 0.0) -> list[float]:
    return [missing if value is None else value for value in run.column(key)]


def charts(content: Mapping[str, Any]) -> list[Chart]:
    """Draw the curves; settings beyond the number of colours have none."""
    drawn = []
    for axis, by_label in content["curves"].items():
        series = [
            Series(label, c["x"], finite(c["y"]), finite(c["std"]))
            for label, c in list(by_label.items())[:MOST_CURVES]
        ]
        drawn.append(Chart(f"Training reward over {axis}", series, x_label=axis))
    return drawn


def before_after(runs: Mapping[str, Sequence[Run]]) -> Tile | None:
    """Draw the same prompts and noise by the base and by every trained model of the first seed;
    None if the models make no pictures."""
    rows: dict[str, list[Tile]] = {}
    captions: list[str] = []
    for label, (first, *_) in runs.items():
        before, after = first.sample_tiles("before"), first.sample_tiles("after")
        if not before or not after:
            return None
        rows = rows or {"base": before[:PICTURES]}
        captions = captions or first.sample_captions("after")
        rows[label] = after[:PICTURES]
    sizes = {len(row) for row in rows.values()}
    return compare(rows, captions) if len(sizes) == 1 else None


def render(content: Mapping[str, Any], picture: Tile | None) -> str:
    """Return the page as text."""
    env = environment("mmrl.apps.compare", number=number, plural=plural, most_curves=MOST_CURVES)
    text: str = env.get_template("compare.html").render(
        content,
        charts=charts(content),
        picture=None if picture is None else data_uri(picture, most=1400),
        is_film=isinstance(picture, Film),
        labels=[setting["label"] for setting in content["settings"]],
    )
    return text


def check_folder(folder: Path) -> None:
    """Raise UserError if the folder cannot be used for a comparison."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; name a folder")
