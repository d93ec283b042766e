"""Bounds what a connection may cost before it has sent a request: time, number, lines of the
log."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Bounded(H11Protocol):
    """Closes connections that do not say what they want, and those that are too many.

    ``seconds``: in which the headers of a request must have arrived, counted from its first byte,
    or from the start of a connection. ``most``: connections at once.
    """

    seconds = 10.0
    most = 1024

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
            return
        self.deadline = self.loop.call_later(self.seconds, self.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which reads what has arrived meanwhile
        self.watch()

    def watch(self) -> None:
        """Let the time run while there is a part of a request that nobody else waits for."""
        state = self.conn.their_state
        begun = state is h11.IDLE and bool(self.conn.trailing_data[0])
        begun |= state is h11.SEND_BODY and self.cycle.response_complete
        if not begun and self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        elif begun and self.deadline is None:
            self.deadline = self.loop.call_later(self.seconds, self.close)

    def close(self) -> None:
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        super().connection_lost(exc)


class Seldom(logging.Filter):
    """Lets the 1st, 2nd, 4th, 8th ... record of a kind into the log: senders cannot fill the
    disk."""

    KINDS = 1000  # further kinds count as one

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = str(record.msg)[:200]
        kind = kind if kind in self.counts or len(self.counts) < self.KINDS else ""
        count = self.counts[kind] = self.counts.get(kind, 0) + 1
        if count & (count - 1):
            return False
        if count > 1:
            record.msg = f"{record.msg} (so far {count} times)"
        return True
