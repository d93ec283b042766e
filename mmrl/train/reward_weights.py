"""Weights several rewards during training by the agreement of their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from mmrl.advantages import memory
from mmrl.config.options import RewardGradients
from mmrl.core.errors import UserError
from mmrl.core.sharding import sharded
from mmrl.core.types import Advantage, Rewards, Rollout
from mmrl.objectives.base import Objective
from mmrl.policies.base import Policy

# compares by some rewards; then the gradient of the loss for these advantages
Compare = Callable[[Rewards], Rollout]
Gradient = Callable[[Rollout], list[Tensor]]


class RewardWeights:
    """Holds the share that every reward has in the sum, which follows the gradients.

    Lu et al. 2025, "Learning to optimize multi-objective alignment through dynamic reward
    weighting": share_i <- share_i exp(rate I_i) / Z, I_i = <g_i, sum_j g_j>, g_i the gradient of
    the objective under reward i alone. The gradient for advantages of 0, that of the rest of the
    loss such as a KL, is subtracted from g_i.
    """

    def __init__(self, options: RewardGradients):
        self.options = options
        self.shares: dict[str, float] = {}

    def suits(self, objective: Objective, policy: Policy, scales_loss: bool) -> None:
        """Raise UserError if gradients of single rewards cannot be computed."""
        follows = objective.requires.differentiates
        for applies, reason in (
            (follows, "the objective follows the gradient of the rewards itself"),
            (scales_loss, "fp16 scales the loss: use train.precision bf16"),
            (sharded(policy.net), "parameters are sharded, and their gradients with them"),
        ):
            if applies:
                raise UserError(f"train.reward_gradients: {reason}; leave it out")

    def weighted(
        self, rewards: Rewards, names: list[str], compare: Compare, gradient: Gradient
    ) -> Rewards:
        """Return the rewards with weights that follow the gradients of those called ``names``."""
        names = [name for name in names if rewards.weights[name]]
        if len(names) < 2:
            raise UserError(
                f"train.reward_gradients weighs several rewards against each other, and "
                f"{', '.join(names) or 'none'} is all there is; add one, or leave it out"
            )
        alone = {name: self._alone(rewards, name) for name in names}
        first = compare(alone[names[0]])
        zero = torch.zeros_like(first.advantages())
        besides = gradient(first.replace(advantage=zero, advantage_parts=None))
        gradients = [
            [g - b for g, b in zip(gradient(compare(alone[name])), besides, strict=True)]
            for name in names
        ]
        self._learn(names, influences(gradients, self.options.measure == "cosine"))
        factor = {name: len(names) * self.shares[name] for name in names}
        weights = {name: w * factor.get(name, 1.0) for name, w in rewards.weights.items()}
        return Rewards(rewards, weights)

    def metrics(self) -> dict[str, float]:
        return {f"reward_weight/{name}": share for name, share in self.shares.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"shares": self.shares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shares = {name: float(share) for name, share in state.get("shares", {}).items()}

    @staticmethod
    def _alone(rewards: Rewards, name: str) -> Rewards:
        weights = {key: w if key == name else 0.0 for key, w in rewards.weights.items()}
        return Rewards(rewards, weights)

    def _learn(self, names: list[str], influence: list[float]) -> None:
        """Move the shares by one step; none falls below the least one."""
        logs = [
            math.log(self.shares.get(name, 1 / len(names))) + self.options.rate * value
            for name, value in zip(names, influence, strict=True)
        ]
        powers = [math.exp(x - max(logs)) for x in logs]
        least = self.options.least / len(names)
        shares = [least + (1 - self.options.least) * x / sum(powers) for x in powers]
        self.shares = dict(zip(names, shares, strict=True))


def forgetting(advantage: Advantage, compare: Compare) -> Compare:
    """Return a comparison that leaves the state of the advantage unchanged."""

    def compared(rewards: Rewards) -> Rollout:
        remembered = deepcopy(memory.capture(advantage))
        rollout = compare(rewards)
        memory.restore(advantage, remembered)
        return rollout

    return compared


def influences(gradients: list[list[Tensor]], cosine: bool) -> list[float]:
    """Return each gradient's dot product with the sum of all, or the cosine of their angle."""
    flat = torch.stack([torch.cat([g.flatten().double() for g in parts]) for parts in gradients])
    total = flat.sum(0)
    product = flat @ total
    if cosine:
        product = product / (flat.norm(dim=1) * total.norm()).clamp_min(1e-30)
    values: list[float] = product.tolist()
    return values
