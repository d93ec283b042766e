"""Distributes units of work over the workers of a Ray cluster; none is lost or counted twice.

A worker takes one unit at a time, so that a fast one does more. The unit of a dead worker is done
by another, and the worker is restarted where there is room. A unit that takes far longer than the
others is also given to an idle worker, and the first answer counts: units are pure functions, so
that both answers are equal. Answers are returned in the order of the units.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.apps.ray.output import last_output, where
from mmrl.core.errors import UserError

TRIES = 3  # deaths of its worker after which a unit is not tried again
LATE = 3.0  # multiple of the median time after which a unit is given out again
LEAST = 0.5  # seconds before anything counts as late
TICK = 0.25  # seconds between checks for late units


@dataclass
class Started:
    """Holds where a worker runs; ``problem``: why it cannot work, in a sentence; "": it can."""

    pid: int
    address: str
    node: str  # its name in Ray
    problem: str = ""


@dataclass
class Member:
    """Tracks one worker: its actor and what it is doing."""

    actor: Any
    pending: Any = None  # the ref that is awaited; None: idle
    job: tuple[int, int] | None = None  # (run, unit); None while it starts
    since: float = 0.0
    place: Started | None = None  # None: not placed yet

    def name(self) -> str:
        return (
            "(not placed yet)" if self.place is None else where(self.place.pid, self.place.address)
        )


@dataclass
class Progress:
    """Tracks the units of one call of ``Pool.run``."""

    waiting: deque[int]
    answers: dict[int, Any]
    deaths: Counter[int]
    seconds: list[float]


class Pool:
    """Keeps workers and runs units on them; one ``run`` at a time.

    Args:
        ray: the module, connected.
        what: the workers in words, for messages: "reward 'ocr'".
        create: places a new actor, which has the methods ``where() -> Started``, ``begin() ->
            Started``, which prepares it, and ``work(unit)``.
        size: number of workers.
        patience: seconds that all workers may wait for resources before it is an error.
    """

    def __init__(
        self,
        ray: Any,
        what: str,
        create: Callable[[], Any],
        size: int,
        patience: float = 60.0,
    ):
        self.ray = ray
        self.what = what
        self.create = create
        self.patience = patience
        self.lock = threading.Lock()
        self.runs = 0
        self.lost: list[str] = []  # names of workers that have died
        self.repeated = 0  # units given out again because they were late
        self.members = [self._begun() for _ in range(size)]

    def run(
        self,
        units: Sequence[Any],
        done: Callable[[Any], None] = lambda answer: None,
    ) -> list[Any]:
        """Work on all units and return their answers, in order. ``done`` sees each as it comes.

        Raises UserError if no worker is left, if a unit kills its workers, or if a worker cannot
        start; and whatever ``work`` raises.
        """
        with self.lock:
            self.runs += 1
            progress = Progress(deque(range(len(units))), {}, Counter(), [])
            idle_since = time.monotonic()
            while len(progress.answers) < len(units):
                self._hand_out(units, progress)
                before = len(progress.answers)
                alive = self._await(progress)
                if len(progress.answers) > before:
                    for answer in list(progress.answers.values())[before:]:
                        done(answer)
                if alive or any(member.place for member in self.members):
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > self.patience:
                    raise UserError(self._forsaken())
            return [progress.answers[unit] for unit in range(len(units))]

    def close(self) -> None:
        """End the workers."""
        for member in self.members:
            self.ray.kill(member.actor)
        self.members = []

    def _begun(self) -> Member:
        actor = self.create()
        return Member(actor, actor.where.remote(), None, time.monotonic())

    def _hand_out(self, units: Sequence[Any], progress: Progress) -> None:
        """Give idle workers the next units, or those that are late."""
        for member in self.members:
            if member.pending is not None:
                continue
            unit = progress.waiting.popleft() if progress.waiting else self._late(progress)
            if unit is None:
                return
            member.pending = member.actor.work.remote(units[unit])
            member.job = (self.runs, unit)
            member.since = time.monotonic()

    def _late(self, progress: Progress) -> int | None:
        """Choose the unit that a single worker has been working on longest, far longer than others
        took; None: there is none."""
        if not progress.seconds:
            return None
        now = time.monotonic()
        limit = max(LATE * statistics.median(progress.seconds), LEAST)
        workers = Counter(
            member.job[1] for member in self.members if member.job and member.job[0] == self.runs
        )
        late = [
            (member.since, member.job[1])
            for member in self.members
            if member.job
            and member.job[0] == self.runs
            and member.job[1] not in progress.answers
            and workers[member.job[1]] == 1
            and now - member.since > limit
        ]
        if not late:
            return None
        self.repeated += 1
        return min(late)[1]

    def _await(self, progress: Progress) -> bool:
        """Wait for a worker's result, at most a tick, and process it. Tells whether there was
        one."""
        busy = {member.pending: member for member in self.members if member.pending is not None}
        if not busy:
            raise UserError(self._forsaken())
        ready, _ = self.ray.wait(list(busy), timeout=TICK)
        for ref in ready:
            self._take(busy[ref], progress)
        return bool(ready)

    def _take(self, member: Member, progress: Progress) -> None:
        exceptions = self.ray.exceptions
        job, member.job = member.job, None
        ref, member.pending = member.pending, None
        try:
            answer = self.ray.get(ref)
        except (
            exceptions.RayActorError,
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
        ) as error:
            self._bury(member, job, progress, error)
            return
        except (exceptions.ObjectLostError, exceptions.OwnerDiedError):  # its node has gone
            self._again(job, progress)
            return
        if job is None:
            if answer.problem:
                raise UserError(f"{self.what}: {answer.problem}")
            if member.place is None:
                member.pending = member.actor.begin.remote()
            member.place = answer
        elif job[0] == self.runs and job[1] not in progress.answers:
            progress.answers[job[1]] = answer
            progress.seconds.append(time.monotonic() - member.since)

    def _bury(
        self, member: Member, job: tuple[int, int] | None, progress: Progress, error: Exception
    ) -> None:
        """Restart a dead worker; requeue its unit."""
        self.lost.append(member.name())
        place = self.members.index(member)
        if job is not None and job[0] == self.runs:
            progress.deaths[job[1]] += 1
            if progress.deaths[job[1]] >= TRIES:
                name = member.name()
                raise UserError(
                    f"{self.what}: {TRIES} workers have died of the same samples, the last one "
                    f"{name}: {cause_of(error)}{last_output(name)}"
                )
        if job is None:
            progress.deaths[-1] += 1
            if progress.deaths[-1] >= TRIES:
                raise UserError(f"{self.what}: its workers die as they begin: {cause_of(error)}")
        self._again(job, progress)
        self.members[place] = self._begun()

    def _again(self, job: tuple[int, int] | None, progress: Progress) -> None:
        """Requeue a unit, unless it is answered or another worker has it."""
        if job is None or job[0] != self.runs or job[1] in progress.answers:
            return
        if not any(member.job == job for member in self.members):
            progress.waiting.appendleft(job[1])

    def _forsaken(self) -> str:
        lost = (
            f"; lost: {', '.join(self.lost[-3:])}{last_output(self.lost[-1])}" if self.lost else ""
        )
        return (
            f"{self.what}: no worker has found a place on the Ray cluster within "
            f"{self.patience:g} s{lost}"
        )


def cause_of(error: Exception) -> str:
    """Return Ray's cause of a worker's death, in one line."""
    text = " ".join(str(error).split())
    _, _, cause = text.partition("The actor is dead because ")
    return (cause or text).partition(" Some common causes")[0][:400]
