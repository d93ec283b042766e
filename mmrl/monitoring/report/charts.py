"""Draws line charts as inline SVG: readable without scripts, colours from the page's style sheet
(light and dark)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

Numbers = Sequence[float | None]
_Point = tuple[float, float, int]  # x, y and their index in the curve


@dataclass(frozen=True)
class Series:
    """Holds one curve. ``y`` may hold None (a gap), ``spread`` is a half-width drawn as a band,
    ``faint`` the raw curve."""

    label: str
    x: Numbers
    y: Numbers
    spread: Numbers | None = None
    faint: Numbers | None = None


@dataclass(frozen=True)
class Chart:
    """Plots one or more curves over a shared axis under a title, with at most six colours."""

    title: str
    series: list[Series]
    note: str = ""
    wide: bool = False
    zero: bool = False  # the axis starts at 0
    x_label: str = "iteration"

    def colour(self, index: int) -> int:
        return index % 6 + 1

    def latest(self) -> list[tuple[int, str, str]]:
        """Return (colour, label, last value) of each curve, for the legend."""
        last = [next((y for y in reversed(s.y) if y is not None), None) for s in self.series]
        return [
            (self.colour(i), s.label, number(y)) for i, (s, y) in enumerate(zip(self.series, last))
        ]

    def svg(self) -> Markup:
        """Draw the plot, without title and legend; twice for a wide chart, as a phone shows a
        narrow one."""
        narrow = _draw(self, 500, 220)
        if not self.wide:
            return narrow
        large = Markup('<div class="large">{}</div>').format(_draw(self, 1040, 310))
        return large + Markup('<div class="narrow">{}</div>').format(narrow)


def number(value: float | None, digits: int = 3) -> str:
    """Write a number for readers: ``0.833``, ``1.2e−5``, ``1,240``; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size < 1e6 and value == int(value):
        return _minus(f"{int(value):,}")
    if size < 1e-3 or size >= 1e6:
        return _power(value, digits - 1)
    return _minus(f"{value:,.0f}" if size >= 1000 else f"{value:.{digits}g}")


def tick_labels(values: Sequence[float]) -> list[str]:
    """Label evenly spaced values with enough decimals to distinguish them."""
    step = values[1] - values[0] if len(values) > 1 else abs(values[0]) if values else 0.0
    largest = max(map(abs, values), default=0.0)
    if step <= 0 or largest < 1e-3 or largest >= 1e6:
        return [number(value) for value in values]
    decimals = next((d for d in range(9) if abs(round(step, d) - step) < 1e-3 * step), 9)
    return [_minus(f"{value:,.{decimals}f}") for value in values]


def _power(value: float, decimals: int) -> str:
    mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return _minus(f"{mantissa}e{int(exponent)}")


def _minus(text: str) -> str:
    return text.replace("-", "−")


def smooth(values: Numbers, window: int) -> list[float | None]:
    """Return the exponential average over about ``window`` values, without the bias of starting at
    zero; gaps stay gaps."""
    keep = 1 - 2 / (window + 1)
    total = 0.0
    weight = 0.0
    averages = []
    for value in values:
        if value is not None:
            total = keep * total + value
            weight = keep * weight + 1
        averages.append(total / weight if value is not None else None)
    return averages


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers inside [low, high], 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _range(values: list[float], zero: bool) -> tuple[float, float]:
    low = min(values)
    high = max(values)
    if zero:
        low = min(low, 0.0)
        high = max(high, 0.0)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        room = abs(high) * 0.1 or 1.0
        return (low, high + room) if zero and low == 0 else (low - room, high + room)
    room = 0.05 * (high - low)
    return (low if zero and low == 0 else low - room), high + room


