"""Renders ``mmrl report RUN``: one HTML page that needs no other file."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.files import write_text
from mmrl.monitoring.progress import clock_time
from mmrl.monitoring.report.answers import rollouts
from mmrl.monitoring.report.charts import number
from mmrl.monitoring.report.curves import chart_sections, reward_chart, spread_out
from mmrl.monitoring.report.evidence import (
    Evaluation,
    read_evaluation,
    score,
    stuck,
    table,
    verdict,
)
from mmrl.monitoring.report.pictures import Film, Tile, compare, data_uri, save_picture
from mmrl.monitoring.report.runs import Run, iteration_of, read_run
from mmrl.monitoring.report.stages import parts, render_stages
from mmrl.monitoring.report.templates import environment

BEFORE_AFTER = "before_after"  # the file of before_after_picture, without its ending
MOST_PAIRS = 24
MOST_TIMES = 8
MOST_FILM_ROWS = 6
MOST_EVENTS = 60
MOST_ALARMS = 12


def write_report(run: Path | str) -> Path:
    """Write ``report.html`` (and before_after.png or .mp4 where possible) into a run folder;
    returns the page's path.

    Missing or broken parts of the run are left out and listed at the end of the page. Raises
    UserError for a folder without a run. For a run with stages the page holds those of all stages,
    which are also written into their folders.
    """
    if stages := parts(Path(run)):
        pages = [write_report(stage).read_text(encoding="utf-8") for stage in stages]
        runs = [read_run(stage) for stage in stages]
        return _written(Path(run), render_stages(Path(run), runs, pages))
    history = read_run(run)
    with suppress(UserError):  # the run has no such pictures
        before_after_picture(history.folder)
    return _written(history.folder, render(history))


def _written(folder: Path, page: str) -> Path:
    write_text(folder / "report.html", page)
    return folder / "report.html"


def before_after_picture(run: Path | str, most: int = 8) -> Path:
    """Write ``before_after.png``, of videos ``before_after.mp4``: base model above, trained one
    below, same prompts and noise.

    Raises UserError if the run has no samples of before and after.
    """
    history = read_run(run)
    before = history.sample_tiles("before")
    after = history.sample_tiles("after")
    if before and after:
        chosen = spread_out(list(range(min(len(before), len(after)))), most)
        captions = history.sample_captions("after")
        rows = {"before": [before[i] for i in chosen], "after": [after[i] for i in chosen]}
        picture = compare(rows, [captions[i] for i in chosen if i < len(captions)])
    else:
        first = history.sample("before")
        last = history.sample("after")
        if first is None or last is None:
            raise UserError(
                f"{history.folder} has no samples/before and samples/after (.png or .mp4); run: "
                f"mmrl evaluate {history.folder}"
            )
        picture = compare({"before": [first], "after": [last]}, [], side=480)
    return save_picture(picture, history.folder / BEFORE_AFTER)


def is_film(picture: Tile) -> bool:
    """Tell whether a page plays a picture."""
    return isinstance(picture, Film)


def render(run: Run) -> str:
    """Return the page as text."""
    env = environment(number=number, data_uri=data_uri, is_film=is_film)
    return str(env.get_template("report.html").render(content(run)))


def content(run: Run) -> dict[str, Any]:
    """Collect what the page shows, by the names of its template."""
    evaluation = read_evaluation(run)
    return {
        "run": run,
        "verdict": verdict(run, evaluation),
        "stuck": stuck(run),
        "tiles": headline(run, evaluation),
        "evaluation": evaluation,
        "table": table(evaluation),
        "reward": reward_chart(run),
        "sections": chart_sections(run),
        "pairs": pairs(run),
        "whole": whole_sheets(run),
        "film": film(run),
        "rollouts": rollouts(run),
        "events": run.events[-MOST_EVENTS:],
        "alarms": [event for event in run.events if event.get("kind") == "alarm"][:MOST_ALARMS],
        "made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
    }


def headline(run: Run, evaluation: Evaluation) -> list[dict[str, str]]:
    """Return the numbers on top: label, value, small print."""
    shown = []
    for name in evaluation.names()[:4]:
        if change := evaluation.change(name):
            before, after = change
            kind = "trained on" if name in evaluation.optimised else "not trained on"
            small = f"from {score(before.mean)} · {kind}"
            shown.append({"label": f"held-out {name}", "value": score(after.mean), "small": small})
    seconds = [value for value in run.column("seconds") if value is not None]
    if run.metrics:
        per = f"{number(sum(seconds) / len(seconds))} s each" if seconds else ""
        shown.append({"label": "iterations", "value": number(len(run.metrics)), "small": per})
    if seconds:
        shown.append(
            {"label": "training time", "value": clock_time(sum(seconds)), "small": device(run)}
        )
    return shown


def device(run: Run) -> str:
    gpus = run.machine.get("gpus") or []
    return (
        str(gpus[0])
        if gpus
        else (f"{run.machine.get('cores', '?')} CPU cores")
        if run.machine
        else ""
    )


def pairs(run: Run) -> list[dict[str, Any]]:
    """Return before and after of one prompt and noise, side by side, if the sheets can be split."""
    before = run.sample_tiles("before")
    after = run.sample_tiles("after")
    captions = run.sample_captions("after") or run.sample_captions("before")
    places = list(range(min(len(before), len(after))))[:MOST_PAIRS]
    return [
        {
            "before": before[i],
            "after": after[i],
            "caption": captions[i] if i < len(captions) else "",
        }
        for i in places
    ]


def whole_sheets(run: Run) -> list[dict[str, Any]]:
    """Return the whole before and after sheets, for runs without a recorded layout."""
    if run.sample_tiles("before") and run.sample_tiles("after"):
        return []
    sheets = [{"label": name, "picture": run.sample(name)} for name in ("before", "after")]
    return [sheet for sheet in sheets if sheet["picture"] is not None]


def film(run: Run) -> dict[str, Any]:
    """Show samples over time: one row per prompt and one column per iteration, or whole sheets if
    they cannot be split."""
    names = spread_out(run.sheets_over_time(), MOST_TIMES)
    columns = [(_moment(name), run.sample_tiles(name)) for name in names]
    columns = [(moment, cut) for moment, cut in columns if cut]
    if columns:
        rows = min(MOST_FILM_ROWS, *(len(cut) for _, cut in columns), MOST_FILM_ROWS)
        captions = run.sample_captions(names[-1])
        strip = [
            {
                "caption": captions[r] if r < len(captions) else "",
                "pictures": [cut[r] for _, cut in columns],
            }
            for r in range(rows)
        ]
        return {"moments": [moment for moment, _ in columns], "rows": strip, "sheets": []}
    sheets = [{"label": _moment(name), "picture": run.sample(name)} for name in names]
    return {
        "moments": [],
        "rows": [],
        "sheets": [sheet for sheet in sheets if sheet["picture"] is not None],
    }


def _moment(name: str) -> str:
    return f"iteration {iteration_of(name)}" if iteration_of(name) >= 0 else name
