"""Reads JSON, whole or broken."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from rewards._sandbox import Broken, Sandbox
from rewards.reading.parsed import UNPARSEABLE, Parsed
from rewards.reading.parts import fenced

# brackets in brackets: nobody answers so, and repairing them takes time with their square
DEEPEST = 30
# characters of a broken JSON value that are repaired, which takes time with their square
REPAIRED = 4_000
REPAIRER = Sandbox("repaired", seconds=0.5, memory=2**30)  # one for all rewards of this process


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


def python_value(text: str) -> Parsed[Any]:
    """Read a Python dict or list as it is printed, {'a': 1}, in a fence or not ("repaired")."""
    value = literal(fenced(text))
    return Parsed(value, "repaired") if isinstance(value, (dict, list)) else UNPARSEABLE


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
    for bracket in re.findall(r"[\[\]{}]", text):
        if bracket in "[{":
            depth += 1
            if depth > deepest:
                deepest = depth
        else:
            depth -= 1
    return deepest


def literal(text: str) -> Any:
    """Read JSON or a Python literal of at most 4,000 characters; None where it is neither."""
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