@dataclass(frozen=True)
class _Frame:
    """Maps data coordinates to pixels."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    left: int = 56
    right: int = 14
    top: int = 10
    bottom: int = 38

    def px(self, x: float) -> float:
        return self.left + (x - self.x[0]) / (self.x[1] - self.x[0]) * (
            self.width - self.left - self.right
        )

    def py(self, y: float) -> float:
        return self.top + (self.y[1] - y) / (self.y[1] - self.y[0]) * (
            self.height - self.top - self.bottom
        )


def _frame(chart: Chart, width: int, height: int) -> _Frame | None:
    xs = []
    ys = []
    for s in chart.series:
        known = [point for run in _runs(s.x, s.y) for point in run]
        xs += [x for x, _, _ in known]
        ys += [y for _, y, _ in known]
        if s.spread:
            ys += [y + sign * (s.spread[i] or 0.0) for _, y, i in known for sign in (-1, 1)]
        ys += [y for y in s.faint or () if y is not None]
    if not ys:
        return None
    low = min(xs)
    high = max(xs)
    x_range = (low, high) if high > low else (low - 0.5, high + 0.5)
    return _Frame(width, height, x_range, _range(ys, chart.zero))


def _draw(chart: Chart, width: int, height: int) -> Markup:
    frame = _frame(chart, width, height)
    if frame is None:
        return Markup('<p class="note">no values</p>')
    parts = [_axes(frame, chart.x_label)]
    for i, s in enumerate(chart.series):
        parts.append(_curve(frame, s, chart.colour(i)))
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(chart.title)}" '
        f'data-plot="{escape(json.dumps(_hover(frame, chart)))}">{"".join(parts)}</svg>'
    )


def _axes(f: _Frame, x_label: str) -> str:
    parts = []
    marks = ticks(*f.y)
    for y, label in zip(marks, tick_labels(marks)):
        parts.append(
            f'<line class="grid" x1="{f.left}" x2="{f.width - f.right}" '
            f'y1="{f.py(y):.1f}" y2="{f.py(y):.1f}"/>'
        )
        parts.append(
            f'<text x="{f.left - 8}" y="{f.py(y) + 4:.1f}" text-anchor="end">{label}</text>'
        )
    base = f.height - f.bottom
    parts.append(
        f'<line class="axis" x1="{f.left}" x2="{f.width - f.right}" y1="{base}" y2="{base}"/>'
    )
    for x in ticks(*f.x, about=6):
        if x == int(x):
            anchor = "end" if f.px(x) > f.width - f.right - 12 else "middle"
            parts.append(
                f'<text x="{f.px(x):.1f}" y="{base + 17}" text-anchor="{anchor}">{number(x)}</text>'
            )
    middle = (f.left + f.width - f.right) / 2
    parts.append(
        f'<text class="name" x="{middle}" y="{base + 33}" '
        f'text-anchor="middle">{escape(x_label)}</text>'
    )
    return "".join(parts)


def _curve(f: _Frame, s: Series, colour: int) -> str:
    parts = []
    for run in _runs(s.x, s.y):
        if s.spread:
            upper = [(x, y + (s.spread[i] or 0.0), i) for x, y, i in run]
            lower = [(x, y - (s.spread[i] or 0.0), i) for x, y, i in reversed(run)]
            parts.append(f'<polygon class="band c{colour}" points="{_points(f, upper + lower)}"/>')
        if len(run) == 1:
            x, y, _ = run[0]
            parts.append(
                f'<circle class="dot c{colour}" cx="{f.px(x):.1f}" cy="{f.py(y):.1f}" r="2.5"/>'
            )
        else:
            parts.append(f'<polyline class="line c{colour}" points="{_points(f, run)}"/>')
    for run in _runs(s.x, s.faint or ()):
        parts.insert(0, f'<polyline class="faint c{colour}" points="{_points(f, run)}"/>')
    return "".join(parts)


def _runs(xs: Numbers, ys: Numbers) -> list[list[_Point]]:
    """Return the stretches of points without a gap."""
    runs: list[list[_Point]] = [[]]
    for i, (x, y) in enumerate(zip(xs, ys)):
        if x is None or y is None:
            runs.append([])
        else:
            runs[-1].append((x, y, i))
    return [run for run in runs if run]


def _points(f: _Frame, points: list[_Point]) -> str:
    return " ".join(f"{f.px(x):.1f},{f.py(y):.1f}" for x, y, _ in points)


def _hover(f: _Frame, chart: Chart) -> dict[str, Any]:
    """Return the data by which the page's script shows values under the pointer."""
    rows: dict[float, list[str]] = {}
    for s in chart.series:
        for i, (x, y) in enumerate(zip(s.x, s.y)):
            if x is not None and y is not None:
                spread = f" ± {number(s.spread[i])}" if s.spread and s.spread[i] is not None else ""
                rows.setdefault(x, []).append(f"{s.label} {number(y)}{spread}")
    return {
        "unit": chart.x_label,
        "points": [[x, round(f.px(x), 1), text] for x, text in sorted(rows.items())],
    }
