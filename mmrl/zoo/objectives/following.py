"""Keeps an objective's reference, which may follow the policy."""

from __future__ import annotations

from typing import Any

from mmrl.core.weights import Weights
from mmrl.objectives.contracts import MovesSnapshots, Stateful
from mmrl.objectives.kl import Reference
from samplers.noise import Rng


class Following(MovesSnapshots, Stateful):
    """Has a reference that may be refreshed and is saved with the run."""

    reference: Reference

    def begin_iteration(self, weights: Weights, iteration: int, rng: Rng) -> None:
        self.reference.follow(weights, iteration)

    def restarts(self, iteration: int) -> bool:
        return self.reference.restarts(iteration)

    def state_dict(self) -> dict[str, Any]:
        return self.reference.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reference.load_state_dict(state)
