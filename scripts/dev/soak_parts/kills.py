"""Kills runs at random times and at every write, resumes them, and compares with an undisturbed
run."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.dev.soak_parts import killing
from scripts.dev.soak_parts.killing import FAMILIES, Run
from scripts.dev.soak_parts.page import Experiment, Soak
from scripts.dev.soak_parts.states import SETS
from scripts.dev.soak_parts.writes import in_turn

ITERATIONS = 8
MOST_KILLS = 4  # of one run
ORPHAN = 30.0  # seconds after which a launcher ends processes that wait for a killed one


@dataclass
class Tally:
    """Counts kills of runs of one kind, and wrong results."""

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
    """Kill runs of every family, of one process and of two, until the time is up."""
    killing.warm()
    rng = random.Random(soak.seed)
    end = time.monotonic() + soak.seconds
    kinds = [(family, count, states) for states in SETS for family in FAMILIES for count in (1, 2)]
    tallies = {count: Tally() for count in (1, 2)}
    known: dict[tuple[str, int, str], Any] = {}
    while time.monotonic() < end * 0.75 + (end - soak.seconds) * 0.25 or len(known) < len(kinds):
        kind = family, count, states = kinds[
            sum(tally.runs for tally in tallies.values()) % len(kinds)
        ]
        folder = soak.folder / f"{states}-{family}-{count}"
        if kind not in known:
            known[kind] = _undisturbed(folder, *kind)
        config, seconds, expected = known[kind]
        _disturbed(
            Run(config, folder / f"run-{rng.random()}", count), seconds, expected, rng, tallies
        )
    yield tallies[1].experiment("random SIGKILL, one process; five families, four sets of states")
    yield tallies[2].experiment("random SIGKILL of one of two processes; the same")
    yield in_turn("killed at every write in turn", soak, soak.folder / "writes", end)


def _undisturbed(
    folder: Path, family: str, count: int, states: str
) -> tuple[Path, float, dict[str, Any]]:
    """Train to the end; return configuration, seconds and what is left."""
    config = killing.configuration(folder, family, ITERATIONS, states, log__rollouts=1)
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
        moment = time.monotonic() + rng.uniform(0.3, 1.0) * seconds
        if rng.random() < 0.5:  # while a checkpoint is being written, after that time
            _await_checkpoint(run.folder, moment, seconds)
        else:
            time.sleep(max(0.0, moment - time.monotonic()))
        victim = rng.choice(run.pids)
        os.kill(victim, signal.SIGKILL)
        tally.kills += 1
        statuses = [killing.waited(pid, ORPHAN) for pid in run.pids]
        checkpoints = run.folder / "checkpoints"
        tally.in_checkpoint += any(checkpoints.glob(".iteration-*"))
        if statuses == [0] * run.processes:
            break  # it had finished before the kill
    statuses = run.finish()
    if statuses != [0] * run.processes:
        tally.problems.append(f"{run.folder}: {statuses}: {run.log.read_text()[-300:]}")
    elif unequal := killing.differences(expected, killing.left_behind(run.folder)):
        tally.problems.append(f"{run.folder}: {', '.join(unequal)} differ")


def _await_checkpoint(folder: Path, moment: float, seconds: float) -> None:
    """Wait until a time, and then for a half-written checkpoint, at most as long as a run takes."""
    while time.monotonic() < moment + seconds:
        if time.monotonic() > moment and any((folder / "checkpoints").glob(".iteration-*")):
            return
        time.sleep(0.0005)
