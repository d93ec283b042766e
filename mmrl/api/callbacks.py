"""Calls user functions during a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mmrl.api.media import Samples, shown
from mmrl.core.errors import UserError
from mmrl.experiment.evaluation import Estimate
from mmrl.experiment.watching import Watcher
from mmrl.rollout.collect import Sampled


@dataclass
class Callback:
    """Calls functions during a run; each may be None. Subclass it, or pass functions.

    on_iteration(iteration, metrics): after every iteration, counted from 1; metrics is a dict of
    numbers as in ``result.metrics``. If it returns True the run is saved and ends, to be resumed.
    on_rollout(iteration, samples): the policy's samples, before training on them, as ``Samples``
    with ``prompts`` and ``rewards``. on_evaluation(iteration, estimates): after an evaluation on
    held-out prompts, reward -> ``Estimate`` with mean, low and high.

    With several processes every process calls its functions, on_rollout with its share.
    """

    on_iteration: Callable[[int, dict[str, float]], object] | None = None
    on_rollout: Callable[[int, Samples], object] | None = None
    on_evaluation: Callable[[int, Mapping[str, Estimate]], object] | None = None


Callbacks = Callback | Sequence[Callback]


class Watching(Watcher):
    """Forwards the events of a run to the callbacks."""

    def __init__(self, callbacks: Callbacks):
        several = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        for callback in several:
            if not isinstance(callback, Callback):
                raise UserError(
                    f"callbacks: expected mmrl.Callback(on_iteration=...), got {callback!r}"
                )
        self.callbacks = several

    def iterated(self, iteration: int, metrics: Mapping[str, float]) -> bool:
        """Call the callbacks for an iteration; return whether one of them requests an end."""
        asked_to_end = [
            callback.on_iteration(iteration, dict(metrics)) is True
            for callback in self.callbacks
            if callback.on_iteration is not None
        ]
        return any(asked_to_end)

    def evaluated(self, iteration: int, estimates: Mapping[str, Estimate]) -> None:
        for callback in self.callbacks:
            if callback.on_evaluation is not None:
                callback.on_evaluation(iteration, estimates)

    def sampled(self, sampled: Sampled) -> dict[str, float]:
        """Call the callbacks for a rollout, as a monitor."""
        interested = [c.on_rollout for c in self.callbacks if c.on_rollout is not None]
        if interested:
            samples = Samples(
                shown(sampled.media),
                sampled.rollout.prompt_per_row(),
                {name: value.float().tolist() for name, value in sampled.rewards.items()},
            )
            for on_rollout in interested:
                on_rollout(sampled.iteration + 1, samples)
        return {}
