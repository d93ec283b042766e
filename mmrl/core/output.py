"""Keeps printing from ending a command: a closed pipe, a lost terminal or a full disk must not stop
training."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Lasting:
    """Writes to a stream until that fails, then discards."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.broken = False

    def write(self, text: str) -> int:
        if not self.broken:
            try:
                self.stream.write(self._encodable(text))
            except (OSError, ValueError):  # ValueError: it was closed
                self._give_up()
        return len(text)

    def flush(self) -> None:
        if not self.broken:
            try:
                self.stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _encodable(self, text: str) -> str:
        """Replace characters that the terminal's encoding lacks."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)

    def _give_up(self) -> None:
        """Redirect the stream to /dev/null: flushing its buffer at exit would fail again."""
        self.broken = True
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError, AttributeError):  # it has no file descriptor
            return


@contextmanager
def lasting_output() -> Iterator[None]:
    """Make ``print`` and the like never fail inside the block."""
    _occupy()
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_lasting(stream) for stream in streams)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = streams


def _lasting(stream: Any) -> Any:
    """Wrap a stream; one that was closed before the command began (``>&-``) is replaced by a null
    stream."""
    if stream is None:
        nowhere = Lasting(io.StringIO())
        nowhere.broken = True
        return nowhere
    return stream if isinstance(stream, Lasting) else Lasting(stream)


def _occupy() -> None:
    """Open /dev/null for closed standard streams: a file opened later would get their descriptor,
    and libraries would print into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor


def redraws(stream: Any) -> bool:
    """Tell whether a stream can redraw a line: a terminal with cursor movement."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
