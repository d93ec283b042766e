"""Renders the report of a run with stages: one page that holds those of all its stages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from mmrl.monitoring.report.charts import number
from mmrl.monitoring.report.runs import Run, is_run

PART = re.compile(r"\d+-.+")
COLUMNS = (("loss", "loss"), ("eval/loss", "held-out loss"), ("reward/mean", "reward"))


def parts(folder: Path) -> list[Path]:
    """List the folders of a run's stages that have begun, in order; none where it has none."""
    config = folder / "config.yaml"
    if not config.is_file() or not re.search(r"^stages:", config.read_text(), re.MULTILINE):
        return []
    begun = [part for part in folder.iterdir() if PART.fullmatch(part.name) and is_run(part)]
    return sorted(begun, key=lambda part: int(part.name.partition("-")[0]))


def render_stages(folder: Path, runs: Sequence[Run], pages: Sequence[str]) -> str:
    """Return the page as text: a row for every stage, and their whole pages below."""
    rows = "\n".join(_row(run) for run in runs)
    heads = "".join(f"<th>{label}, first to last</th>" for _, label in COLUMNS)
    frames = "\n".join(
        f'<h2 id="{escape(run.folder.name)}">{escape(run.folder.name)}</h2>\n'
        f'<iframe title="{escape(run.folder.name)}" srcdoc="{escape(page)}" '
        f"onload=\"this.style.height=this.contentDocument.documentElement.scrollHeight+40+'px'\">"
        f"</iframe>"
        for run, page in zip(runs, pages, strict=True)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(folder.name)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #ccc; }}
iframe {{ width: 100%; min-height: 60vh; border: 1px solid #ccc; }}
</style>
</head>
<body>
<h1>{escape(folder.name)}</h1>
<p>{len(runs)} stages, each from the weights of the one before.</p>
<table>
<tr><th>stage</th><th>objective</th><th>iterations</th>{heads}</tr>
{rows}
</table>
{frames}
</body>
</html>
"""


def _row(run: Run) -> str:
    objective = run.config.get("objective", "") if run.config else ""
    name = objective if isinstance(objective, str) else next(iter(objective), "")
    cells = [
        f'<a href="#{escape(run.folder.name)}">{escape(run.folder.name)}</a>',
        escape(str(name)),
        str(len(run.metrics)),
        *(_ends(run, key) for key, _ in COLUMNS),
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _ends(run: Run, key: str) -> str:
    values = [value for value in run.column(key) if value is not None]
    return f"{number(values[0])} to {number(values[-1])}" if values else ""
