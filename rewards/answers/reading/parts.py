"""Splits a text into thought and final answer, and finds the span of the answer: in the last box,
after the last "the answer is", in JSON or in a code fence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from mmrl.core.thoughts import outside
from rewards.answers.reading.parsed import Status

# characters of an answer that are read, which bounds the time
LONGEST = 20_000
ANSWER = re.compile(r"<(/?)(?:answer|final_answer|conclusion)>", re.I)
# special tokens around an answer, if they were decoded with it
TOKENS = "|".join(
    re.escape(token)
    for token in (
        "<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end|> <|return|> </s> <eos> "
        "<end_of_turn> <turn|> <|begin_of_solution|> <|end_of_solution|> <|START_RESPONSE|> "
        "<|END_RESPONSE|> <|start|>assistant <|channel|>final<|message|> <|im_start|>assistant"
    ).split()
)
BEFORE = re.compile(rf"(?:\s*(?:{TOKENS}))+\s*")
BEHIND = re.compile(rf"(?:{TOKENS})\Z")


class Final(NamedTuple):
    """Holds the final answer without its tags, and how it was found."""

    value: str
    status: Status = "ok"


def final(text: str) -> Final:
    """Return the final answer without its tags: the last ``<answer>`` outside of thoughts, else
    what follows the last thought; "repaired" if ``<answer>`` is not closed.

    A thought that never closes has no answer, and an ``<answer>`` inside a thought is none.
    """
    pieces, ended = outside(str(text))
    if not ended:
        return Final("", "repaired")
    spoken = "\n".join(pieces)
    tags = list(ANSWER.finditer(spoken))
    opened = [i for i, tag in enumerate(tags) if not tag[1]]
    if opened:
        after = tags[opened[-1] + 1 :]
        inside = spoken[tags[opened[-1]].end() : after[0].start() if after else None]
        return Final(inside.strip()[:LONGEST], "ok" if after else "repaired")
    last = next((piece for piece in reversed(pieces) if piece.strip()), "").strip()
    return Final(_bare(last)[:LONGEST])


def answers(text: str) -> list[str]:
    """Return the content of every closed ``<answer>`` of a text."""
    tags = list(ANSWER.finditer(text))
    pairs = [(a, b) for a, b in zip(tags, tags[1:]) if not a[1] and b[1]]
    return [text[a.end() : b.start()].strip() for a, b in pairs]


def only_answer(text: str) -> bool:
    """Tell whether a text is one closed, non-empty ``<answer>`` and nothing else."""
    body = text.strip()
    tags = [tag[0] for tag in ANSWER.finditer(body)]
    if tags != ["<answer>", "</answer>"]:
        return False
    return body.startswith(tags[0]) and body.endswith(tags[1]) and bool(answers(body)[0])


def without_answers(text: str) -> str:
    """Cut every ``<answer>``, closed or not, and every box out of a text."""
    tags = list(ANSWER.finditer(text))
    pieces, at = [], 0
    for i, tag in enumerate(tags):
        if not tag[1] and tag.start() >= at:
            pieces.append(text[at : tag.start()])
            closing = next((later for later in tags[i:] if later[1]), None)
            at = closing.end() if closing else len(text)
    text = "".join([*pieces, text[at:]])
    while box := last_box(text):
        text = text[: box.start] + text[box.end :]
    return text


def _bare(text: str) -> str:
    """Strip the special tokens around a text."""
    start = BEFORE.match(text)
    text = text[start.end() :] if start else text
    while end := BEHIND.search(text, max(0, len(text) - 30)):
        text = text[: end.start()].rstrip()
    return text


def last_inside(text: str, tags: Sequence[str]) -> str | None:
    """Return the content of the last closed element with these tags; None if there is none."""
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


def fenced(text: str) -> str:
    """Return the content of the last code fence, open or closed; the text itself if there is
    none."""
    pieces = text.split("```")
    if len(pieces) < 2:
        return text.strip()
    inside = pieces[-2] if len(pieces) % 2 else pieces[-1]
    return re.sub(r"^[A-Za-z]+(?=[\s\[{<])", "", inside).strip()


BOX = re.compile(r"\\[fd]?boxed\s*\{|\\fbox\s*\{|\\framebox\s*\{|<\|begin_of_box\|>", re.I)
BOX_END = "<|end_of_box|>"


class Box(NamedTuple):
    """Holds the content of a box, where it begins and ends, and whether it was closed."""

    inside: str
    start: int
    end: int
    closed: bool


def last_box(text: str) -> Box | None:
    r"""Return the last box of a text, ``\boxed{...}`` with balanced braces or GLM's tokens; of
    boxes in boxes the innermost."""
    marks = list(BOX.finditer(text))
    if not marks:
        return None
    mark = marks[-1]
    if mark[0].startswith("<"):
        end = text.find(BOX_END, mark.end())
        inside = text[mark.end() : end if end >= 0 else None]
        return Box(
            inside.strip(), mark.start(), len(text) if end < 0 else end + len(BOX_END), end >= 0
        )
    depth = 1
    for place in re.finditer(r"(?<!\\)[{}]", text[mark.end() :]):
        depth += 1 if place[0] == "{" else -1
        if depth == 0:
            end = mark.end() + place.start()
            return Box(text[mark.end() : end].strip(), mark.start(), end + 1, True)
    return Box(text[mark.end() :].strip(), mark.start(), len(text), False)


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, braces balanced."""
    box = last_box(text)
    return box.inside if box and box.closed else None
