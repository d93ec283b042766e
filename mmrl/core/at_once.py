"""Ends a command within seconds of a second Ctrl-C, even if the main thread is blocked.

Python's signal handlers run between bytecodes: never inside a long library call, a collective call
that waits for a dead process, or a stalled download.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SAME_INSTANT = 1.0  # seconds in which a launcher forwards the Ctrl-C that the terminal also sends
HANDED_ON = 5.0  # seconds in which launchers send SIGTERM after it
GRACE = 3.0  # seconds for the main thread to end by itself
INTERRUPTED = 130


def asks_again(first: int, number: int, seconds: float) -> bool:
    """Tell whether a signal, some seconds after the ``first`` one, requests an immediate exit: a
    second Ctrl-C, or SIGTERM after a Ctrl-C. Other repeated signals come from schedulers and closed
    terminals."""
    if number == signal.SIGINT:
        return seconds > SAME_INSTANT
    return number == signal.SIGTERM and first == signal.SIGINT and seconds > HANDED_ON


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process, ``GRACE`` seconds after a signal that ``asks_again``, with status 130. Only
    for commands: a notebook's kernel must outlive its runs."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # a forked worker's signals are not this process's
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_watch, args=(reader,), name="at-once", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)  # ends the thread


def _forget() -> None:
    signal.set_wakeup_fd(-1)


def _watch(reader: int) -> None:
    """Read the signal numbers that the C-level handler writes (``signal.set_wakeup_fd``)."""
    first, since = 0, 0.0
    while content := os.read(reader, 1):
        number = content[0]
        if number not in (signal.SIGINT, signal.SIGTERM):
            continue
        if not first:
            first, since = number, time.monotonic()
        elif asks_again(first, number, time.monotonic() - since):
            time.sleep(GRACE)
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nended without saving\n")
            os._exit(INTERRUPTED)
    os.close(reader)
