"""Defines ``temporal`` and ``tracking``: when something happens, and where it is in every frame."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sized
from itertools import accumulate, islice
from typing import Any, Literal

import numpy as np

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.answers import boxes as geometry
from rewards.answers.coords import Unscorable
from rewards.answers.notations import MOST, Shape
from rewards.answers.reading import (
    LONGEST,
    NOTHING,
    NUMBER,
    UNPARSEABLE,
    Parsed,
    Status,
    calm,
    fenced,
    final,
    last_inside,
    loose_json,
    real,
    reals,
    worst,
)
from rewards.answers.reading.plain import without_markdown
from rewards.answers.shapes import numbers_of
from rewards.answers.verifiable import (
    Verdict,
    Verifiable,
    count_status,
    finite,
    in_answer,
    in_truth,
    need,
    tagged,
)
from rewards.card import card

Span = tuple[float, float]
STARTS = ("start_time", "start", "begin", "from")
ENDS = ("end_time", "end", "stop", "to")
UNITS = r"(?:seconds?|secs?|s|sekunden?|secondes?|segundos?|secondi|\u79d2|\ucd08)"
CLOCK = r"(?:(\d{1,6}):)?(\d{1,2}):(\d{2}(?:\.\d+|,\d{3}(?!\d))?)"
# 1 min 5 s, 1\u52065\u79d2
SPOKEN = re.compile(
    r"(?<![\d.:])(\d{1,3})\s?(?:m|min|minutes?|minuten?|minutos?|minuti|\u5206\u949f?|"
    r"\ubd84)\s?(?:and |und |et |y |e )?"
    rf"(\d{{1,2}}(?:\.\d+)?)\s?{UNITS}(?![A-Za-z])",
    re.I,
)
# what separates a start and an end
TO = (
    r"(?:--?>|\u2192|-|\u2013|\u2014|~|\uff5e|\u301c|to|until|till|and|,|bis|und|\u00e0|jusqu'\u00e0|et|a|hasta|at\u00e9|"
    r"(?:und |et |y )(?:endet|se termine|finit|termina|acaba) (?:bei|um|nach|\u00e0|a(?: los)?|"
    r"en)?|"
    r"(?:\u5f00\u59cb|\u958b\u59cb)?[,\uff0c\u3001]\s*(?:\u5230|\u81f3|(?:\u5e76)?\u5728|\u7d42\u4e86:?)|"
    r"y|e|\u5230|\u81f3|\u548c|\u304b\u3089|\ubd80\ud130|\uc5d0\uc11c|"
    r"[,;.]?\s*(?:and\s+|the\s+|it\s+|event\s+){0,3}"
    r"(?:ends?|ending|stops?|finish(?:es)?)(?:[ _]time)?\s*(?:at|is|:|=)?)"
)
BEHIND = rf"(?:st|nd|rd|th)?(?:[\s-]*{UNITS}(?![A-Za-z])(?:\s+mark)?)?"
LEAD = rf"(?:\u7b2c|\b(?:the|der|la|el)\s+|\b{UNITS}\s+)?"
FIGURE = re.compile(rf"((?<![\d.]){NUMBER.removeprefix('[-+]?')})")
SIGNED = re.compile(r"(?<![\d.])[-+]\Z")
# possessive groups (?>) do not backtrack, so that time is linear in the length
JOIN = re.compile(rf"(?>{BEHIND})\s*{TO}\s*{LEAD}([-+]?)", re.I)
TIMED = rf"(?>{LEAD}{NUMBER}{BEHIND})"
MINUTE = r"(?:minutes?|mins?|minuten|minutos?|minuti|\u5206\u949f?|\ubd84)"
MINUTE_BEGINS = re.compile("[mM\u5206\ubd84]")  # a text without it names no minute
MINUTES = re.compile(
    rf"(?<![\d.:])({NUMBER})(?:\s?{MINUTE})?\s*{TO}\s*({NUMBER})\s?{MINUTE}(?![A-Za-z]|\s?\d)", re.I
)
MINUTES_JOIN = re.compile(rf"(?:\s?{MINUTE})?\s*{TO}\s*[-+]?", re.I)
JOINING = re.compile(r"[^\s\d.:()\[\]{}]")  # without such a sign two times are not a span
# denials: when it does not happen; matched at the end of the words before the times
FIGURES = 4 * MOST  # numbers of an answer: none needs more
BEFORE = 70  # characters of that
DENIAL = re.compile(r"\b(?:not|never|nicht|pas)\b|n't\b|[\u4e0d\u6ca1]", re.I)
DENIED = re.compile(rf"(?:{DENIAL.pattern})[^.;\n]{{0,60}}\Z", re.I)
WHOLE = re.compile(rf"[\[(]?\s*{TIMED}\s*{TO}\s*{TIMED}\s*[\])]?", re.I)


def seconds(text: str) -> str:
    """Read every ``1:02:03`` or ``02:03`` of a text as seconds."""

    def replacement(clock: re.Match[str]) -> str:
        hours, minutes, rest = clock.groups()
        return str(int(hours or 0) * 3600 + int(minutes) * 60 + float(rest.replace(",", ".")))

    if MINUTE_BEGINS.search(text):
        if any(map(MINUTES_JOIN.fullmatch, {*FIGURE.split(text)[2:-1:2]})):
            text = MINUTES.sub(lambda two: f"{60 * float(two[1])} - {60 * float(two[2])}", text)
        text = SPOKEN.sub(lambda said: str(int(said[1]) * 60 + float(said[2])), text)
    return re.sub(CLOCK, replacement, text) if ":" in text else text


def spans(text: str) -> Parsed[list[Span]]:
    """Read spans of time in seconds: JSON with start and end, ``[3.2, 8]``, ``3.2s - 8s``, ``from
    0:03 to 0:08``."""
    answer = final(text)
    marked = last_inside(str(text), ("glue", "time", "span"))
    written = fenced(answer.value if marked is None else marked[:LONGEST])
    body = calm(without_markdown(written))
    if body.casefold().strip(" .") in NOTHING | {"[]"}:
        return Parsed([], answer.status)
    if not (re.search(r"\d", body) and JOINING.search(body)):
        return UNPARSEABLE
    body = seconds(body)
    parsed = loose_json(body) if re.search(r"[\[{]", body) else UNPARSEABLE
    if parsed.value is not None and (listed := _spans(parsed.value)):
        return Parsed(listed, worst(answer.status, parsed.status))
    pairs = [*islice(_paired(body), MOST + 1)]
    if len(pairs) > MOST:
        return UNPARSEABLE
    if DENIAL.search(body):
        reaches = [(max(0, at - BEFORE), at) for at, _ in pairs]
        pairs = [pair for pair, reach in zip(pairs, reaches) if not DENIED.search(body, *reach)]
    listed = [pair for _, pair in pairs]
    plain = WHOLE.fullmatch(body.strip())
    return (
        Parsed(listed, worst(answer.status, "ok" if plain else "repaired"))
        if listed
        else UNPARSEABLE
    )


def _paired(body: str) -> Iterator[tuple[int, Span]]:
    """Yield the places and values of two neighbouring numbers that a separator makes a start and an
    end."""
    parts = FIGURE.split(body, FIGURES + 1)  # words, number, words, number ... words
    if len(parts) > 2 * FIGURES:
        return
    joins = {words: JOIN.fullmatch(words) for words in {*parts[2:-1:2]}}
    if not any(joins.values()):
        return
    starts = [0, *accumulate(map(len, parts))]
    at = 1
    while at + 2 < len(parts):
        if join := joins[parts[at + 1]]:
            sign = SIGNED.search(body, starts[at - 1], starts[at])
            begin = sign.start() if sign else starts[at]
            yield begin, (float(body[begin : starts[at + 1]]), float(join[1] + parts[at + 2]))
            at += 2
        at += 2


def _spans(value: Any) -> list[Span]:
    if isinstance(value, dict):
        if span := _of_record(value):
            return [span]
        return [
            span
            for part in value.values()
            if isinstance(part, (list, dict))
            for span in _flat(part)
        ]
    return _flat(value)


def _flat(value: Any) -> list[Span]:
    """Flatten [a, b], [[a, b], ...] or records."""
    if span := _pair(value):
        return [span]
    parts = value if isinstance(value, list) else [value]
    pairs = [_of_record(part) if isinstance(part, dict) else _pair(part) for part in parts]
    return [pair for pair in pairs if pair is not None]


def _of_record(record: dict[str, Any]) -> Span | None:
    """Return the start and the end in a record."""
    low = {str(key).casefold(): value for key, value in record.items()}
    return _pair([next((low[key] for key in keys if key in low), None) for keys in (STARTS, ENDS)])


def _pair(value: Any) -> Span | None:
    """Return the two numbers of a list of two."""
    numbers = reals(value) if isinstance(value, list) and len(value) == 2 else None
    return (numbers[0], numbers[1]) if numbers else None


def true_spans(prompt: Prompt) -> list[Span]:
    value = need(prompt, "spans")
    flat = (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and not any(isinstance(v, Sized) for v in value)
    )
    intervals = [
        (start, end)
        for start, end in (
            finite(interval, 2, "spans") for interval in ([value] if flat else value)
        )
    ]
    for start, end in intervals:
        if not start < end:
            raise Unscorable(f'"spans" holds {[start, end]}, which is not start < end')
    return intervals


def union(predicted: list[Span], right: list[Span]) -> float:
    """Compute the IoU of two sets of spans: length in both / length in either; overlaps count
    once."""
    either = covered([*predicted, *right])
    return (covered(predicted) + covered(right) - either) / either if either else 0.0


def covered(spans: list[Span]) -> float:
    """Return the length that spans cover; overlaps count once."""
    total, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def hull(predicted: list[Span], right: list[Span]) -> float:
    """Compute Temporal-R1's overlap / (last end - first start), of the first spans."""
    a, b = predicted[0]
    c, d = right[0]
    return max(min(b, d) - max(a, c), 0.0) / (max(b, d) - min(a, c))


