"""Keeps the last lines printed by every worker of a cluster, for the message when one dies."""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

LINES = 20  # of a worker
SETTLE = 3.0  # seconds to wait for the lines of a dead worker
WORKER = re.compile(r"\(process (\d+) on ([^\s)]+)\)")


def where(pid: int, address: str) -> str:
    """Format where a worker runs, as ``LastLines`` searches it in messages."""
    return f"(process {pid} on {address})"


class LastLines:
    """Collects the output of workers, on the driver."""

    def __init__(self) -> None:
        # prints the lines of a worker (its process and node, the name of its class); None: Ray does
        self.shows: Callable[[tuple[str, str], str, list[str]], None] | None = None
        self.lines: dict[tuple[str, str], deque[str]] = defaultdict(lambda: deque(maxlen=LINES))
        self.lock = threading.Lock()

    def listen(self) -> LastLines:
        """Subscribe to Ray's stream of worker output."""
        logs = importlib.import_module("ray._private.ray_logging")
        logs.global_worker_stdstream_dispatcher.add_handler(f"mmrl-{id(self)}", self.hear)
        return self

    def close(self) -> None:
        logs = importlib.import_module("ray._private.ray_logging")
        logs.global_worker_stdstream_dispatcher.remove_handler(f"mmrl-{id(self)}")

    def hear(self, record: dict[str, Any]) -> None:
        """Process a record of Ray's: the lines of one worker."""
        worker = str(record.get("pid")), str(record.get("ip"))
        lines = [line for line in record.get("lines") or () if line.strip()]
        with self.lock:
            self.lines[worker].extend(lines)
        if self.shows is not None:
            self.shows(worker, str(record.get("actor_name") or ""), lines)

    def of(self, message: str) -> str:
        """Return the last output of the workers that a message names, in words; waits until it
        has arrived."""
        workers = list(dict.fromkeys(WORKER.findall(message)))
        if not workers:
            return ""
        time.sleep(SETTLE)
        with self.lock:
            known = {worker: list(self.lines.get(worker, ())) for worker in workers}
        return "".join(
            f"\nlast output of {where(int(pid), ip)}:\n"
            + "\n".join(f"    {line}" for line in lines)
            for (pid, ip), lines in known.items()
            if lines
        )


_listener: LastLines | None = None


def show_by(shows: Callable[[tuple[str, str], str, list[str]], None]) -> None:
    """Print worker output by a function, instead of Ray's prefixes."""
    logs = importlib.import_module("ray._private.ray_logging")
    logs.global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    listen().shows = shows


def last_output(message: str) -> str:
    """Return the last output of the workers that a message names; empty if this process does not
    receive it."""
    return "" if _listener is None else _listener.of(message)


def listen() -> LastLines:
    """Start to collect worker output, once."""
    global _listener
    if _listener is None:
        _listener = LastLines().listen()
    return _listener
