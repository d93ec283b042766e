"""Parses JSON, whole or broken."""

from __future__ import annotations

import ast
import json
import re
from itertools import accumulate
from operator import itemgetter
from typing import Any

from rewards.answers.reading.parsed import UNPARSEABLE, Parsed
from rewards.answers.reading.parts import fenced
from rewards.answers.sandbox import Broken, Sandbox

# depth of nested brackets: no answer needs more, and repair takes quadratic time
DEEPEST = 30
# characters of a broken JSON value that are repaired, in quadratic time
REPAIRED = 2_000
# how JSON begins, valid or not: "{1}" and "[a" are something else
BEGINS = re.compile(r"""\[\s*[\w"'\[{\].-]|\{\s*(?:["'}]|\w+\s*:)""")
BRACKETS = re.compile(r"[\[\]{}]")
STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}
MOST = 500  # values in a row in a text: no answer needs more
DECODER = json.JSONDecoder()
QUOTE = re.compile(r"(?<!\w)'|'(?!\w)")  # of Python, not an apostrophe
# strings, cut ones too, and what structures JSON
MARKS = re.compile(r""""(?:[^"\\]|\\.)*(?:"|\Z)|[\[\]{},]""")
REPAIRER = Sandbox("repaired", seconds=0.5, memory=2**30)  # one for all rewards of this process


def strict_json(text: str) -> Parsed[Any]:
    """Read the JSON value in a code fence, else the whole text, else between its outermost
    brackets; nothing is repaired."""
    body = fenced(text)
    return UNPARSEABLE if too_deep(body) else whole_json(body)


def whole_json(body: str) -> Parsed[Any]:
    """Read a text, else what stands between its outermost brackets, as JSON."""
    candidates = [body]
    starts = [i for i in (body.find("["), body.find("{")) if i >= 0]
    end = max(body.rfind("]"), body.rfind("}"))
    if starts and end > min(starts):
        candidates.append(body[min(starts) : end + 1])
    for candidate in candidates:
        try:
            return Parsed(json.loads(candidate))
        except (ValueError, RecursionError):
            continue
    return UNPARSEABLE


def python_value(text: str) -> Parsed[Any]:
    """Read a Python dict or list as it is printed, {'a': 1}, in a fence or not ("repaired")."""
    value = literal(fenced(text))
    return Parsed(value, "repaired") if isinstance(value, (dict, list)) else UNPARSEABLE


def loose_json(text: str) -> Parsed[Any]:
    """Read as ``strict_json``; also a Python value, several values in a row, a truncated value, and
    else the first 2,000 characters by json_repair ("repaired")."""
    body = fenced(text)
    if too_deep(body):
        return UNPARSEABLE
    parsed = whole_json(body)
    start = BEGINS.search(body)
    if parsed.status == "ok" or not start:
        return parsed
    body = body[start.start() :]
    quick = several(body) or literal(body)
    if quick is None and "'" in body:
        body = QUOTE.sub('"', body)
        quick = several(body)
    quick = quick or completed(body)
    if isinstance(quick, (dict, list)):
        return Parsed(quick, "repaired")
    try:
        value = REPAIRER.ask("repaired", body[:REPAIRED])
    except Broken:  # json_repair gives up in its own ways on some inputs, or takes too long
        return UNPARSEABLE
    return Parsed(value, "repaired") if value else UNPARSEABLE


def several(text: str) -> Any:
    """Read the JSON values in a text, among other words: the value if there is one, a list of at
    most 501 if there are more; None if one of them cannot be parsed."""
    values: list[Any] = []
    mark = BEGINS.search(text)
    while mark and len(values) <= MOST:
        try:
            value, end = DECODER.raw_decode(text, mark.start())
        except (ValueError, RecursionError):
            return None
        values.append(value)
        mark = BEGINS.search(text, end)
    return values[0] if len(values) == 1 else values or None


def completed(text: str) -> Any:
    """Read truncated JSON: with strings and brackets closed, else up to its last whole entry; None
    for any other text."""
    open_brackets: list[str] = []
    end = depth = 0  # of the last whole entry
    cut_string = ""
    for mark in MARKS.finditer(text):
        if mark[0] in "[{":
            open_brackets.append("]" if mark[0] == "[" else "}")
        elif mark[0] in "]}":
            if not open_brackets or open_brackets.pop() != mark[0] or not open_brackets:
                return None  # another text, or one that goes on after the value
            end, depth = mark.end(), len(open_brackets)
        elif mark[0] == ",":
            end, depth = mark.start(), len(open_brackets)
        elif not mark[0].endswith('"') or mark[0] == '"':
            cut_string = '"'
    closing = "".join(reversed(open_brackets))
    for whole in (text + cut_string + closing, text[:end] + closing[len(open_brackets) - depth :]):
        try:
            return json.loads(whole)
        except (ValueError, RecursionError):
            continue
    return None


def too_deep(text: str) -> bool:
    """Tell whether brackets, closed or not, are nested too deep for an answer."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return False
    steps = map(STEPS.__getitem__, map(itemgetter(0), BRACKETS.finditer(text)))
    return any(map(DEEPEST.__lt__, accumulate(steps)))


def literal(text: str) -> Any:
    """Read JSON or a Python literal of at most 4,000 characters; None if it is neither."""
    if len(text) > 4000 or max(text.count("["), text.count("{"), text.count("(")) > 200:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