@REWARDS.register("temporal")
@card(
    media="text",
    needs="spans",
    low=0,
    high=1,
    source="Temporal-R1 (arXiv:2506.01908), VideoChat-R1 (arXiv:2504.06958)",
)
class Temporal(Verifiable):
    """Compare the time spans of the answer with the right ones (``spans``: seconds) by IoU.

    Args:
        form: "union": length in both / length in either, for any number of spans; "hull":
            Temporal-R1's denominator, from the first start to the last end, for one span (the same
            if they overlap).
    """

    def __init__(self, form: Literal["union", "hull"] = "union"):
        self.form = {"union": union, "hull": hull}[form]

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = true_spans(prompt)
        parsed = spans(text)
        if parsed.value is None:
            return Verdict(0.0, parsed.status)
        end = (prompt.get("view") or {}).get("duration") or math.inf
        states = [_state(span, float(end)) for span in parsed.value]
        status = count_status(worst(parsed.status, *states), len(parsed.value), len(right))
        good = [
            span
            for span, state in zip(parsed.value, states)
            if state in ("ok", "out_of_range") and _finite(span)
        ]
        if not parsed.value or not right:
            return Verdict(float(len(parsed.value) == len(right)), status)
        return Verdict(self.form(good, right) if good else 0.0, status)

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(json.dumps([{"start_time": a, "end_time": b} for a, b in true_spans(prompt)]))

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = true_spans(prompt)
        if not right:
            return {"a span where none is": tagged("[0, 1]")}
        first = min(a for a, _ in right)
        last = max(b for _, b in right)
        everything = [max(0.0, first - 10 * (last - first)), last + 10 * (last - first)]
        turned = [[b, a] for a, b in right]
        return {
            "all of the video": tagged(json.dumps(everything)),
            "inverted": tagged(json.dumps(turned)),
        }


