"""Compares the media placeholders in a prompt's text with its pictures, clips and sounds."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mmrl.core.types import Prompt

MARKS = re.compile(r"(<image>|<video>|<audio>)")
# kinds of media, with the names of their fields
KINDS = {"image": ("images", "image"), "video": ("video", "videos"), "audio": ("audio", "audios")}
NAMES = frozenset(("messages", *(name for names in KINDS.values() for name in names)))


def misfit(prompt: Prompt) -> str | None:
    """Say what is wrong with the media of a prompt, without opening any; None: nothing. Without
    placeholders in the text, media come first."""
    text = prompt.get("text")
    if NAMES.isdisjoint(prompt) and (not isinstance(text, str) or "<" not in text):
        return None
    for kind, names in KINDS.items():
        key = next((name for name in names if prompt.get(name) is not None), None)
        value = prompt[key] if key is not None else []
        several = list(value) if isinstance(value, (list, tuple)) else [value]
        for place, each in enumerate(several):
            if each is None or (kind == "image" and isinstance(each, (list, tuple))):
                shown = "null" if each is None else "a list"
                return f"{key}[{place}] is {shown}; list every {kind} of the row by itself"
        if why := _miscounted(kind, len(several), list(_places(prompt, kind))):
            return why
    return None


def _miscounted(kind: str, count: int, places: list[bool]) -> str | None:
    """Compare ``count`` media with their placeholders; True for one that contains its medium."""
    marked, waiting = len(places), len(places) - sum(places)
    if waiting > count:
        return (
            f"its text has more <{kind}> placeholders than the prompt has {kind}s ({marked} and "
            f"{count}); remove some, or give the missing {kind}s"
        )
    if places and waiting < count:
        return (
            f"its text has {marked} <{kind}> placeholders for {count} {kind}s; write one for every "
            f"{kind}, or none at all"
        )
    return None


def _places(prompt: Prompt, kind: str) -> Iterator[bool]:
    """Yield for every placeholder of a kind whether it contains its medium."""
    messages = prompt.get("messages")
    contents = [prompt.get("text")] if messages is None else [m["content"] for m in messages]
    for content in contents:
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            if part.get("type") == "text":
                text = part.get("text")
                marks = MARKS.findall(text) if isinstance(text, str) and "<" in text else []
                yield from (False for mark in marks if mark[1:-1] == kind)
            elif part.get("type") == kind:
                yield any(part.get(key) is not None for key in (kind, "path", "url"))
