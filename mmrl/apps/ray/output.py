"""Keeps the last lines that every worker of a cluster printed, so that one that dies can be
named with them."""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

LINES = 20  # of a worker
SETTLE = 3.0  # seconds until the lines of a worker that has died have arrived
WORKER = re.compile(r"\(process (\d+) on ([^\s)]+)\)")


def where(pid: int, address: str) -> str:
    """Write where a worker runs, as ``LastLines`` finds it in messages."""
    return f"(process {pid} on {address})"


class LastLines:
    """Listens to what workers print, on the driver."""

    def __init__(self) -> None:
        # prints the lines of a worker (its process and node, the name of its class); None: Ray does
        self.shows: Callable[[tuple[str, str], str, list[str]], None] | None = None
        self.lines: dict[tuple[str, str], deque[str]] = defaultdict(lambda: deque(maxlen=LINES))
        self.lock = threading.Lock()

    def listen(self) -> LastLines:
        """Take part in Ray's stream of worker output."""
        logs = importlib.import_module("ray._private.ray_logging")
        logs.global_worker_stdstream_dispatcher.add_handler(f"mmrl-{id(self)}", self.hear)
        return self

    def close(self) -> None:
        logs = importlib.import_module("ray._private.ray_logging")
        logs.global_worker_stdstream_dispatcher.remove_handler(f"mmrl-{id(self)}")

    def hear(self, record: dict[str, Any]) -> None:
        """Take up a record of Ray's: the lines of one worker."""
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
    """Print what workers print by a function, not by Ray with its prefixes."""
    logs = importlib.import_module("ray._private.ray_logging")
    logs.global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
    listen().shows = shows


def last_output(message: str) -> str:
    """Return the last output of the workers that a message names; empty where this process is none
    that Ray tells."""
    return "" if _listener is None else _listener.of(message)


def listen() -> LastLines:
    """Begin to keep what workers print, once."""
    global _listener
    if _listener is None:
        _listener = LastLines().listen()
    return _listener
