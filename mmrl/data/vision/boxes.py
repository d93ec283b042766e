"""Checks boxes against their pictures, and detects the coordinate space of a data set.

Boxes in the wrong space waste a whole training: every answer earns 0. One row cannot tell, but a
data set can: relative boxes never exceed 1, boxes of 0 to 1000 exceed smaller pictures, and
[x, y, width, height] read as corners is often inverted.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from mmrl.core.types import Prompt

Box = Sequence[float]  # four numbers, as the data have them
Size = tuple[float, float]  # width and height of the picture
SLACK = 0.05  # of a side by which a box may exceed the picture: annotators are not exact
INVERTED = 0.1  # share of inverted boxes from which they are taken for [x, y, width, height]
OUTSIDE = 0.5  # share of boxes outside from which all are taken for boxes of another space
FEW = 3  # boxes outside that may be single mistakes
ENOUGH = 20  # boxes needed for a warning that no single box proves
LIMITS = {"rel1": 1.0, "rel1000": 1000.0}
ANSWER = re.compile(r"\s*<answer>(.*)</answer>\s*", re.DOTALL)
KEYS = ("bbox_2d", "bbox", "box", "Position", "position", "box_2d")


@dataclass(frozen=True)
class Placed:
    """Holds a box and the size of its picture; None if that is unknown."""

    row: int
    box: Box
    size: Size | None


@dataclass(frozen=True)
class Verdict:
    """Says what is wrong with the boxes of a data set: of ``rows``, each with why; and of all of
    them (``likely``), which no row can be blamed for; ``doubt`` is less certain."""

    rows: Mapping[int, str]
    likely: str = ""
    doubt: str = ""


def judge(placed: Sequence[Placed], space: str) -> Verdict:
    """Compare boxes that are declared to be corners in ``space`` with their pictures."""
    if not placed:
        return Verdict({})
    inverted = [each for each in placed if not _ordered(each.box)]
    outside = [each for each in placed if not inside(each, space, each.box)]
    likely = _otherwise(placed, space, len(inverted), len(outside))
    rows = {each.row: f"box {list(each.box)} {beyond(each, space)}" for each in outside}
    rows |= {
        each.row: f"box {list(each.box)} is empty or inverted; expected x0 < x1 and y0 < y1"
        for each in inverted
    }
    return Verdict(rows, likely, "" if likely else _doubt(placed, space))


def placed_boxes(
    prompts: Sequence[Prompt], sizes: Callable[[int], Size | None]
) -> dict[str, list[Placed]]:
    """List the boxes of prompts by the space that each prompt declares; ``sizes``: of a prompt's
    picture, by its number."""
    by_space: dict[str, list[Placed]] = {}
    for number, prompt in enumerate(prompts):
        boxes = prompt.get("boxes")
        if not boxes:
            continue
        flat = not any(isinstance(value, Sized) for value in boxes)
        space = str(prompt.get("space") or "original")
        size = sizes(number)
        by_space.setdefault(space, []).extend(
            Placed(number, box, size) for box in ([boxes] if flat else boxes) if _is_box(box)
        )
    return by_space


def said_size(prompt: Prompt) -> Size | None:
    """Return the size of the picture that a prompt states, ``width`` and ``height``."""
    sides = (prompt.get("width"), prompt.get("height"))
    return sides if all(is_number(side) and side > 0 for side in sides) else None  # type: ignore


def remedy(likely: str) -> str:
    """Return the remedy for boxes or points of this kind."""
    if likely.startswith("yx"):
        return "write [x, y]" if likely == "yx" else "write [x0, y0, x1, y1]"
    return f"set {'box_format' if likely in ('xywh', 'xyxy') else 'space'}: {likely}"


def written(value: Any) -> Any:
    """Read boxes from a text, as answers are written: JSON or a Python literal, perhaps in
    ``<answer>`` tags; lists of four numbers or objects with bbox_2d or the like."""
    if isinstance(value, str):
        value = literal(value, "boxes")
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, (list, tuple)) and len(value) == 4 and all(map(is_number, value)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    return [_box_of(entry) if isinstance(entry, Mapping) else entry for entry in value]


def literal(text: str, noun: str) -> Any:
    """Read JSON or a Python literal in ``<answer>`` tags or a fence. Raises ValueError."""
    text = re.sub(r"^```\w*|```$", "", unwrapped(text)).strip()
    try:
        return json.loads(text)
    except ValueError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(f"{noun} {text[:60]!r} are no list of {noun}") from error


def unwrapped(text: str) -> str:
    """Return the text between ``<answer>`` tags, if they hold the whole text; else the text."""
    match = ANSWER.fullmatch(text)
    return match.group(1).strip() if match and "<answer>" not in match.group(1) else text


def _box_of(entry: Mapping[str, Any]) -> Any:
    key = next((key for key in KEYS if key in entry), None)
    if key is None:
        raise ValueError(f"a box has none of {', '.join(KEYS)}; it has {', '.join(entry)}")
    return entry[key]


def _is_box(value: Any) -> bool:
    """Tell whether a value is four finite numbers; other checks report anything else."""
    four = isinstance(value, (list, tuple)) and len(value) == 4
    return four and all(is_number(number) and math.isfinite(number) for number in value)


def is_number(value: Any) -> bool:
    """Tell whether a value is a number, and not true or false."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _ordered(box: Box) -> bool:
    return box[0] < box[2] and box[1] < box[3]


