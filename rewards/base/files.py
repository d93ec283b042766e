"""Opens files named in prompts, but none named by the sender of a request."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from mmrl.core.types import Media, Prompt

# Paths named by strings of the request being scored; None: the prompts are the user's own. A thread
# started for a call must copy the context.
_named: ContextVar[Named | None] = ContextVar("places named by a request", default=None)
PATH = 4096  # characters of the longest path that an operating system takes


class Named:
    """Holds the strings of a request; they are resolved as paths when a file is opened."""

    def __init__(self, media: Media, prompts: Sequence[Prompt]):
        self.texts = media if isinstance(media, list) else []
        self.prompts = prompts

    @cached_property
    def places(self) -> frozenset[str]:
        return frozenset(place_of(text) for text in strings([self.texts, self.prompts]))


class NoPath(PermissionError):
    """Signals that the sender of a request names a file. It reveals nothing about the file."""

    def __init__(self) -> None:
        super().__init__("a field of a request is never a path")


def of_a_request() -> bool:
    """Tell whether the samples being scored came in a request."""
    return _named.get() is not None


def open_picture(path: str | Path) -> Any:
    """Open the picture named in a prompt's field, as a PIL image.

    Raises:
        OSError: it cannot be opened; ``NoPath`` if the prompt came in a request.
    """
    from PIL import Image

    if of_a_request():
        raise NoPath
    return Image.open(Path(path).expanduser())


@contextmanager
def request(media: Media, prompts: Sequence[Prompt]) -> Iterator[None]:
    """Inside, refuse to open any file named by a string of these samples and prompts.

    mmrl's rewards open pictures by ``open_picture``. For others an audit hook on ``open`` refuses
    any path that is a string of the request, whether it exists or not.
    """
    _watch_open()
    token = _named.set(Named(media, prompts))
    try:
        yield
    finally:
        _named.reset(token)


def strings(value: Any) -> Iterator[str]:
    """Yield every string in lists and mappings that might be a path."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            if len(item) <= PATH and "\0" not in item:
                yield item
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            waiting += item


def place_of(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


@cache
def _watch_open() -> None:
    """Install the audit hook on ``open``; it cannot be removed."""
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event != "open" or (named := _named.get()) is None:
        return
    path = args[0]
    if isinstance(path, (str, bytes)) and place_of(os.fsdecode(path)) in named.places:
        raise NoPath
