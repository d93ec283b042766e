"""Finds the final answer of a text: behind the thought, in its tags, box or fence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rewards.reading.parsed import Status

# characters of an answer that are looked at: time stays bounded whatever a model writes
LONGEST = 20_000


class Final(NamedTuple):
    """Holds the final answer without its tags, and how it could be found."""

    value: str
    status: Status = "ok"


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


def fenced(text: str) -> str:
    """Return what stands in the last code fence, open or closed; the text itself where there is
    none."""
    pieces = text.split("```")
    if len(pieces) < 2:
        return text.strip()
    inside = pieces[-2] if len(pieces) % 2 else pieces[-1]
    return re.sub(r"^[A-Za-z]+(?=[\s\[{<])", "", inside).strip()