def extent(each: Placed, space: str) -> Size | None:
    """Return the largest x and y of a space, for pixels the sides of the picture; None if they are
    unknown."""
    if limit := LIMITS.get(space):
        return limit, limit
    return each.size if space == "original" else None


def inside(each: Placed, space: str, box: Box) -> bool:
    """Tell whether a box lies in the picture of ``each``, within the ``SLACK`` of annotators."""
    limits = extent(each, space)
    if limits is None:
        return min(box) >= 0 or space != "original"
    width, height = limits
    slack = [SLACK * width + 1e-9, SLACK * height + 1e-9]
    if space not in LIMITS:
        slack = [max(2.0, margin) for margin in slack]
    x0, y0, x1, y1 = box
    low = x0 >= -slack[0] and y0 >= -slack[1]
    return low and x1 <= width + slack[0] and y1 <= height + slack[1]


def beyond(each: Placed, space: str) -> str:
    """Describe what a box or point lies outside of."""
    limits = extent(each, space)
    if limits is None:
        return "lies outside every picture"
    if space in LIMITS:
        return f"lies outside the range 0 to {limits[0]:g} of space: {space}"
    return f"lies outside its picture of {limits[0]:g} x {limits[1]:g} pixels"


def _otherwise(placed: Sequence[Placed], space: str, inverted: int, outside: int) -> str:
    """Name the space or format in which all these boxes would be right if they are wrong in the
    declared one, with the evidence."""
    count = len(placed)
    largest = max(max(each.box) for each in placed)
    if space != "rel1" and largest <= 1 and all(min(each.box) >= 0 for each in placed):
        return f"rel1: all coordinates of {count} boxes lie between 0 and 1"
    sided = inverted >= max(2, INVERTED * count)
    if sided and all(_fits_as_sides(each, space) for each in placed):
        return (
            f"xywh: {inverted} of {count} boxes are inverted as corners, and all lie in their "
            f"pictures as [x, y, width, height]"
        )
    if outside >= max(FEW, INVERTED * count) and all(_fits_as_corners(e, space) for e in placed):
        return (
            f"xyxy: {outside} of {count} boxes lie outside as [x, y, width, height], and all lie "
            f"in their pictures as corners"
        )
    if outside >= max(FEW, INVERTED * count) and all(_fits_swapped(e, space) for e in placed):
        return (
            f"yxyx: {outside} of {count} boxes lie outside as [x0, y0, x1, y1], and all inside as "
            f"[y0, x0, y1, x1]"
        )
    if outside < max(FEW, OUTSIDE * count):
        return ""
    rest = f"{outside} of {count} boxes lie outside in space {space}, and all"
    known = all(each.size is not None for each in placed)
    if space != "original" and known and all(inside(e, "original", e.box) for e in placed):
        return f"original: {rest} inside their pictures in pixels"
    if space != "rel1000" and largest <= 1000 and all(min(e.box) >= 0 for e in placed):
        return f"rel1000: {rest} coordinates lie between 0 and 1000, the largest is {largest:g}"
    return ""


def _fits_as_sides(each: Placed, space: str) -> bool:
    x, y, width, height = each.box
    known = extent(each, space) is not None
    corners = (x, y, x + width, y + height)
    return known and width > 0 and height > 0 and inside(each, space, corners)


def _fits_as_corners(each: Placed, space: str) -> bool:
    """Tell whether a box read as a corner and sides would be right as corners."""
    x0, y0, x1, y1 = each.box
    corners = (x0, y0, x1 - x0, y1 - y0)
    return extent(each, space) is not None and _ordered(corners) and inside(each, space, corners)


def _fits_swapped(each: Placed, space: str) -> bool:
    """Tell whether a box lies in its picture if y comes first."""
    y0, x0, y1, x1 = each.box
    known = space == "original" and each.size is not None
    return known and x0 < x1 and y0 < y1 and inside(each, space, (x0, y0, x1, y1))


def _doubt(placed: Sequence[Placed], space: str) -> str:
    """Report what only many boxes can suggest: large pictures whose boxes end at 1000."""
    large = [each for each in placed if each.size and min(each.size) >= 1100]
    if space == "original" and len(large) >= ENOUGH:
        largest = max(max(each.box) for each in large)
        if 900 <= largest <= 1000:
            return (
                f"{len(large)} boxes of pictures with sides above 1100 pixels all end at "
                f"{largest:g}: are they of 0 to 1000 (space: rel1000)?"
            )
    return ""
