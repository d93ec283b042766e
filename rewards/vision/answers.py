"""Parses what a model wrote into an answer; it never raises and always says how well it went.

Only the final answer is read: the last ``<answer>`` element, else what follows the last
``</think>``, else the whole text. Coordinates are read by ``rewards.vision.shapes`` with the
helpers of this module.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Never, TypeVar

from rewards._sandbox import Broken, Sandbox

Status = Literal[
    "ok", "repaired", "wrong_count", "out_of_range", "degenerate", "inverted", "unparseable"
]
SEVERITY: tuple[Status, ...] = (
    "ok",
    "repaired",
    "wrong_count",
    "out_of_range",
    "degenerate",
    "inverted",
    "unparseable",
)
# characters of an answer that are looked at: time stays bounded whatever a model writes
LONGEST = 20_000
# brackets in brackets: nobody answers so, and repairing them takes time with their square
DEEPEST = 30
# blanks and digits in a row that are looked at: patterns that begin with them take time with the
# square of the rest
RUN = 40
# characters of a broken JSON value that are repaired, which takes time with their square
REPAIRED = 4_000
REPAIRER = Sandbox("repaired", seconds=0.5, memory=2**30)  # one for all rewards of this process
NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,4})?"
NOTHING = {"none", "null", "nothing", "no object", "no objects", "no box", "no boxes", "n/a"}
Value = TypeVar("Value", covariant=True)


@dataclass(frozen=True)
class Parsed(Generic[Value]):
    """Holds an answer: ``value`` is what was read (None if unparseable); ``status`` how."""

    value: Value | None
    status: Status = "ok"


UNPARSEABLE: Parsed[Never] = Parsed(None, "unparseable")


class Final(NamedTuple):
    """Holds the final answer without its tags, and how it could be found."""

    value: str
    status: Status = "ok"


def worst(*statuses: Status) -> Status:
    """Return the most serious of several statuses; "ok" of none."""
    return max(statuses, key=SEVERITY.index, default="ok")


def final(text: str) -> Final:
    """Return the final answer without its tags; "repaired" where ``<answer>`` is not closed."""
    text = str(text)
    start = text.rfind("<answer>")
    if start >= 0:
        inside, closed, _ = text[start + len("<answer>") :].partition("</answer>")
        return Final(inside.strip()[:LONGEST], "ok" if closed else "repaired")
    if "<think>" in text and "</think>" not in text:
        return Final("", "repaired")  # cut while it was still thinking: there is no answer
    return Final(text.rpartition("</think>")[2].strip()[:LONGEST])


def calm(text: str) -> str:
    """Cut runs of blanks and of digits to a length that no number or answer needs."""
    blanks = re.sub(rf"(\s{{{RUN}}})\s+", r"\1", text)
    return re.sub(rf"(\d{{{RUN}}})\d+", r"\1", blanks)


def last_inside(text: str, tags: Sequence[str]) -> str | None:
    """Return what stands in the last closed element of these tags; None if there is none."""
    names = "|".join(tags)
    inside = None
    start = None
    for tag in re.finditer(rf"<(/?)(?:{names})>", text):
        if not tag[1]:
            start = tag.end() if start is None else start
        elif start is not None:
            inside = text[start : tag.start()]
            start = None
    return inside


def strict_json(text: str) -> Parsed[Any]:
    """Read the JSON value in a code fence, else the whole text, else between its outermost
    brackets; nothing is repaired."""
    body = fenced(text)
    candidates = [body]
    starts = [i for i in (body.find("["), body.find("{")) if i >= 0]
    end = max(body.rfind("]"), body.rfind("}"))
    if starts and end > min(starts):
        candidates.append(body[min(starts) : end + 1])
    for candidate in candidates if nesting(body) <= DEEPEST else ():
        try:
            return Parsed(json.loads(candidate))
        except (ValueError, RecursionError):
            continue
    return UNPARSEABLE


def loose_json(text: str) -> Parsed[Any]:
    """Read as ``strict_json``, and what json_repair makes of the first 4,000 characters of a
    truncated or single-quoted value ("repaired")."""
    parsed = strict_json(text)
    body = fenced(text)
    starts = [i for i in (body.find("["), body.find("{")) if i >= 0]
    if parsed.status == "ok" or not starts or nesting(body) > DEEPEST:
        return parsed
    try:
        value = REPAIRER.ask("repaired", body[min(starts) : min(starts) + REPAIRED])
    except Broken:  # json_repair gives up in its own ways on some inputs, or takes too long
        return UNPARSEABLE
    return Parsed(value, "repaired") if value else UNPARSEABLE


def nesting(text: str) -> int:
    """Return how deep brackets are nested, closed or not."""
    depth = deepest = 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        deepest = max(deepest, depth)
    return deepest


def fenced(text: str) -> str:
    """Return what stands in the last code fence, open or closed; the text itself where there is
    none."""
    pieces = text.split("```")
    if len(pieces) < 2:
        return text.strip()
    inside = pieces[-2] if len(pieces) % 2 else pieces[-1]
    return re.sub(r"^[A-Za-z]+(?=[\s\[{<])", "", inside).strip()


def real(value: Any) -> float | None:
    """Convert a number, or a string that is one, to a float; None for anything else. Infinite and
    NaN stay what they are."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and not re.fullmatch(NUMBER, value.strip()):
        return None
    if not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def reals(values: Sequence[Any]) -> tuple[float, ...] | None:
    """Convert numbers as ``real`` does; None if one of them is none."""
    numbers = tuple(number for value in values if (number := real(value)) is not None)
    return numbers if len(numbers) == len(values) else None


