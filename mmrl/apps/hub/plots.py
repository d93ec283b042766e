"""Draws the curves of a model card as a PNG file, since hub pages show neither SVG nor scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from mmrl.monitoring.report.charts import Numbers, number, smooth, tick_labels, ticks
from mmrl.monitoring.report.runs import Run

PANELS = (
    ("reward/mean", "training reward"),
    ("eval/", "held-out reward"),
    ("loss", "loss"),
    ("kl", "KL to the reference"),
    ("samples/diversity", "diversity of samples"),
    ("answer/tokens", "tokens of an answer"),
    ("grad_norm", "gradient norm"),
)
MOST_PANELS = 4
WIDTH, HEIGHT = 560, 300  # of a panel
SCALE = 2  # supersampling for smooth lines
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 40, 40


def plot_curves(run: Run, path: Path) -> bool:
    """Write the curves of a run, at most four panels; False if there is nothing to draw."""
    panels = _panels(run)[:MOST_PANELS]
    if not panels:
        return False
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    sheet = Image.new("RGB", (columns * WIDTH * SCALE, rows * HEIGHT * SCALE), "white")
    for place, (title, values) in enumerate(panels):
        row, column = divmod(place, columns)
        corner = (column * WIDTH * SCALE, row * HEIGHT * SCALE)
        sheet.paste(_panel(title, run.iterations(), values), corner)
    half = (sheet.width // SCALE, sheet.height // SCALE)
    sheet.resize(half, Image.Resampling.LANCZOS).save(path, optimize=True)
    return True


def _panels(run: Run) -> list[tuple[str, Numbers]]:
    known = run.measured()
    panels: list[tuple[str, Numbers]] = []
    for name, title in PANELS:
        prefix = name.endswith("/")
        keys = [key for key in known if (key.startswith(name) if prefix else key == name)]
        for key in keys[:2]:
            label = f"{title} {key.removeprefix(name)}" if prefix else title
            panels.append((label, run.column(key)))
    return panels


def _panel(title: str, x: Sequence[int], values: Numbers) -> Image.Image:
    picture = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), "white")
    draw = ImageDraw.Draw(picture)
    bold = ImageFont.load_default(17 * SCALE)
    small = ImageFont.load_default(13 * SCALE)
    points = [(i, v) for i, v in zip(x, values) if v is not None and math.isfinite(v)]
    low, high = _range([v for _, v in points])
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)

    def place(i: float, v: float) -> tuple[float, float]:
        across = LEFT + (i - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        down = TOP + (high - v) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return across * SCALE, down * SCALE

    marks = ticks(low, high)
    for mark, label in zip(marks, tick_labels(marks), strict=True):
        _, y = place(first, mark)
        draw.line([(LEFT * SCALE, y), ((WIDTH - RIGHT) * SCALE, y)], "#ecebe7", SCALE)
        draw.text(((LEFT - 8) * SCALE, y), label, "#62666b", small, anchor="rm")
    for mark in ticks(first, last, 6):
        if mark == int(mark):
            x_place, _ = place(mark, low)
            below = (x_place, (HEIGHT - BOTTOM + 6) * SCALE)
            draw.text(below, _plain(number(mark)), "#62666b", small, anchor="ma")
    spot = ((LEFT + WIDTH - RIGHT) / 2 * SCALE, (HEIGHT - 18) * SCALE)
    draw.text(spot, "iteration", "#62666b", small, anchor="ma")
    draw.text((LEFT * SCALE, 10 * SCALE), title, "#1d1f21", bold)
    smoothed = smooth([v for _, v in points], max(3, len(points) // 10))
    line = [place(i, v) for (i, _), v in zip(points, smoothed) if v is not None]
    if len(points) > 2:
        draw.line([place(i, v) for i, v in points], "#bcd0f0", SCALE)
        draw.line(line, "#2a68cf", 2 * SCALE, joint="curve")
    else:
        for centre in (place(i, v) for i, v in points):
            draw.circle(centre, 3 * SCALE, "#2a68cf")
    return picture


def _plain(label: str) -> str:
    """Write the minus as a hyphen: Pillow's default font has no minus."""
    return label.replace("\u2212", "-")


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - room, high + room
