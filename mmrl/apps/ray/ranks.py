"""Defines the actor of one training process, which runs the same loop as a process started by
torchrun. It imports little before it starts, since numeric libraries read their settings when torch
is loaded."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.apps.ray.workers import Surroundings, Worker, prepared


class Control:
    """Forwards the user's signal to end the run."""

    def __init__(self) -> None:
        self.number = 0

    def stop(self, number: int) -> None:
        """Receive a signal from the driver."""
        self.number = number

    def signal(self) -> int:
        """Return the signal; 0: none."""
        return self.number


@dataclass(frozen=True)
class Job:
    """Holds the arguments of ``mmrl train``."""

    name: str
    overrides: Sequence[str]
    resume: bool
    accept: bool


@dataclass(frozen=True)
class Outcome:
    """Holds how a rank ended: its exit status; ``problem``: the user's mistake in a sentence."""

    status: int = 0
    problem: str = ""


class TrainerRank(Worker):
    """Trains as one of several processes."""

    def __init__(self, surroundings: Surroundings, control: Any):
        self.surroundings = surroundings
        self.control = control

    def port(self) -> int:
        """Find a free port of this node, for the rendezvous."""
        with socket.socket() as free:
            free.bind(("", 0))
            return int(free.getsockname()[1])

    def train(self, job: Job, environment: dict[str, str]) -> Outcome:
        """Train to the end. ``environment``: as torchrun would set it for this rank."""
        os.environ.update(environment)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        if problem := prepared(self.surroundings):
            return Outcome(2, problem)
        from mmrl.apps.ray.watching import RankWatcher
        from mmrl.core import distributed
        from mmrl.core.errors import UserError
        from mmrl.experiment.lifecycle import trained

        signal.signal(signal.SIGINT, signal.default_int_handler)
        watcher = RankWatcher(self.control)
        try:
            ended = trained(Path(job.name), job.overrides, job.resume, job.accept, watcher)
        except UserError as error:
            return Outcome(2, str(error))
        finally:
            watcher.close()
        importlib.import_module("atexit").unregister(distributed.leave)
        distributed.leave()
        return Outcome(ended.status)
