"""Renders the pages of the live view: the list of runs, the page of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

from mmrl.apps.view.folders import LiveRun, RunFolder
from mmrl.monitoring.progress import clock_time
from mmrl.monitoring.report import curves, templates
from mmrl.monitoring.report.answers import recorded, rollouts
from mmrl.monitoring.report.charts import number
from mmrl.monitoring.report.page import content
from mmrl.monitoring.report.runs import Run, iteration_of

MOST_ALARMS = 30
FIRST = ("reward/mean", "loss", "eval/loss")  # metrics in the list of runs


@cache
def environment() -> Any:
    """Set up the templates; pictures are addresses."""
    return templates.environment(
        "mmrl.apps.view",
        number=number,
        data_uri=lambda image: image.url,
        is_film=lambda image: image.is_film,
    )


def overview(folders: Sequence[RunFolder], rating: bool) -> str:
    """Render the list of all runs and of their alarms."""
    runs = [(folder, folder.read()) for folder in folders]
    alarms = [
        (folder, event)
        for folder, run in runs
        for event in run.events
        if event.get("kind") == "alarm"
    ]
    alarms.sort(key=lambda pair: str(pair[1].get("time")), reverse=True)
    rows = [_row(folder, run) for folder, run in runs]
    page = environment().get_template("overview.html")
    return str(page.render(rows=rows, alarms=alarms[:MOST_ALARMS], rating=rating))


def run_page(folder: RunFolder, answers: int | None, rating: bool) -> str:
    """Render the current report of a run; ``answers``: the iteration whose answers to show."""
    run = folder.read()
    times = recorded(run)
    answers = answers if answers in times else (times[-1] if times else None)
    shown = (
        content(run)
        | {
            "folder": folder,
            "status": folder.status(run),
            "whole": [],  # the moments have them
            "moments": moments(run),
            "times": curves.spread_out(times, 40),
            "answers": answers,
            "rollouts": rollouts(run, answers),
            "events": run.events[-60:],
            "left": time_left(run),
            "rating": rating,
        }
    )
    return str(environment().get_template("live.html").render(shown))


def moments(run: LiveRun) -> dict[str, Any]:
    """Return the galleries over time, for a page that shows one at a time: names and pictures."""
    names = [*run.sheets_over_time()]
    names = [*(["before"] if run.sample("before") else []), *names]
    names += ["after"] if run.sample("after") else []
    sheets = {name: run.sample_tiles(name) or [run.sample(name)] for name in names}
    captions = run.sample_captions(names[-1]) if names else []
    return {
        "labels": [f"iteration {i}" if (i := iteration_of(n)) >= 0 else n for n in names],
        "urls": json.dumps([[tile.url for tile in sheets[name]] for name in names]),
        "tiles": sheets[names[-1]] if names else [],
        "captions": captions,
    }


def time_left(run: Run) -> str:
    """Estimate the remaining time of a run, from its last iterations; empty if unknown."""
    train = run.config.get("train")
    planned = train.get("iterations") if isinstance(train, dict) else None
    seconds = [value for value in run.column("seconds")[-20:] if value is not None]
    if not isinstance(planned, int) or not seconds or not run.metrics:
        return ""
    remaining = planned - run.iterations()[-1]
    if remaining <= 0:
        return ""
    rest = clock_time(remaining * sum(seconds) / len(seconds))
    return f"iteration {run.iterations()[-1]} of {planned}, about {rest} left"


def _row(folder: RunFolder, run: Run) -> dict[str, Any]:
    key = next((k for k in FIRST if any(v is not None for v in run.column(k))), FIRST[0])
    values = [value for value in run.column(key) if value is not None]
    last = run.events[-1].get("time") if run.events else None
    part = max(1, len(values) // 10)
    return {
        "folder": folder,
        "status": folder.status(run),
        "iterations": run.iterations()[-1] if run.metrics else 0,
        "what": key,
        "first": number(sum(values[:part]) / part) if values else "–",
        "last": number(sum(values[-part:]) / part) if values else "–",
        "alarms": sum(event.get("kind") == "alarm" for event in run.events),
        "time": _clock(last),
    }


def _clock(time: object) -> str:
    try:
        return datetime.fromisoformat(str(time)).strftime("%d %b %H:%M")
    except ValueError:
        return ""
