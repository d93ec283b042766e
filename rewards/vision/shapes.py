"""Reads boxes and points in every notation of models as numbers in the notation's own
coordinates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rewards.reading import (
    NOTHING,
    NUMBER,
    UNPARSEABLE,
    Parsed,
    Status,
    calm,
    fenced,
    final,
    loose_json,
    real,
    reals,
    strict_json,
    worst,
)

KEYS = {
    4: ("bbox_2d", "bbox", "box", "box_2d", "bounding_box", "position", "coordinates"),
    2: ("point_2d", "point", "coordinate", "coordinates", "position", "click"),
}
CORNERS = {4: ("x1", "y1", "x2", "y2"), 2: ("x", "y")}
LABELS = ("label", "name", "category", "class", "ref", "object")
CONFIDENCES = ("confidence", "conf", "score")
_PAIR = rf"[\(\[]\s*({NUMBER})\s*,\s*({NUMBER})\s*[\)\]]"
_REF = r"(?:<\|object_ref_start\|>|<ref>)(?P<label>[^<]*)(?:<\|object_ref_end\|>|</ref>)\s*"


@dataclass(frozen=True)
class Shape:
    """Holds a box or a point. ``values``: x0, y0, x1, y1 of a box, or x, y of a point, not sorted.
    ``space``: only of a notation that has its own ("rel1024" of PaliGemma, "rel100" of Molmo,
    "yx1000" is turned to "rel1000"); None: the model's."""

    values: tuple[float, ...]
    label: str | None = None
    confidence: float | None = None
    space: str | None = None

    def status(self, extent: tuple[float, float] | None) -> Status:
        """Return how the numbers can be read; ``extent``: width and height of the space, None if
        not known, with one unit of slack at its border."""
        if not all(math.isfinite(v) for v in self.values):
            return "out_of_range"
        if len(self.values) == 4:
            x0, y0, x1, y1 = self.values
            if x1 < x0 or y1 < y0:
                return "inverted"
            if x1 == x0 or y1 == y0:
                return "degenerate"
        slack = min(1.0, 0.01 * min(extent)) if extent else 0.0
        high = [extent[i % 2] + slack if extent else math.inf for i in range(len(self.values))]
        return "ok" if all(-slack <= v <= h for v, h in zip(self.values, high)) else "out_of_range"


def boxes(text: str) -> Parsed[list[Shape]]:
    """Read all boxes of the final answer: an empty list where it says that there are none."""
    return _shapes(text, 4)


def points(text: str) -> Parsed[list[Shape]]:
    """Read all points of the final answer; where it gives boxes, their centres."""
    parsed = _shapes(text, 2)
    if parsed.status != "unparseable":
        return parsed
    parsed = _shapes(text, 4)
    return Parsed([_centre(box) for box in parsed.value], parsed.status) if parsed.value else parsed


def _centre(box: Shape) -> Shape:
    x0, y0, x1, y1 = box.values
    return Shape(((x0 + x1) / 2, (y0 + y1) / 2), box.label, box.confidence, box.space)


def _shapes(text: str, size: int) -> Parsed[list[Shape]]:
    answer = final(text)
    body = calm(answer.value)
    if fenced(body).casefold().strip(" .") in NOTHING | {"[]", "[[]]", "{}"}:
        return Parsed([], answer.status)
    for read in (_own_notation, _from_json, _pairs, _bracketed, _from_loose_json, _bare):
        parsed = read(body, size)
        if parsed.value:
            return Parsed(parsed.value, worst(answer.status, parsed.status))
    return UNPARSEABLE


def _own_notation(body: str, size: int) -> Parsed[list[Shape]]:
    """Read PaliGemma's ``<loc0123>`` (y first, 1024 bins) and Molmo's ``<point x="61.5" y="40.6">``
    (per cent)."""
    if size == 4 and "<loc" in body:
        matches = re.findall(r"((?:<loc\d{4}>){4})\s*([^;<]*)", body)
        return Parsed([_paligemma(codes, label.strip() or None) for codes, label in matches])
    if size == 2 and "<point" in body:
        matches = re.findall(rf'\bx\d*\s*=\s*"({NUMBER})"\s+y\d*\s*=\s*"({NUMBER})"', body)
        return Parsed([Shape((float(x), float(y)), space="rel100") for x, y in matches])
    return UNPARSEABLE


def _paligemma(codes: str, label: str | None) -> Shape:
    y0, x0, y1, x1 = (float(code) for code in re.findall(r"\d{4}", codes))
    return Shape((x0, y0, x1, y1), label, space="rel1024")


def _from_json(body: str, size: int) -> Parsed[list[Shape]]:
    parsed = UNPARSEABLE if "<ref>" in body else strict_json(body)
    return _listed(parsed, size) if parsed.status == "ok" else UNPARSEABLE


def _from_loose_json(body: str, size: int) -> Parsed[list[Shape]]:
    return _listed(loose_json(body), size)


