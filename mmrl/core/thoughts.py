"""Lists the marks by which model families begin and end a thought, to parse answers and render
prompts."""

from __future__ import annotations

import re

NAMES = "think thinking thought thoughts reasoning scratchpad seed:think".split()
# A closing mark ends the thought that its own opening mark began.
THOUGHTS = (
    *((f"<{name}>", f"</{name}>") for name in NAMES),
    ("[THINK]", "[/THINK]"),  # Magistral, Mistral 3
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi-VL
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # Sky-T1, OpenThinker
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<|THINK_START|>", "<|THINK_END|>"),  # Step
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
)
MARKS = {
    mark.lower(): (family, not side)
    for family, pair in enumerate(THOUGHTS)
    for side, mark in enumerate(pair)
}
# search two letters of a mark first: most brackets begin none
_SECOND = "".join(sorted({re.escape(mark[1]) for mark in MARKS}))
MARK = re.compile(
    rf"(?=[<\[\u25c1][{_SECOND}])(?:{'|'.join(re.escape(mark) for mark in MARKS)})", re.I
)
OPENED = re.compile(rf"(?:{'|'.join(re.escape(begin) for begin, _ in THOUGHTS)})\s*\Z", re.I)


def outside(text: str) -> tuple[list[str], bool]:
    """Return the text outside thoughts, in order, and whether the last thought has ended.

    A closing mark without an opening one ends a thought that the chat template began: everything
    before it is thought.
    """
    pieces: list[str] = []
    inside: int | None = None
    at = 0
    for mark in MARK.finditer(text):
        family, opens = MARKS[mark[0].lower()]
        if inside is None and opens:
            pieces.append(text[at : mark.start()])
            inside = family
        elif inside is None and mark[0].lower() != "<|end|>":  # which also ends other messages
            pieces.clear()
            at = mark.end()
        elif inside == family and not opens:
            inside = None
            at = mark.end()
    if inside is None:
        pieces.append(text[at:])
    return pieces, inside is None


def opened_by(rendered: str) -> str:
    """Return the opening mark of a thought with which a rendered prompt ends; empty if none."""
    mark = OPENED.search(rendered[-80:])
    return mark[0] if mark else ""


def one_thought(text: str) -> tuple[str, str] | None:
    """Return thought and rest of a text that begins with a closed thought and has no other thought
    marks; else None."""
    marks = list(MARK.finditer(text))
    if len(marks) != 2 or text[: marks[0].start()].strip():
        return None
    (family, opens), (ending, opens_again) = (MARKS[mark[0].lower()] for mark in marks)
    if family != ending or not opens or opens_again:
        return None
    return text[marks[0].end() : marks[1].start()], text[marks[1].end() :]


def closes(text: str) -> bool:
    """Tell whether the end of a thought is marked in a text."""
    return any(not MARKS[mark[0].lower()][1] for mark in MARK.finditer(text))


def thought_of(text: str) -> str:
    """Return a text up to the end of its last closed thought, without marks; all of it if none is
    closed."""
    ends = [mark for mark in MARK.finditer(text) if not MARKS[mark[0].lower()][1]]
    return MARK.sub("", text[: ends[-1].start()] if ends else text)
