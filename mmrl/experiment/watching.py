"""Defines the observer of a running training."""

from __future__ import annotations

from collections.abc import Mapping

from mmrl.experiment.build import Session
from mmrl.experiment.evaluation import Estimate
from mmrl.rollout.collect import Sampled
from mmrl.train.trainer import Trainer


class Watcher:
    """Is notified of what happens in a run; these methods do nothing."""

    def built(self, session: Session, trainer: Trainer) -> None:
        """Called with the parts of the run before the first iteration, or the first after a
        resume."""

    def iterated(self, iteration: int, metrics: Mapping[str, float]) -> bool:
        """Called with the metrics of a finished iteration; return True to save and end the run."""
        return False

    def evaluated(self, iteration: int, estimates: Mapping[str, Estimate]) -> None:
        """Called with the rewards of held-out prompts."""

    def sampled(self, sampled: Sampled) -> dict[str, float]:
        """Called with an iteration's samples, as a monitor."""
        return {}
