"""Sends hostile requests to a reward server in a separate process, and monitors it."""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from scripts.dev.soak_parts.page import Experiment
from tests.fixtures.reward_servers import good
from tests.fixtures.server_process import ServerProcess

SLOW = 2.0  # seconds that no request may take
MIB = 2**20
GROWTH = 64 * MIB  # of the server's memory, after the first requests
FIRST = 300  # requests until the server has loaded what it needs
Make = Callable[[random.Random], tuple[bytes, str]]


@dataclass
class Tally:
    """Counts responses."""

    statuses: Counter[str] = field(default_factory=Counter)
    errors: int = 0  # 5xx, or a dead server
    slow: int = 0
    slowest: float = 0.0
    first: int = 0  # memory after the first requests

    @property
    def tries(self) -> int:
        return sum(self.statuses.values())

    def add(self, status: str, seconds: float) -> None:
        self.statuses[status] += 1
        self.errors += status.startswith("5") or status == "gone"
        self.slow += seconds > SLOW
        self.slowest = max(self.slowest, seconds)

    def experiment(self, name: str, server: ServerProcess) -> Experiment:
        """Write the row: every 5xx, slow request and lasting growth has failed."""
        for _ in range(20):  # memory of the last requests is returned meanwhile
            httpx.post(f"{server.url}/score", json=good(1), timeout=60)
        growth = server.memory("VmRSS") - (self.first or server.memory("VmRSS"))
        healthy = httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        failed = self.errors + self.slow + (growth > GROWTH) + (not healthy)
        said = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        outcome = f"{said}; slowest {self.slowest:.2f} s; memory {growth / MIB:+.0f} MiB"
        numbers = {
            "statuses": dict(self.statuses),
            "slowest": round(self.slowest, 3),
            "growth_mib": round(growth / MIB, 1),
            "peak_mib": round(server.memory() / MIB),
            "log_bytes": server.log.stat().st_size,
        }
        return Experiment(name, self.tries, failed, outcome, numbers)


def storm(server: ServerProcess, makes: list[Make], seconds: float, seed: int) -> Tally:
    """Send requests of these kinds until the time is over."""
    draw = random.Random(seed)
    tally = Tally()
    until = time.monotonic() + seconds
    with httpx.Client(timeout=60) as client:
        while time.monotonic() < until:
            body, kind = draw.choice(makes)(draw)
            start = time.monotonic()
            try:
                headers = {"content-type": kind} if kind.isprintable() else {}
                answer = client.post(f"{server.url}/score", content=body, headers=headers)
                status = str(answer.status_code)
            except httpx.HTTPError:
                status = "gone"
            tally.add(status, time.monotonic() - start)
            if tally.tries == FIRST:
                tally.first = server.memory("VmRSS")
    return tally


def raw(server: ServerProcess, make: Callable[[random.Random], bytes], **how: Any) -> Tally:
    """Send arbitrary bytes, over separate connections, until the time is over."""
    draw = random.Random(how["seed"])
    host, port = server.url.removeprefix("http://").split(":")
    tally = Tally()
    until = time.monotonic() + how["seconds"]
    while time.monotonic() < until:
        start = time.monotonic()
        try:
            with socket.create_connection((host, int(port)), timeout=60) as sock:
                sock.sendall(make(draw))
                sock.shutdown(socket.SHUT_WR)
                answer = sock.recv(4096)
            status = answer[9:12].decode("ascii", "replace") if answer else "closed"
        except ConnectionRefusedError:
            status = "gone"
        except OSError:
            status = "closed"
        tally.add(status, time.monotonic() - start)
        if tally.tries == FIRST:
            tally.first = server.memory("VmRSS")
    return tally