def _finite(span: Span) -> bool:
    return abs(span[0]) < 1e12 and abs(span[1]) < 1e12


def _state(span: Span, end: float) -> Status:
    start, stop = span
    if not _finite(span):
        return "out_of_range"
    if stop < start:
        return "inverted"
    if stop == start:
        return "degenerate"
    return "ok" if start >= -1 and stop <= end + 1 else "out_of_range"


@REWARDS.register("tracking")
@card(
    media="text", needs="tracks", low=0, high=1, source="VideoChat-R1 (arXiv:2504.06958), tracking"
)
class Tracking(Verifiable):
    """Average the IoU of one object over frames: a missing frame counts 0, an extra one is wrong.

    ``tracks`` is a list of boxes, one a frame, or a mapping of times to boxes; the answer has the
    same form as JSON (``[[x0, y0, x1, y1], ...]`` or ``{"0": [...], "1": [...]}``). reward = sum of
    IoU / max(frames predicted, frames right).
    """

    spatial = True

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = _true_track(prompt)
        parsed = track(text)
        if parsed.value is None:
            return Verdict(0.0, parsed.status)
        rows, states = in_truth([Shape(box) for box in parsed.value.values()], prompt)
        predicted = dict(zip(parsed.value, rows))
        status = count_status(worst(parsed.status, *states), len(predicted), len(right))
        common_times = [time for time in right if time in predicted]
        total = sum(
            geometry.iou(predicted[time][None], right[time][None])[0, 0] for time in common_times
        )
        return Verdict(float(total) / max(len(predicted), len(right)), status)

    def ground_truth(self, prompt: Prompt) -> str:
        return tagged(
            json.dumps(
                {f"{time:g}": in_answer(box, prompt) for time, box in _true_track(prompt).items()}
            )
        )

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        right = {f"{time:g}": in_answer(box, prompt) for time, box in _true_track(prompt).items()}
        turned = {time: [x1, y1, x0, y0] for time, (x0, y0, x1, y1) in right.items()}
        padded = right | {str(10_000 + i): [0, 0, 1, 1] for i in range(5)}
        return {
            "inverted": tagged(json.dumps(turned)),
            "frames that are not there": tagged(json.dumps(padded)),
        }


