"""The objective of masked diffusion: the surrogates and KLs of text, at the states that an
estimator chooses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import ESTIMATORS, OBJECTIVES, SURROGATES
from mmrl.core.types import Point, Rollout, Surrogate
from mmrl.objectives.base import frozen
from mmrl.objectives.contracts import CountsEpochs
from mmrl.objectives.decisions import WHOLE
from mmrl.objectives.kl import KL
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.objectives.surrogates import ppo
from mmrl.objectives.terms import EntropyBonus, KLPenalty
from mmrl.objectives.terms.entropy import Entropy
from mmrl.policies.base import Policy
from mmrl.policies.contracts import Remasks
from mmrl.zoo.objectives.mask_estimators import Estimator, several_passes, trajectory
from samplers.noise import Rng


@OBJECTIVES.register("masked")
class Masked(PolicyGradient, CountsEpochs):
    """Policy gradient of masked diffusion: exact, MaskGRPO, UniGRPO, d1, TraceRL ...

    estimator: the states that are scored, and with what weights. surrogate: the loss of ratio and
    advantage. kl: its weight, or all its options; entropy: likewise. Ratios at states that were not
    visited are to a snapshot of the weights at the iteration's start, at the same masks.
    """

    requires = replace(PolicyGradient.requires, decisions="masked")
    term_types = (KLPenalty, EntropyBonus)

    def __init__(
        self,
        estimator: Annotated[Estimator, ESTIMATORS] = trajectory,
        surrogate: Annotated[Surrogate, SURROGATES] = ppo,
        kl: Annotated[float, Ge(0)] | KL = 0.0,
        entropy: Annotated[float, Ge(0)] | Entropy = 0.0,
    ):
        super().__init__(surrogate, kl=kl, entropy=entropy)
        self.estimator = estimator
        self.snapshots = (*self.snapshots, "old")
        self.epoch: int | None = None

    def start_epoch(self, epoch: int | None) -> None:
        self.epoch = epoch

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        if not isinstance(policy, Remasks):
            raise UserError(
                f"the objective masked is for masked diffusion: "
                f"{type(policy).__name__} {Remasks.lack}"
            )
        points = self.estimator(policy, rollout, rng, self.epoch)
        if self.requires.single_paths and len(points) > 1 and not self._in_parts(policy):
            raise UserError(f"this surrogate {WHOLE}")
        length = torch.stack([point.mask.sum(1) for point in points]).sum(0)  # [B]
        return [
            p.replace(
                num_decisions=length, estimator_weight=weight_of(p, p.advantage).expand_as(p.mask)
            )
            for p in points
        ]

    def loss(self, policy: Policy, point: Point) -> Tensor:
        loss = super().loss(policy, point)
        return loss * weight_of(point, loss)

    def _in_parts(self, policy: Any) -> bool:
        return self.requires.single_paths and several_passes(self.estimator)

    def recorded(self, policy: Policy, point: Point, logp: Tensor) -> Tensor:
        """Return the recorded log-probs, or at a state that sampling did not visit, those of the
        sampling weights."""
        if point.logprob is not None:
            return point.logprob
        if point.on_policy:
            return logp.detach()
        return frozen(policy, "old", point).log_prob(point.target)


def weight_of(point: Point, like: Tensor) -> Tensor:
    """Return [B, 1] or [B, L]: the estimator's weight of every decision."""
    weight = point.estimator_weight
    return torch.ones_like(like[:, :1]) if weight is None else weight
