"""Repeats requests: after failures, and while servers are full or restart."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Annotated

from annotated_types import Ge

from rewards.servers.pool import Failed, Server, Servers

LONGEST_PAUSE = 5.0  # seconds between checks whether a server is back
JITTER = random.Random()  # not the global one, which belongs to the run
RetrySeconds = Annotated[float, Ge(0)]


class Tries:
    """Yields the servers that one request is sent to, until ``retries`` repetitions are used up.

    A server that is full or down uses none while the pool's patience lasts. Waits grow from
    ``backoff`` seconds, with jitter, once each server was tried.
    """

    def __init__(
        self,
        pool: Servers,
        retries: int,
        backoff: float,
        given_up: threading.Event,
        longest: float = LONGEST_PAUSE,
    ):
        self.pool = pool
        self.left = retries
        self.backoff = backoff
        self.given_up = given_up
        self.longest = longest
        self.tried: list[Server] = []

    def __iter__(self) -> Iterator[Server]:
        while self.left >= 0 and not self.given_up.is_set():
            server = self.pool.take(self.tried)
            if server is None:
                return
            yield server

    def failed(self, server: Server, error: Failed, started: float) -> bool:
        """Record a failure of a request sent at ``started``; wait, and tell whether it is sent
        again."""
        self.pool.failed(server, error, started)
        self.tried.append(server)
        waits = error.away and self.pool.patience() > 0
        self.left -= not waits
        if self.left < 0:
            return False
        rounds = len(self.tried) - len(self.pool.all)
        if error.wait is not None:
            self.given_up.wait(min(error.wait, self.longest))
        elif rounds >= 0:
            grown = self.backoff * 2 ** min(rounds, 16) * JITTER.uniform(0.5, 1)
            self.given_up.wait(min(grown, LONGEST_PAUSE if waits else self.longest))
        return True
