"""Load test of a reward server with many clients: latency, nothing lost, nothing scored twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from rewards import Remote
from scripts.dev.soak_parts.page import Experiment, Soak
from tests.fixtures.server_process import server_process

CLIENTS = 200
SAMPLES = 4  # of a request


def client(number: int, remote: Remote, until: float, waits: list[float]) -> tuple[int, int]:
    """Request scores of unique samples. Returns their number, and how many were wrong or lost."""
    asked = wrong = 0
    while time.monotonic() < until:
        # float32 holds whole numbers up to 2 ** 24
        first = (number * 2**24 // CLIENTS) + asked
        prompts = [{"n": first + i} for i in range(SAMPLES)]
        start = time.monotonic()
        values = remote(["a"] * SAMPLES, prompts)
        waits.append(time.monotonic() - start)
        wrong += sum(value != prompt["n"] for value, prompt in zip(values.tolist(), prompts))
        asked += SAMPLES
    return asked, wrong


def run(soak: Soak) -> Iterator[Experiment]:
    with server_process(soak.folder, max_waiting=CLIENTS + 10) as server:
        waits: list[float] = []
        options = {"name": "tally", "largest": 1e12, "timeout": 120.0, "batch_size": SAMPLES}
        clients = [Remote(server.url, concurrency=1, **options) for _ in range(CLIENTS)]
        start = time.monotonic()
        until = start + soak.seconds
        threading.stack_size(512 * 1024)
        with ThreadPoolExecutor(CLIENTS) as pool:
            counts = list(pool.map(lambda n: client(n, clients[n], until, waits), range(CLIENTS)))
        seconds = time.monotonic() - start
        seen, twice = clients[0](["a", "a"], [{"ask": "seen"}, {"ask": "twice"}]).tolist()
    asked = sum(count for count, _ in counts)
    wrong = sum(count for _, count in counts)
    waits.sort()
    p50, p99 = (waits[int(share * (len(waits) - 1))] for share in (0.5, 0.99))
    lost = abs(asked - int(seen))
    outcome = (
        f"{CLIENTS} clients, {asked / seconds:.0f} samples a second; a request p50 {p50:.3f} s, "
        f"p99 {p99:.3f} s; {wrong} wrong, {lost} lost, {int(twice)} scored twice"
    )
    numbers = {"p50": round(p50, 4), "p99": round(p99, 4), "samples": asked, "requests": len(waits)}
    yield Experiment("load", asked, wrong + lost + int(twice), outcome, numbers)
