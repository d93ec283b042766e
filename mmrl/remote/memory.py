"""Counts the memory that requests hold together, so that it stays below what the server may use."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self


class NoRoom(Exception):
    """Signals that other requests hold the memory that this one needs."""


class Memory:
    """Lends bytes to requests. ``most``: what all may hold at once."""

    def __init__(self, most: int):
        self.most = most
        self.used = 0
        self._changed = threading.Condition()

    def share(self) -> Share:
        return Share(self)

    def take(self, count: int, timeout: float) -> None:
        """Take bytes, or wait so many seconds for them. Raises NoRoom."""
        until = time.monotonic() + timeout
        with self._changed:
            while self.used + count > self.most:
                left = until - time.monotonic()
                if left <= 0 or count > self.most:
                    raise NoRoom
                self._changed.wait(left)
            self.used += count

    def give(self, count: int) -> None:
        with self._changed:
            self.used -= count
            self._changed.notify_all()


class Share:
    """Holds what one request has taken; it is given back at the end of ``with``, or later if jobs
    still need it."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self.count = 0
        self._jobs = 0
        self._lock = threading.Lock()

    def take(self, count: int, timeout: float = 0.0) -> None:
        """Take further bytes. Raises NoRoom."""
        self.memory.take(count, timeout)
        self.count += count

    def until(self, jobs: Sequence[Future[Any]]) -> None:
        """Keep what was taken until these are done, whoever still waits for them."""
        self._jobs = len(jobs)
        for job in jobs:
            job.add_done_callback(self._done)

    def _done(self, job: Future[Any]) -> None:
        with self._lock:
            self._jobs -= 1
            last = not self._jobs
        if last:
            self.give()

    def give(self) -> None:
        """Give everything back."""
        with self._lock:
            count = self.count
            self.count = 0
        self.memory.give(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._jobs:
            self.give()
