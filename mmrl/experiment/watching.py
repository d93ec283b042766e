"""Lets whoever started a run look on while it goes on."""

from __future__ import annotations

from collections.abc import Mapping

from mmrl.experiment.build import Session
from mmrl.experiment.evaluation import Estimate
from mmrl.rollout.collect import Sampled
from mmrl.train.trainer import Trainer


class Watcher:
    """Is told what happens in a run; these methods do nothing."""

    def built(self, session: Session, trainer: Trainer) -> None:
        """See the parts of the run before the first iteration, or the first after a resume."""

    def iterated(self, iteration: int, metrics: Mapping[str, float]) -> bool:
        """See the metrics of a finished iteration; return True to save and end the run."""
        return False

    def evaluated(self, iteration: int, estimates: Mapping[str, Estimate]) -> None:
        """See what held-out prompts earn."""

    def sampled(self, sampled: Sampled) -> dict[str, float]:
        """See what an iteration has sampled, as a monitor."""
        return {}
