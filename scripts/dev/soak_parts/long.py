"""Trains a toy for thousands of iterations, with evaluations, checkpoints and alarms, and checks
that memory, files and seconds per iteration stay flat."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.dev.soak_parts import killing
from scripts.dev.soak_parts.killing import Run
from scripts.dev.soak_parts.page import Experiment, Soak

ITERATIONS = 20_000
MEBIBYTE = 2**20
MOST_GROWTH = 16  # MiB of memory between the first and the last quarter
MOST_SLOWER = 1.25  # of seconds and of bytes an iteration
LINES = ("metrics.jsonl", "events.jsonl", "rollouts.jsonl")


def run(soak: Soak) -> Iterator[Experiment]:
    """Train as many iterations as the time allows."""
    killing.warm()
    config = killing.configuration(
        soak.folder,
        "ToyCausal",
        ITERATIONS,
        log__rollouts=10,
        train__save_every=25,
        train__evaluate_every=20,
        train__time_limit=max(soak.seconds - 15.0, 5.0),
        train__lr_schedule="constant",
    )
    training = Run(config, soak.folder / "run")
    training.start()
    memory = _watched(training)
    status = killing.waited(training.pids[0])
    lines = [json.loads(x) for x in (training.folder / "metrics.jsonl").read_text().splitlines()]
    count = len(lines)
    ended = Experiment(
        "ended normally", count, int(status not in (0, 75)), f"{count} iterations, status {status}"
    )
    yield ended
    yield _flat("memory", count, memory, " MiB", MOST_GROWTH, absolute=True)
    seconds = [line["seconds"] for line in lines[count // 10 :]]
    yield _flat("seconds an iteration", count, seconds, " s", MOST_SLOWER)
    yield from _files(training.folder, count)
    yield _report(training.folder, count)


def _watched(training: Run) -> list[float]:
    """Read the resident memory in MiB, five times a second, until the process ends."""
    status = Path(f"/proc/{training.pids[0]}/status")
    sizes: list[float] = []
    end = time.monotonic() + 24 * 3600
    while time.monotonic() < end:
        text = status.read_text() if status.exists() else ""
        resident = [line.split()[1] for line in text.splitlines() if line.startswith("VmRSS")]
        if not resident:  # it has ended
            return sizes
        sizes.append(int(resident[0]) / 1024)
        time.sleep(0.2)
    return sizes


def _flat(
    name: str,
    count: int,
    values: Sequence[float],
    unit: str,
    most: float,
    absolute: bool = False,
) -> Experiment:
    """Compare the medians of the second and of the last quarter: the first is a warm-up."""
    quarter = max(1, len(values) // 4)
    early = statistics.median(values[quarter : 2 * quarter] or values)
    late = statistics.median(values[-quarter:])
    grown = late - early > most if absolute else late > most * early
    outcome = f"{early:.4g}{unit} in the second quarter, {late:.4g}{unit} in the last"
    return Experiment(name, count, int(grown), outcome, {"early": early, "late": late})


def _files(folder: Path, count: int) -> Iterator[Experiment]:
    """Measure bytes per iteration in line files, and check that nothing else grows."""
    for name in LINES:
        path = folder / name
        if not path.exists():
            continue
        sizes = [len(line) + 1 for line in path.read_text().splitlines()]
        half = max(1, len(sizes) // 2)
        early, late = statistics.mean(sizes[:half]), statistics.mean(sizes[half:] or sizes)
        total = path.stat().st_size
        yield Experiment(
            f"size of {name}",
            count,
            int(late > MOST_SLOWER * early),
            f"{total / max(1, count):.0f} bytes an iteration; a line {early:.0f}, later {late:.0f}",
        )
    rest = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in LINES)
    total = sum(path.stat().st_size for path in rest)
    checkpoints = len(list((folder / "checkpoints").iterdir()))
    outcome = f"{len(rest)} files, {total / MEBIBYTE:.2f} MiB, {checkpoints} checkpoints"
    yield Experiment("all other files", count, int(checkpoints > 3 or len(rest) > 60), outcome)


def _report(folder: Path, count: int) -> Experiment:
    from mmrl.monitoring.report.page import write_report

    start = time.perf_counter()
    size = write_report(folder).stat().st_size / MEBIBYTE
    seconds = time.perf_counter() - start
    return Experiment(
        "report of the run",
        count,
        int(seconds > 60 or size > 32),
        f"{seconds:.1f} s, {size:.1f} MiB",
    )
