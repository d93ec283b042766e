"""Reads names and lists of names."""

from __future__ import annotations

import re
import unicodedata

from rewards.reading.objects import loose_json
from rewards.reading.parsed import UNPARSEABLE, Parsed, worst
from rewards.reading.parts import fenced, final

NOTHING = {"none", "null", "nothing", "no object", "no objects", "no box", "no boxes", "n/a"}


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