def number(text: str) -> Parsed[float]:
    """Read the one number of the final answer: ``7``, ``1,234``, ``12 %``, ``seven``; with words
    around it "repaired".

    Several different numbers are no answer ("wrong_count"): who hedges is not paid.
    """
    answer = final(text)
    body = (boxed(answer.value) or fenced(answer.value)).strip().strip(".").strip()
    word = WORDS.get(body.casefold())
    plain = re.fullmatch(
        rf"[$€£]?\s*({NUMBER})\s*[%°]?", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", body)
    )
    if plain:
        return Parsed(float(plain[1]), answer.status)
    if word is not None:
        return Parsed(float(word), answer.status)
    values = {
        float(figure)
        for figure in re.findall(
            rf"(?<![\w.]){NUMBER}(?![\w])", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", body)
        )
    }
    if len(values) == 1:
        return Parsed(values.pop(), worst(answer.status, "repaired"))
    return Parsed(None, "wrong_count") if values else UNPARSEABLE


def boxed(text: str) -> str | None:
    r"""Return what stands in the last ``\boxed{...}``, braces balanced."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    begin = start + len(r"\boxed")
    for i in range(begin, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin + 1 : i]
    return None


def items(text: str) -> Parsed[list[str]]:
    """Read a list of names: a JSON list of strings, or names separated by commas, semicolons or
    lines."""
    answer = final(text)
    body = fenced(answer.value)
    if body.casefold().strip(".") in NOTHING or body == "[]":
        return Parsed([], answer.status)
    if body.startswith("["):
        parsed = loose_json(body)
        names = parsed.value if isinstance(parsed.value, list) else []
        if names and all(isinstance(name, (str, int, float)) for name in names):
            return Parsed(
                [str(name).strip() for name in names], worst(answer.status, parsed.status)
            )
        return UNPARSEABLE
    names = [
        re.sub(r"^\s*(?:[-*•]|\d+[.)])\s+", "", part).strip() for part in re.split(r"[,;\n]", body)
    ]
    names = [name for name in names if normal(name)]
    return Parsed(names, answer.status) if names else UNPARSEABLE


def normal(text: object) -> str:
    """Normalise a name for comparing: Unicode NFKC, case folded, blanks, underscores, hyphens and
    final full stops evened out."""
    folded = unicodedata.normalize("NFKC", str(text)).casefold()
    return " ".join(re.sub(r"[\s_\-]+", " ", folded).strip().strip("\"'`*.!").split())


WORDS = dict(
    zip(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen "
        "fourteen fifteen sixteen seventeen "
        "eighteen nineteen twenty".split(),
        range(21),
    )
)
