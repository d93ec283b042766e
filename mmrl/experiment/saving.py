"""Decides when a run saves besides ``train.save_every``: by the clock, and if the held-out score is
the best so far, whose checkpoint is kept."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.config.options import TrainOptions
from mmrl.core import distributed
from mmrl.core.files import json_object, write_text
from mmrl.experiment.checkpoint import BEST


@dataclass
class Saving:
    """Tracks the time of the last save, and the iteration and score of the best evaluation.

    ``weights``: of the trained rewards; without any the score is minus the held-out loss.
    """

    options: TrainOptions
    folder: Path  # of checkpoints
    weights: Mapping[str, float]
    since: float = field(default_factory=time.monotonic)
    best: int | None = None
    score: float = -math.inf

    def recall(self, iteration: int) -> None:
        """Restore the best checkpoint of a run resumed at ``iteration``."""
        known = json_object(self.folder / BEST)
        if self.options.save_best and known.get("iteration", math.inf) <= iteration:
            self.best, self.score = int(known["iteration"]), float(known["score"])

    def improved(self, iteration: int, metrics: Mapping[str, float]) -> bool:
        """Tell whether this iteration's evaluation, if any, is the best, and record it."""
        score = self.score_of(metrics) if self.options.save_best else None
        if score is None or not score > self.score:
            return False
        self.best, self.score = iteration, score
        return True

    def score_of(self, metrics: Mapping[str, float]) -> float | None:
        """Return the weighted sum of the held-out rewards, as training sums them."""
        names = [name for name, weight in self.weights.items() if weight]
        if not names:
            loss = metrics.get("eval/loss")
            return None if loss is None else -loss
        if any(f"eval/{name}" not in metrics for name in names):
            return None
        return sum(self.weights[name] * metrics[f"eval/{name}"] for name in names)

    def by_clock(self) -> bool:
        """Tell whether the last save is ``train.save_minutes`` ago for any process; a collective
        call."""
        minutes = self.options.save_minutes
        return minutes is not None and distributed.any_of(
            time.monotonic() - self.since > 60 * minutes
        )

    def note_best(self, active: bool) -> None:
        """Record the best checkpoint, once it is on disk; on the main process."""
        if active:
            about = {"iteration": self.best, "score": self.score}
            write_text(self.folder / BEST, json.dumps(about))
