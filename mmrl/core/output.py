"""Keeps printing from ending a command: a closed pipe, a gone terminal or a full disk behind stdout
is no reason to stop a training."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Lasting:
    """Writes to a stream for as long as that works, and to nowhere afterwards."""

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
        """Replace what the terminal's encoding does not have."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)

    def _give_up(self) -> None:
        """Lead the stream to nowhere: what is left in its buffer would fail again at the end."""
        self.broken = True
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError, AttributeError):  # no file stands behind it
            return


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let ``print`` and the like never fail inside the block."""
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
    """Wrap a stream; in the place of one that was closed before the command began (``>&-``), one
    that leads nowhere."""
    if stream is None:
        nowhere = Lasting(io.StringIO())
        nowhere.broken = True
        return nowhere
    return stream if isinstance(stream, Lasting) else Lasting(stream)


def _occupy() -> None:
    """Give the numbers of closed standard streams to nowhere: a file that is opened later would get
    one, and what libraries print would be written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def redraws(stream: Any) -> bool:
    """Tell whether a line can be drawn again on a stream: a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