def _pairs(body: str, size: int) -> Parsed[list[Shape]]:
    """Read ``(x1,y1),(x2,y2)`` with or without Qwen2-VL's special tokens; for a point ``(x,
    y)``."""
    if "{" in body or (size == 2 and "<|box_start|>" in body):
        return UNPARSEABLE
    notation = rf"(?:{_REF})?(?:<\|box_start\|>|<point>)?\s*{_PAIR}"
    notation += rf"\s*,?\s*{_PAIR}" if size == 4 else ""
    shapes = [
        Shape(tuple(float(v) for v in match.groups()[1:]), _label(match["label"]))
        for match in re.finditer(notation, body)
    ]
    return Parsed(shapes)


def _bracketed(body: str, size: int) -> Parsed[list[Shape]]:
    """Read ``[x1, y1, x2, y2]`` anywhere, also inside InternVL's ``<ref>a
    cat</ref><box>[[...]]</box>``."""
    if "{" in body or (size == 2 and "<|box_start|>" in body):
        return UNPARSEABLE
    numbers = r"\s*,\s*".join([f"({NUMBER})"] * size)
    label = None
    shapes = []
    for match in re.finditer(rf"<ref>(?P<label>[^<]*)</ref>|[\[\(]\s*{numbers}\s*[\]\)]", body):
        if match["label"] is not None:
            label = _label(match["label"])
        else:
            shapes.append(Shape(tuple(float(v) for v in match.groups()[1:]), label))
    whole = (
        "<box>" in body
        or strict_json(body).status == "ok"
        or re.fullmatch(rf"\(\s*{numbers}\s*\)", body)
    )
    return Parsed(shapes, "ok" if whole else "repaired")


def _bare(body: str, size: int) -> Parsed[list[Shape]]:
    """Read nothing but numbers: ``12 30 40 50``."""
    numbers = re.findall(NUMBER, body)
    if not numbers or len(numbers) % size or re.search(r"[^\s,;]", re.sub(NUMBER, "", body)):
        return UNPARSEABLE
    values = [float(v) for v in numbers]
    return Parsed([Shape(tuple(values[i : i + size])) for i in range(0, len(values), size)])


def _label(text: Any) -> str | None:
    return str(text).strip() or None if isinstance(text, (str, int, float)) else None


def _listed(parsed: Parsed[Any], size: int) -> Parsed[list[Shape]]:
    """Read shapes of a JSON value; entries that are none are left out, which makes the answer
    "repaired"."""
    if parsed.value is None:
        return UNPARSEABLE
    value = parsed.value
    entries = value if isinstance(value, list) and numbers_of(value, size) is None else [value]
    shapes: list[Shape] = []
    dropped = False
    for entry in entries:
        before = len(shapes)
        shapes += _entry(entry, size)
        dropped |= len(shapes) == before
    return (
        Parsed(shapes, worst(parsed.status, "repaired" if dropped else "ok"))
        if shapes
        else UNPARSEABLE
    )


def _entry(entry: Any, size: int) -> Iterator[Shape]:
    """Read the shapes of one entry: four numbers, a record with a box, or a mapping of names to
    boxes."""
    values = numbers_of(entry, size)
    if values:
        yield Shape(values)
        return
    if not isinstance(entry, dict):
        return
    low = {str(key).casefold(): value for key, value in entry.items()}
    label = next((_label(low[key]) for key in LABELS if key in low), None)
    confidence = next((real(low[key]) for key in CONFIDENCES if key in low), None)
    for key in KEYS[size]:
        if key in low:
            yield from (
                Shape(
                    _turned(v) if key == "box_2d" else v,
                    label,
                    confidence,
                    "rel1000" if key == "box_2d" else None,
                )
                for v in _many(low[key], size)
            )
            return
    if all(key in low for key in CORNERS[size]):
        yield from (
            Shape(v, label, confidence) for v in _many([low[key] for key in CORNERS[size]], size)
        )
        return
    for name, value in entry.items():
        yield from (Shape(v, _label(name)) for v in _many(value, size))
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):  # {"objects": [{"bbox_2d": ...}]}
                yield from _entry(part, size)


def _turned(values: tuple[float, ...]) -> tuple[float, ...]:
    """Swap the axes of Gemini's ``box_2d``, which is y first and always 0 to 1000."""
    y0, x0, y1, x1 = values
    return x0, y0, x1, y1


def _many(value: Any, size: int) -> list[tuple[float, ...]]:
    single = numbers_of(value, size)
    if single:
        return [single]
    return (
        [v for v in (numbers_of(part, size) for part in value) if v]
        if isinstance(value, list)
        else []
    )


def numbers_of(value: Any, size: int) -> tuple[float, ...] | None:
    """Return ``size`` numbers, or for a box also two pairs of them."""
    if not isinstance(value, (list, tuple)):
        return None
    if size == 4 and len(value) == 2 and all(isinstance(v, list) and len(v) == 2 for v in value):
        value = [*value[0], *value[1]]
    if len(value) != size:
        return None
    return reals(value)
