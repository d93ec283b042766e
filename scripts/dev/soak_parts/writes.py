"""Tries a fault at each of a run's writes in turn."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.dev.soak_parts import killing
from scripts.dev.soak_parts.page import Experiment, Soak


def in_turn(
    name: str,
    soak: Soak,
    folder: Path,
    end: float,
    fault: killing.Fault = killing.KILL,
    place: Path | None = None,
) -> Experiment:
    """Inject the fault at each write to the run folder, in random order, while there is time, and
    compare each resumed run with an undisturbed one. ``end``: by the monotonic clock."""
    config = killing.configuration(folder, "ToyCausal", 4, log__rollouts=1)
    total = 0

    def points(count: int) -> Sequence[int]:
        nonlocal total
        total = count
        return random.Random(soak.seed).sample(range(1, count + 1), count)

    problems = []
    tries = 0
    for at, problem in killing.at_every_write(folder, config, points, fault, place):
        tries += 1
        problems += [f"write {at}: {problem}"] if problem else []
        if time.monotonic() > end:
            break
    wrong = f"; {'; '.join(problems[:3])}" if problems else "; all resumed bit-equal"
    outcome = f"{tries} of the {total} writes of a run{wrong}"
    return Experiment(name, tries, len(problems), outcome, {"problems": problems[:20]})
