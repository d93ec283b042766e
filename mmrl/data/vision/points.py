"""Checks points against their pictures, as ``boxes`` does boxes, and detects the coordinate space
of a data set.

A point in the wrong space earns 0 for every answer. Its two numbers tell less than the four of a
box: whether x comes first can be seen only if pictures are not square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.core.types import Prompt
from mmrl.data.vision import boxes
from mmrl.data.vision.boxes import (
    ENOUGH,
    FEW,
    INVERTED,
    OUTSIDE,
    Placed,
    Size,
    Verdict,
    inside,
    is_number,
)

KEYS = ("point_2d", "point", "coordinate", "coordinates", "click", "position")
LETTERS = ("x", "y")
STRAY = 0.2  # share of points outside from which all are taken for points of another space: of
# those of 0 to 1000 in a picture of 900 pixels, four of five lie inside
LARGE = 1200  # pixels of a side on which points that all end at 1000 are suspicious
MOST = 1e9  # pixels; also refuses infinity, NaN, and integers that no float can hold


@dataclass(frozen=True)
class Judged:
    """Holds the findings about the boxes or points (``noun``) of one space."""

    noun: str
    space: str
    placed: Sequence[Placed]
    verdict: Verdict

    def likely(self) -> str:
        """Name the space they are likely in, with the evidence and the remedy; "" if it is the
        declared one."""
        name, _, evidence = self.verdict.likely.partition(": ")
        return f"look like {name}: {evidence}; {boxes.remedy(name)}" if name else ""


def compared(prompts: Sequence[Prompt], sizes: Callable[[int], Size | None]) -> list[Judged]:
    """Compare boxes and points of prompts with their pictures; ``sizes``: of a prompt's picture, by
    its number."""
    by_noun = (
        ("boxes", boxes.placed_boxes(prompts, sizes), boxes.judge),
        ("points", placed_points(prompts, sizes), judge),
    )
    return [
        Judged(noun, space, placed, rule(placed, space))
        for noun, by_space, rule in by_noun
        for space, placed in by_space.items()
    ]


def judge(placed: Sequence[Placed], space: str) -> Verdict:
    """Compare points that are declared to be [x, y] in ``space`` with their pictures."""
    if not placed:
        return Verdict({})
    outside = [each for each in placed if not inside(each, space, each.box)]
    likely = _otherwise(placed, space, len(outside))
    rows = {each.row: f"point {list(each.box[:2])} {boxes.beyond(each, space)}" for each in outside}
    return Verdict(rows, likely, "" if likely else _doubt(placed, space))


def placed_points(
    prompts: Sequence[Prompt], sizes: Callable[[int], Size | None]
) -> dict[str, list[Placed]]:
    """List the points of prompts, as boxes of zero size, by the space that each prompt declares."""
    by_space: dict[str, list[Placed]] = {}
    for number, prompt in enumerate(prompts):
        points = listed(prompt)
        if not points:
            continue
        space = str(prompt.get("space") or "original")
        size = sizes(number)
        by_space.setdefault(space, []).extend(
            Placed(number, (*point, *point), size)
            for point in points
            if all(map(math.isfinite, point))
        )
    return by_space


def listed(prompt: Mapping[str, Any]) -> list[Sequence[float]]:
    """Return ``points`` of a prompt, else its ``point``, as rewards do; none if it has neither."""
    points = prompt.get("points")
    points = [prompt.get("point")] if points is None else points
    return [point for point in points if _is_point(point)] if _is_list(points) else []


def read(prompt: Prompt) -> Prompt:
    """Read points from a text, as answers are written, or from {x, y} or {point_2d}.

    What has no coordinates at all (words, a count) may mean something else, and stays. Raises
    ValueError for coordinates that are no points.
    """
    changed: Prompt = {}
    if _has_coordinates(value := _literal(prompt.get("point"))):
        changed["point"] = _point(value)
    if _has_coordinates(value := _literal(prompt.get("points"))):
        several = value if _is_list(value) and not _is_point(value) else [value]
        changed["points"] = [_point(each) for each in several]
    return {**prompt, **changed} if changed else prompt


def _literal(value: Any) -> Any:
    try:
        return boxes.literal(value, "points") if isinstance(value, str) else value
    except ValueError:
        return value


def _has_coordinates(value: Any) -> bool:
    """Tell whether a value is meant as coordinates, not as words or a number."""
    if _is_list(value):
        return any(is_number(entry) or _has_coordinates(entry) for entry in value)
    return isinstance(value, Mapping)


def _point(value: Any) -> list[float]:
    """Return one point as [x, y]. Raises ValueError."""
    point = value[0] if _is_list(value) and len(value) == 1 else value
    if isinstance(point, Mapping):
        key = next((key for key in KEYS if key in point), None)
        lettered = all(letter in point for letter in LETTERS)
        point = [point[letter] for letter in LETTERS] if lettered else point.get(key)
    if not _is_point(point) or not all(abs(number) < MOST for number in point):
        boxed = _is_list(point) and len(point) == 4
        hint = "; four numbers are a box, which belongs under boxes" if boxed else ""
        raise ValueError(f"point {value!r} is not two numbers [x, y]{hint}")
    return list(point)


def _is_point(value: Any) -> bool:
    return _is_list(value) and len(value) == 2 and all(map(is_number, value))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _otherwise(placed: Sequence[Placed], space: str, outside: int) -> str:
    """Name the space in which all these points would be right if they are wrong in the declared
    one, with the evidence."""
    count = len(placed)
    numbers = [number for each in placed for number in each.box]
    low, high = min(numbers), max(numbers)
    # the corner [0, 0] and its neighbours are possible pixels, and possible shares
    if space != "rel1" and low >= 0 and high <= 1 and any(0 < number < 1 for number in numbers):
        return f"rel1: all coordinates of {count} points lie between 0 and 1"
    rest = f"{outside} of {count} points lie outside in space {space}, and all"
    known = all(each.size is not None for each in placed)
    if outside >= max(FEW, INVERTED * count) and all(_fits_swapped(e, space) for e in placed):
        return f"yx: {outside} of {count} points lie outside as [x, y], and all inside as [y, x]"
    if outside < max(FEW, (STRAY if space == "original" else OUTSIDE) * count):
        return ""
    if space != "original" and known and all(inside(e, "original", e.box) for e in placed):
        return f"original: {rest} inside their pictures in pixels"
    if space != "rel1000" and low >= 0 and high <= 1000:
        return f"rel1000: {rest} coordinates lie between 0 and 1000, the largest is {high:g}"
    return ""


def _fits_swapped(each: Placed, space: str) -> bool:
    """Tell whether a point lies in its picture if y comes first."""
    y, x = each.box[:2]
    return space == "original" and each.size is not None and inside(each, space, (x, y, x, y))


def _doubt(placed: Sequence[Placed], space: str) -> str:
    """Report what only many points can suggest: along large sides all end at 1000."""
    if space != "original":
        return ""
    along = [
        coordinate
        for each in placed
        for coordinate, side in zip(each.box[:2], each.size or (0, 0))
        if side >= LARGE
    ]
    if len(along) < ENOUGH or not 900 <= max(along) <= 1000:
        return ""
    return (
        f"{len(along)} coordinates along sides of {LARGE} pixels and more all end at "
        f"{max(along):g}: are the points of 0 to 1000 (space: rel1000)?"
    )
