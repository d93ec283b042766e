"""Shows runs in notebooks, with the parts of the report."""

from __future__ import annotations

from html import escape
from pathlib import Path

from PIL import Image

from mmrl.api.media import Samples, Video
from mmrl.monitoring.report import page
from mmrl.monitoring.report.pictures import Film, Tile
from mmrl.monitoring.report.runs import Run as History
from mmrl.monitoring.report.runs import read_run
from mmrl.monitoring.report.stages import parts, render_stages

HEIGHT = 720  # pixels of the frame that holds a report


def run_html(folder: Path) -> str:
    """Show a run in a notebook: its report in an iframe, which isolates styles."""
    if stages := parts(folder):
        runs = [read_run(stage) for stage in stages]
        text = render_stages(folder, runs, [page.render(run) for run in runs])
    else:
        text = page.render(read_run(folder))
    style = f"width:100%;height:{HEIGHT}px;border:1px solid #8884;border-radius:6px"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(text)}"></iframe>'


def gallery_of(history: History) -> dict[str, Samples]:
    """Return the samples of a run by the time of drawing, oldest first."""
    sheets: dict[str, Samples] = {}
    for name in ["before", *history.sheets_over_time(), "after"]:
        tiles = history.sample_tiles(name)
        if tiles:
            prompts = [{"text": text} for text in history.sample_captions(name)]
            sheets[name] = Samples([_shown(tile) for tile in tiles], prompts)
    answers: dict[str, Samples] = {}
    for line in history.rollouts:
        samples = answers.setdefault(f"iteration {line['iteration']}", Samples([]))
        for answer in line["answers"]:
            samples.append(str(answer["text"]))
            samples.prompts.append({"text": line["prompt"]})
            for name, value in answer["rewards"].items():
                number = float("nan") if value is None else float(value)
                samples.rewards.setdefault(name, []).append(number)
    return sheets | answers


def _shown(tile: Tile) -> Image.Image | Video:
    return Video(tile.frames, pace=tile.pace) if isinstance(tile, Film) else tile
