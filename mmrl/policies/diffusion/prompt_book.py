"""Keeps by id what a replayed pipeline reads of each prompt, within bounds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar
from weakref import WeakSet

from cachetools import LRUCache

from mmrl.core.media import USUAL_RATE
from mmrl.core.types import Prompt
from mmrl.policies.diffusion.prompt_videos import frames_of
from mmrl.policies.vlm.media import shown_image

PROMPTS = 1 << 14  # kept by a book: more than an iteration has
OPENED = 1 << 28  # bytes of images kept open


class PromptBook:
    """Numbers prompts by a digest of what is read of them, so that an id means the same in every
    process, and looks them up again.

    A book belongs to a policy. It keeps the fields of the last ``limit`` prompts unchanged, mostly
    paths of images, and ``opened`` bytes of images. Unknown ids are looked up in the books of other
    living policies: a teacher scores its student's prompts.
    """

    living: ClassVar[WeakSet[PromptBook]] = WeakSet()

    def __init__(
        self,
        pictures: tuple[str, ...],
        limit: int = PROMPTS,
        opened: int = OPENED,
        videos: Mapping[str, int] | None = None,
        rate: float = USUAL_RATE,
    ):
        """``pictures``: the arguments that are images, or lists of them; ``videos``: those that are
        videos, and the frames that are taken of each, at ``rate`` a second."""
        self.videos = videos or {}
        self.rate = rate
        self.pictures = (*pictures, *self.videos)
        self.prompts: LRUCache[int, tuple[dict[str, str], Prompt]] = LRUCache(limit)
        self.opened: LRUCache[tuple[int, str], Any] = LRUCache(opened, getsizeof=_bytes)
        self.living.add(self)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, book: object) -> bool:
        return self is book

    def number(self, fields: dict[str, str], prompt: Prompt) -> int:
        """Number a prompt of which ``fields``, argument -> field, are read."""
        values = {name: self._value(name, fields, prompt) for name in fields}
        number = _digest(values)
        self.prompts[number] = (fields, prompt)
        for name in values:
            self._keep(number, name, values[name])
        return number

    def names(self, number: int) -> tuple[str, ...]:
        """Name the arguments that are known of a number; none: it is not known."""
        entry = self._entry(number)
        return () if entry is None else tuple(entry[0])

    def values(self, number: int) -> dict[str, Any]:
        """Read the prompt of a number again, argument -> value. KeyError: it is not known."""
        entry = self._entry(number)
        if entry is None:
            raise KeyError(number)
        fields, prompt = entry
        values = {}
        for name in fields:
            value = self.opened.get((number, name))
            if value is None:
                value = self._value(name, fields, prompt)
                self._keep(number, name, value)
            values[name] = value
        return values

    def _entry(self, number: int) -> tuple[dict[str, str], Prompt] | None:
        if number not in self.prompts:
            for book in list(self.living):
                if number in book.prompts:
                    self.prompts[number] = book.prompts[number]
                    break
        return self.prompts.get(number)

    def _value(self, name: str, fields: dict[str, str], prompt: Prompt) -> Any:
        value = prompt[fields[name]]
        if name not in self.pictures:
            return value
        if name in self.videos:
            return frames_of(value, prompt, self.videos[name], self.rate)
        if isinstance(value, (list, tuple)):
            return [shown_image(source, prompt, i) for i, source in enumerate(value)]
        return shown_image(value, prompt)

    def _keep(self, number: int, name: str, value: Any) -> None:
        if name in self.pictures and _bytes(value) <= self.opened.maxsize:
            self.opened[number, name] = value


def _bytes(value: Any) -> int:
    """Count the bytes of one or several images."""
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    width, height = value.size
    return int(width * height * len(value.getbands()))


def _digest(values: dict[str, Any]) -> int:
    digest = hashlib.sha256()
    for name, value in values.items():
        several = isinstance(value, list)
        for part in value if several else [value]:
            content = part.tobytes() if hasattr(part, "tobytes") else repr(part).encode()
            size = getattr(part, "size", "")
            digest.update(f"{name} {size} {len(content)} ".encode() + content)
    return int.from_bytes(digest.digest()[:8]) >> 1  # fits a long
