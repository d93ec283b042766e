"""Preferences between the best and the worst sample of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import softplus

from samplers.noise import Rng

from ..metrics import observe
from ..options import Count
from ..policies.base import Policy
from ..registry import OBJECTIVES, TIMES
from ..types import Point, Rollout
from .base import frozen
from .forward import comparisons, error, noised, positive, summed
from .times import TimeSampler, logit_normal


@OBJECTIVES.register("diffusion_dpo")
@dataclass
class DiffusionDPO:
    """Online Diffusion-DPO: the best of a group is preferred to the worst, by denoising errors at shared noise.

    Wallace et al. 2024, "Diffusion Model Alignment Using Direct Preference Optimization", eq. 14, on fresh pairs: with
    e the denoising error and D = e - e_ref, minimises -log sigmoid(-(beta / 2) (D_best - D_worst)). Groups of equal
    advantages make no pair. draws, times: how many times of the forward process a pair is looked at, and which.
    """

    beta: float = 100.0
    draws: Count = 1
    times: Annotated[TimeSampler, TIMES] = logit_normal

    def __post_init__(self) -> None:
        positive("objective.diffusion_dpo", beta=self.beta)
        self.behaviour, self.snapshots = "live", ("ref",)

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> list[Point]:
        paired = rollout.replace(kept=pairs(rollout))
        return noised(policy, paired, rng, self.times, self.draws, shared=True)

    def measure(self, policy: Policy, point: Point) -> Tensor:
        return error(policy.dist(point), point) - error(frozen(policy, "ref", point), point)

    def couple(self, point: Point, measured: Tensor) -> Point:
        """Each row's derivative of the loss by its error takes the place of its advantage."""
        pair = comparisons(point)
        mean = summed(point.advantage, pair) / 2
        side = (point.advantage - mean[pair]).sign()  # [B, 1] 1 for the best, -1 for the worst
        score = (summed(side * measured, pair) * self.beta / 2)[pair]
        observe("dpo/loss", softplus(score), point.mask)
        observe("dpo/right", (score < 0).double(), point.mask)
        return point.replace(advantage=self.beta * score.sigmoid() * side)  # times 2: a pair is two rows of the mean

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """Linear in the error, with the gradient of the loss above."""
        return point.advantage * error(policy.dist(point), point)


def pairs(rollout: Rollout) -> Tensor:
    """[B] bool: the rows of highest and of lowest advantage of each group, the first ones where several are equal."""
    kept = torch.ones_like(rollout.group, dtype=torch.bool) if rollout.kept is None else rollout.kept
    chosen = torch.zeros_like(kept)
    for group in rollout.group[kept].unique():
        rows = ((rollout.group == group) & kept).nonzero()[:, 0]
        advantage = rollout.advantage[rows, -1]
        if advantage.max() > advantage.min():
            chosen[rows[advantage.argmax()]] = chosen[rows[advantage.argmin()]] = True
    return chosen