def track(text: str) -> Parsed[dict[float, tuple[float, ...]]]:
    """Read time (or number of the frame) -> box."""
    answer = final(text)
    parsed = loose_json(fenced(answer.value))
    track = _track(parsed.value)
    return Parsed(track, worst(answer.status, parsed.status)) if track else UNPARSEABLE


def _track(value: Any) -> dict[float, tuple[float, ...]]:
    if isinstance(value, list) and numbers_of(value, 4) is None:
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {}
    pairs = [(real(str(key).strip("s ")), numbers_of(box, 4)) for key, box in value.items()]
    return {time: box for time, box in pairs if time is not None and box is not None}


def _true_track(prompt: Prompt) -> dict[float, np.ndarray]:
    boxes = _track(need(prompt, "tracks"))
    if not boxes:
        raise Unscorable(
            '"tracks" holds no boxes; expected [[x0, y0, x1, y1], ...] or {"time": '
            "[x0, y0, x1, y1]}"
        )
    for time, box in boxes.items():
        if not all(math.isfinite(v) for v in box) or box[2] <= box[0] or box[3] <= box[1]:
            raise Unscorable(
                f'"tracks" holds {list(box)} at {time:g}, which is not x0 < x1, y0 < y1'
            )
    return {time: np.array(box, dtype=np.float64) for time, box in boxes.items()}
