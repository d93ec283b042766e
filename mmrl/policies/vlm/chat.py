"""Turns a prompt into chat messages with content parts: text, and placeholders of images and
videos."""

from __future__ import annotations

import re
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.media.clips import is_frames
from mmrl.core.types import Prompt
from mmrl.policies.vlm.media import where

MARKS = re.compile(r"(<image>|<video>|<audio>)")


def messages_of(prompt: Prompt) -> list[dict[str, Any]]:
    """Return the prompt's ``messages``, or its ``text`` as one; ``system`` in front."""
    messages = prompt.get("messages")
    if messages is None:
        if not isinstance(prompt.get("text"), str):
            raise UserError(f"{where(prompt)}: a prompt needs text (the question) or messages")
        messages = [{"role": "user", "content": prompt["text"]}]
    if prompt.get("system") and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": prompt["system"]}, *messages]
    return messages


def parts_of(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return content as parts; <image>, <video> and <audio> in a text become separate parts."""
    if isinstance(content, str):
        pieces = [piece for piece in MARKS.split(content) if piece]
        return [
            {"type": p[1:-1]} if MARKS.fullmatch(p) else {"type": "text", "text": p} for p in pieces
        ]
    parts: list[dict[str, Any]] = []
    for part in content:
        parts += parts_of(part["text"]) if part.get("type") == "text" else [part]
    return parts


def videos_of(prompt: Prompt) -> list[Any]:
    """Return a prompt's videos; ``video`` and ``videos`` mean the same, and a list of images is one
    video."""
    video = prompt.get("video")
    if video is None:
        video = prompt.get("videos")
    if video is None:
        return []
    several = isinstance(video, (list, tuple)) and not is_frames(video)
    return list(video) if several else [video]


def rates_of(prompt: Prompt, count: int) -> list[float | None]:
    """Return the frames a second of each of a prompt's ``count`` videos that are given as frames:
    ``fps``, a number or one for each. Raises UserError for another number of them."""
    rates = prompt.get("fps")
    if not isinstance(rates, (list, tuple)):
        return [rates] * count
    if len(rates) != count:
        raise UserError(f"{where(prompt)}: {len(rates)} fps for {count} videos; give one for each")
    return list(rates)


def rate_of_part(part: dict[str, Any], prompt: Prompt) -> float | None:
    """Return the frames a second of a message's video that is given as frames: its ``sample_fps``
    or ``fps``, as Qwen writes it, else the row's."""
    known = (part.get("sample_fps"), part.get("fps"), prompt.get("fps"))
    return next((rate for rate in known if rate is not None), None)
