"""Kills runs at random moments and at every write, resumes them, and compares with a run that
nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.soak_parts import killing
from scripts.soak_parts.killing import FAMILIES, Run
from scripts.soak_parts.page import Experiment, Soak

ITERATIONS = 8
MOST_KILLS = 4  # of one run
ORPHAN = 30.0  # seconds after which a launcher ends what a killed process left waiting


@dataclass
class Tally:
    """Counts what was done to runs of one kind, and what came out wrong."""

    kills: int = 0
    runs: int = 0
    in_checkpoint: int = 0  # kills that left a half-written checkpoint
    problems: list[str] = field(default_factory=list)

    def experiment(self, name: str) -> Experiment:
        kept = f"{self.runs} runs, {self.in_checkpoint} kills inside a checkpoint; "
        equal = f"{self.runs - len(self.problems)} bit-equal, no line lost or repeated"
        wrong = f"; {'; '.join(self.problems[:3])}" if self.problems else ""
        return Experiment(
            name,
            self.kills,
            len(self.problems),
            kept + equal + wrong,
            {"runs": self.runs, "problems": self.problems},
        )


def run(soak: Soak) -> Iterator[Experiment]:
    """Kill runs of every family, by one process and by two, until the time is up."""
    killing.warm()
    rng = random.Random(soak.seed)
    end = time.monotonic() + soak.seconds
    kinds = [(family, count) for family in FAMILIES for count in (1, 2)]
    tallies = {count: Tally() for count in (1, 2)}
    known: dict[tuple[str, int], Any] = {}
    while time.monotonic() < end * 0.75 + (end - soak.seconds) * 0.25 or len(known) < len(kinds):
        family, count = kinds[sum(tally.runs for tally in tallies.values()) % len(kinds)]
        folder = soak.folder / f"{family}-{count}"
        if (family, count) not in known:
            known[family, count] = _undisturbed(folder, family, count)
        config, seconds, expected = known[family, count]
        _disturbed(
            Run(config, folder / f"run-{rng.random()}", count), seconds, expected, rng, tallies
        )
    yield tallies[1].experiment("random SIGKILL, one process, five families")
    yield tallies[2].experiment("random SIGKILL of one of two processes, five families")
    yield from _at_every_write(soak, end)


def _undisturbed(folder: Path, family: str, count: int) -> tuple[Path, float, dict[str, Any]]:
    """Train to the end; return configuration, seconds and what is left."""
    config = killing.configuration(folder, family, ITERATIONS, log__rollouts=1)
    whole = Run(config, folder / "whole", count)
    start = time.monotonic()
    statuses = whole.finish()
    assert statuses == [0] * count, (family, count, statuses, whole.log.read_text()[-2000:])
    return config, time.monotonic() - start, killing.left_behind(whole.folder)


def _disturbed(
    run: Run,
    seconds: float,
    expected: dict[str, Any],
    rng: random.Random,
    tallies: dict[int, Tally],
) -> None:
    """Kill a run now and then, let it finish, and compare."""
    tally = tallies[run.processes]
    tally.runs += 1
    for _ in range(rng.randint(1, MOST_KILLS)):
        run.start()
        time.sleep(rng.uniform(0.3, 1.0) * seconds)
        victim = rng.choice(run.pids)
        os.kill(victim, signal.SIGKILL)
        tally.kills += 1
        statuses = [killing.waited(pid, ORPHAN) for pid in run.pids]
        checkpoints = run.folder / "checkpoints"
        tally.in_checkpoint += any(checkpoints.glob(".iteration-*"))
        if statuses == [0] * run.processes:
            break  # it was through before the kill
    statuses = run.finish()
    if statuses != [0] * run.processes:
        tally.problems.append(f"{run.folder}: {statuses}: {run.log.read_text()[-300:]}")
    elif unequal := killing.differences(expected, killing.left_behind(run.folder)):
        tally.problems.append(f"{run.folder}: {', '.join(unequal)} differ")


def _at_every_write(soak: Soak, end: float) -> Iterator[Experiment]:
    """End a process at each of its writes to the run folder in turn, while there is time."""
    folder = soak.folder / "writes"
    config = killing.configuration(folder, "ToyCausal", 4, log__rollouts=1)
    total = 0

    def points(count: int) -> list[int]:
        nonlocal total
        total = count
        return random.Random(soak.seed).sample(range(1, count + 1), count)

    problems = []
    tries = 0
    for last, problem in killing.at_every_write(folder, config, points):
        tries += 1
        problems += [f"write {last}: {problem}"] if problem else []
        if time.monotonic() > end:
            break
    wrong = f"; {'; '.join(problems[:3])}" if problems else "; all bit-equal"
    outcome = f"{tries} of the {total} writes of a run{wrong}"
    yield Experiment("killed at every write in turn", tries, len(problems), outcome)
