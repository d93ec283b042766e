"""The objective of masked diffusion: the surrogates and KLs of text, at the states that an
estimator chooses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import ESTIMATORS, OBJECTIVES, SURROGATES
from mmrl.core.types import Point, Rollout, Surrogate
from mmrl.objectives.base import frozen
from mmrl.objectives.kl import KL
from mmrl.objectives.mask_estimators import Estimator, several_passes, trajectory
from mmrl.objectives.surrogates import ppo, sees_whole_rows
from mmrl.objectives.text import Entropy, Text
from mmrl.policies.base import Policy, Remaskable
from samplers.noise import Rng

WHOLE = (
    "this surrogate compares whole samples, which this estimator scores in several "
    "passes; choose the surrogate ppo, "
    "cispo, sapo or reinforce, or an estimator of one pass (d1; mask_grpo, uni_grpo, "
    "random with draws: 1)"
)


@OBJECTIVES.register("masked")
class Masked(Text):
    """Policy gradients for masked diffusion: exact, MaskGRPO, UniGRPO, d1, TraceRL ... by the
    estimator.

    estimator: the states that are scored, and with what weights. surrogate: the loss of ratio and
    advantage. kl: its weight, or all its choices; entropy: likewise. Ratios at states that were not
    visited are to the weights of the iteration's start, which are kept, at the very same masks.
    """

    needs = "masked"

    def __init__(
        self,
        estimator: Annotated[Estimator, ESTIMATORS] = trajectory,
        surrogate: Annotated[Surrogate, SURROGATES] = ppo,
        kl: Annotated[float, Ge(0)] | KL = 0.0,
        entropy: Annotated[float, Ge(0)] | Entropy = 0.0,
    ):
        super().__init__(surrogate, kl, entropy)
        self.estimator = estimator
        if sees_whole_rows(self.surrogate) and several_passes(estimator):
            raise UserError(WHOLE)
        self.snapshots = (*self.snapshots, "old")

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        if not isinstance(policy, Remaskable):
            raise UserError(
                f"the objective masked is for masked diffusion: "
                f"{type(policy).__name__} hides no tokens"
            )
        points = self.estimator(policy, rollout, rng)
        if sees_whole_rows(self.surrogate) and len(points) > 1:
            raise UserError(WHOLE)
        length = sum(point.mask.sum(1) for point in points)  # [B]
        weight = torch.ones_like(points[0].advantage[:, :1])
        weights = [weight if p.estimator_weight is None else p.estimator_weight for p in points]
        return [
            p.replace(num_decisions=length, estimator_weight=w.expand_as(p.mask))
            for p, w in zip(points, weights, strict=True)
        ]

    def loss(self, policy: Policy, point: Point) -> Tensor:
        return super().loss(policy, point) * point.estimator_weight

    def recorded(self, policy: Policy, point: Point, logp: Tensor) -> Tensor:
        """What sampling recorded, or at a state that it did not visit, what its weights say of
        it."""
        if point.logprob is not None:
            return point.logprob
        return (
            logp.detach()
            if point.on_policy
            else frozen(policy, "old", point).log_prob(point.target)
        )
