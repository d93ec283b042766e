"""Parses boxes and points in any model's notation, in the notation's own coordinates."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from rewards.answers.notations import MOST, NOTATIONS, Shape, label_of
from rewards.answers.reading import (
    NOTHING,
    NUMBER,
    UNPARSEABLE,
    Parsed,
    calm,
    fenced,
    final,
    real,
    reals,
    strict_json,
    worst,
)
from rewards.answers.reading.objects import QUOTE, several, too_deep, whole_json

# keys of a box or a point in a record; the first present counts
KEYS = {
    4: (
        "bbox_2d",
        "bbox",
        "box",
        "box_2d",
        "bounding_box",
        "boundingbox",
        "bounding box",
        "bboxes",
        "boxes",
        "position",
        "coordinates",
        "region",
        "rect",
        "xyxy",
    ),
    2: (
        "point_2d",
        "point",
        "points",
        "coordinate",
        "coordinates",
        "position",
        "click",
        "center",
        "location",
        "xy",
    ),
}
CORNERS = {
    4: (
        ("x1", "y1", "x2", "y2"),
        ("x0", "y0", "x1", "y1"),
        ("xmin", "ymin", "xmax", "ymax"),
        ("x_min", "y_min", "x_max", "y_max"),
        ("left", "top", "right", "bottom"),
    ),
    2: (("x", "y"),),
}
SIDES = (("x", "y", "width", "height"), ("x", "y", "w", "h"), ("left", "top", "width", "height"))
LABELS = (
    "label",
    "name",
    "category",
    "category_name",
    "class",
    "class_name",
    "object_name",
    "ref",
    "object",
    "text_content",
    "phrase",
    "text",
    "description",
    "caption",
    "entity",
    "element",
    "type",
)
CONFIDENCES = ("confidence", "conf", "score")
_GAP = r"\s{0,9}[,;\s]\s{0,9}"
_PAIR = rf"[\(\[]\s{{0,9}}({NUMBER})\s{{0,9}},\s{{0,9}}({NUMBER})\s{{0,9}}[\)\]]"
_SOME = {size: re.compile(_GAP.join([f"({NUMBER})"] * size)) for size in (4, 2)}
_ONE = re.compile(rf"({NUMBER})(?!\w)")
_TEXT = re.compile(r"""["']?([^"'\n{}]{1,200})""")
_CUT = re.compile(r"[.,;\n\[\]()]")
_KEY = re.compile(r"""\b([^\W\d]\w{0,19}+)["']?\s{0,9}[:=]\s{0,9}["']?[\[(]{0,2}""")
_NUMBERED = {key for size in (4, 2) for keys in (*CORNERS[size], *SIDES) for key in keys}
# keys that describe a record itself
_NAMED = {size: _NUMBERED | {*LABELS, *CONFIDENCES, *KEYS[size]} for size in (4, 2)}
# what follows a key outside of JSON
_BEHIND = {
    size: dict.fromkeys((*_NUMBERED, *CONFIDENCES), _ONE)
    | dict.fromkeys(LABELS, _TEXT)
    | dict.fromkeys(KEYS[size], _SOME[size])
    for size in (4, 2)
}
# one of these must be present
_NEEDED = {
    size: {*KEYS[size], *(key for keys in forms for key in keys)}
    for size, forms in ((4, (*CORNERS[4], *SIDES)), (2, CORNERS[2]))
}
_PAIRS = {
    2: re.compile(_PAIR),
    4: re.compile(rf"{_PAIR}\s{{0,9}}(?:,|to|-|->|bis|\u5230)?\s{{0,9}}{_PAIR}"),
}
_LISTED = {size: r"\s{0,9},\s{0,9}".join([f"({NUMBER})"] * size) for size in (4, 2)}
_IN_BRACKETS = {
    size: re.compile(rf"[\[\(]\s{{0,9}}{numbers}\s{{0,9}}[\]\)]")
    for size, numbers in _LISTED.items()
}
FOUND = re.compile(
    r"^.*\b(?:found|see|detect(?:ed)?|shows?|contains?|there (?:is|are))\s+(?=\S)|"
    r"\s+(?:is |are )?(?:located|found|positioned|situated)\s+at$",
    re.I,
)
_BETWEEN = re.compile(r"\b(?:is|are|at|and|with|the)\b")
_ARTICLE = re.compile(r"^(?:an?|the|one)\s+", re.I)
_NO_NUMBER = re.compile(r"[^\s\d.,;eE+-]")


def boxes(text: str) -> Parsed[list[Shape]]:
    """Read all boxes of the final answer: an empty list where it says that there are none."""
    return _shapes(text, (4,))


def points(text: str) -> Parsed[list[Shape]]:
    """Read all points of the final answer; where it gives boxes, their centres."""
    parsed = _shapes(text, (2, 4))
    centres = [s if len(s.values) == 2 else _centre(s) for s in parsed.value or ()]
    return parsed if parsed.value is None else Parsed(centres, parsed.status)


def _centre(box: Shape) -> Shape:
    x0, y0, x1, y1 = box.values
    return Shape(((x0 + x1) / 2, (y0 + y1) / 2), box.label, box.confidence, box.space)


def _shapes(text: str, sizes: tuple[int, ...]) -> Parsed[list[Shape]]:
    """Read the shapes of an answer: points before boxes where ``sizes`` has both."""
    answer = final(text)
    body = calm(answer.value)
    if fenced(body).casefold().strip(" .") in NOTHING | {"[]", "[[]]", "{}"}:
        return Parsed([], answer.status)
    for notation in NOTATIONS:
        listed = notation.shapes(body, sizes)
        if len(listed) > MOST:
            return UNPARSEABLE
        if listed:
            return Parsed(listed, answer.status)
    written = _json_of(body)
    if isinstance(written.value, list) and len(written.value) > MOST:
        return UNPARSEABLE
    for size in sizes:
        for read in (partial(_from_json, written), _pairs, _bracketed, _keyed, _bare):
            parsed = read(body, size)
            if parsed.value and len(parsed.value) > MOST:
                return UNPARSEABLE
            if parsed.value:
                return Parsed(parsed.value, worst(answer.status, parsed.status))
    return UNPARSEABLE


def _json_of(body: str) -> Parsed[Any]:
    """Read JSON, or a value of Python, whole."""
    inside = fenced(body)
    if too_deep(inside):
        return UNPARSEABLE
    parsed = whole_json(inside)
    if parsed.status == "ok" or not inside.startswith(("[", "{")):
        return parsed
    value = several(QUOTE.sub('"', inside) if "'" in inside else inside)
    return UNPARSEABLE if value is None else Parsed(value, "repaired")


def _from_json(parsed: Parsed[Any], body: str, size: int) -> Parsed[list[Shape]]:
    """Read the shapes of JSON; a list of numbers after a name is for ``_bracketed``."""
    if parsed.status == "ok" and numbers_of(parsed.value, size):
        labelled = re.match(r"[^\[({`<\d]*[^\W\d]", body)
        return UNPARSEABLE if labelled else _listed(parsed, size)
    return _listed(parsed, size)


def _pairs(body: str, size: int) -> Parsed[list[Shape]]:
    """Read ``(x1,y1),(x2,y2)``; for a point ``(x, y)``."""
    if "{" in body:
        return UNPARSEABLE
    matches = islice(_PAIRS[size].finditer(body), MOST + 1)
    listed = [Shape(tuple(map(float, match.groups()))) for match in matches]
    return Parsed(listed)


def _bracketed(body: str, size: int) -> Parsed[list[Shape]]:
    """Read ``[x1, y1, x2, y2]`` anywhere, with the words in front of it as its label."""
    if "{" in body:
        return UNPARSEABLE
    matches = [*islice(_IN_BRACKETS[size].finditer(body), MOST + 1)]
    listed = []
    end = 0
    for match in matches:
        words = body[max(end, match.start() - 60) : match.start()].strip(" \t\n,;")
        words = _CUT.split(words)[-1] if words else ""
        label = _named(words) if words else None
        listed.append(Shape(tuple(map(float, match.groups())), label))
        end = match.end()
    if not listed:
        return UNPARSEABLE
    whole = strict_json(body).status == "ok" or re.fullmatch(rf"\(\s*{_LISTED[size]}\s*\)", body)
    return Parsed(listed, "ok" if whole else "repaired")


def _named(words: str) -> str | None:
    """Return the label in the words before a box: those before a colon, else the last of them,
    without articles."""
    words = words.strip(" \t-*")
    words = FOUND.sub("", words)
    if not words.endswith(":"):
        parts = (part.strip() for part in _BETWEEN.split(words))
        words = next((part for part in reversed([*parts]) if part), "")
    name = _ARTICLE.sub("", words.strip(" \t:*"))
    return label_of(name)


def _keyed(body: str, size: int) -> Parsed[list[Shape]]:
    """Read keys followed by numbers, in truncated JSON or outside JSON: ``bbox: 1, 2, 3, 4``,
    ``x1=1, y1=2, ...``. The label is that in the box's braces."""
    records = _records(body)
    if all(_NEEDED[size].isdisjoint(ends) for _, ends in records):
        return UNPARSEABLE
    listed: list[Shape] = []
    for record, ends in records:
        values = {}
        for key in filter(_BEHIND[size].get, ends):
            for end in reversed(ends[key]):  # the last counts
                if match := _BEHIND[size][key].match(record, end):
                    values[key] = _written(match)
                    break
        if values:
            shapes = _of_keys(values, size)
            listed += _entry(values, size) if shapes is None else shapes
        if len(listed) > MOST:
            break
    return Parsed(listed, "repaired") if listed else UNPARSEABLE


@lru_cache(maxsize=1)  # boxes and points are searched in turn
def _records(body: str) -> list[tuple[str, dict[str, list[int]]]]:
    """Split a text after braces, and return the keys of each part with where they end."""
    records = []
    for record in body.split("}") if ":" in body or "=" in body else ():
        ends: dict[str, list[int]] = {}
        for key in _KEY.finditer(record):
            ends.setdefault(key[1].casefold(), []).append(key.end())
        if ends:
            records.append((record, ends))
    return records


def _written(found: re.Match[str]) -> str | float | list[float]:
    """Return the value after a key: a name, a number or several numbers."""
    if found.re is _TEXT:
        return found[1]
    return float(found[1]) if found.re is _ONE else [*map(float, found.groups())]


def _bare(body: str, size: int) -> Parsed[list[Shape]]:
    """Read nothing but numbers: ``12 30 40 50``."""
    parts = [] if _NO_NUMBER.search(body) else re.split(r"[\s,;]+", body.strip(" \t\n,;"))
    even = 0 < len(parts) <= MOST * size and len(parts) % size == 0
    values = reals(parts) if even else None
    if values is None:
        return UNPARSEABLE
    return Parsed([Shape(values[i : i + size]) for i in range(0, len(values), size)])


def _label(text: Any) -> str | None:
    return str(text).strip() or None if isinstance(text, (str, int, float)) else None


def _listed(parsed: Parsed[Any], size: int) -> Parsed[list[Shape]]:
    """Read the shapes of a JSON value; other entries are left out, which makes the answer
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
        if len(shapes) > MOST:
            break
    return (
        Parsed(shapes, worst(parsed.status, "repaired" if dropped else "ok"))
        if shapes
        else UNPARSEABLE
    )


def _entry(entry: Any, size: int) -> Iterator[Shape]:
    """Read the shapes of one entry: four numbers, a record with a box, or a mapping of names to
    boxes."""
    values = None if isinstance(entry, dict) else numbers_of(entry, size)
    if values:
        yield Shape(values)
        return
    if not isinstance(entry, dict):
        return
    low = {str(key).casefold(): value for key, value in entry.items()}
    if not _NAMED[size].isdisjoint(low) and (shapes := _of_keys(low, size)) is not None:
        yield from shapes
        return
    for name, value in entry.items():
        if not isinstance(value, (dict, list, str)):
            continue
        parts = value if isinstance(value, list) else [value]
        records = [part for part in parts if isinstance(part, dict)]
        if not records and isinstance(value, (list, str)):
            yield from (Shape(v, _label(name)) for v in _many(value, size))
        for record in records:  # {"objects": [{"bbox_2d": ...}]}, {"dog": {"x1": ...}}
            named = _label(name) if record is value else None
            for shape in _entry(record, size):
                yield shape if shape.label or not named else replace(shape, label=named)


def _of_keys(record: Mapping[Any, Any], size: int) -> list[Shape] | None:
    """Read the shapes under a record's keys; None if no key names a shape."""
    label = _label(record.get(_first(LABELS, record)))
    confidence = real(record.get(_first(CONFIDENCES, record)))
    if key := _first(KEYS[size], record):
        turned, space = (_turned, "rel1000") if key == "box_2d" else (tuple, None)
        many = _many(record[key], size)
        return [Shape(turned(values), label, confidence, space) for values in many]
    values = _cornered(record, size)
    return [Shape(values, label, confidence)] if values else None


def _first(keys: Iterable[str], record: Container[str]) -> str | None:
    """Return the first of the keys that a record has; None if it has none."""
    return next(filter(record.__contains__, keys), None)


def _turned(values: tuple[float, ...]) -> tuple[float, ...]:
    """Swap the axes of Gemini's ``box_2d``, which is y first and always in 0 to 1000."""
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


def _cornered(record: Mapping[Any, Any], size: int) -> tuple[float, ...] | None:
    """Return the numbers of a record with a key for each: corners, or a corner and two sides."""
    if _NUMBERED.isdisjoint(record):
        return None
    for keys in CORNERS[size]:
        if all(key in record for key in keys):
            return reals([record[key] for key in keys])
    for keys in SIDES if size == 4 else ():
        if all(key in record for key in keys):
            values = reals([record[key] for key in keys])
            return values and (*values[:2], values[0] + values[2], values[1] + values[3])
    return None


def numbers_of(value: Any, size: int) -> tuple[float, ...] | None:
    """Return ``size`` numbers: of a list, a record or a text; for a box also two pairs of them."""
    if isinstance(value, dict):
        return _cornered({str(key).casefold(): part for key, part in value.items()}, size)
    if isinstance(value, str):
        bare = value.strip(" \t\n[]()")[:200]
        value = re.split(_GAP, bare) if re.fullmatch(rf"(?:{NUMBER}|[,;\s])+", bare) else None
    if not isinstance(value, (list, tuple)):
        return None
    if size == 4 and len(value) == 2 and all(isinstance(v, list) and len(v) == 2 for v in value):
        value = [*value[0], *value[1]]
    return reals(value) if len(value) == size else None
