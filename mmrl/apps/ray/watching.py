"""Connects the run of a rank with the cluster: signals from the driver, and workers that sample."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Mapping
from typing import Any

from mmrl.apps.ray.rollouts import RolloutWorkers
from mmrl.config.sections import RayOptions
from mmrl.experiment.watching import Watcher


class RankWatcher(Watcher):
    """Ends the run on the driver's signal; moves sampling to workers, if there are any."""

    def __init__(self, control: Any):
        self.ray = importlib.import_module("ray")
        self.control = control
        self.workers: RolloutWorkers | None = None

    def built(self, session: Any, trainer: Any) -> None:
        options = session.config.section("ray", RayOptions)
        if options.rollout_workers:
            self.workers = RolloutWorkers(self.ray, session, trainer, options)

    def iterated(self, iteration: int, metrics: Mapping[str, float]) -> bool:
        if number := self.ray.get(self.control.signal.remote()):
            signal.raise_signal(number)  # the run handles it like a local signal
        return False

    def close(self) -> None:
        """End the workers of the run."""
        if self.workers is not None:
            self.workers.close()
            self.workers = None
