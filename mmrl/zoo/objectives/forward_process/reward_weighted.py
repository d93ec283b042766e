"""Reward-weighted regression on the samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from mmrl.core.effects import Requires
from mmrl.core.metrics import observe
from mmrl.core.numbers import Draws
from mmrl.core.registry import OBJECTIVES, TIMES
from mmrl.core.types import Point, Rollout
from mmrl.objectives.base import Linearised, slope_of
from mmrl.objectives.contracts import Couples
from mmrl.objectives.forward_process import noised, positive
from mmrl.objectives.timestep_samplers import TimeSampler, uniform
from mmrl.policies.base import Policy
from samplers.noise import Rng


@OBJECTIVES.register("rwr")
@dataclass
class RewardWeightedRegression(Couples):
    """Fit samples by weight: -w log p(sample), w = exp(A / beta) of mean 1 in each group (RWR).

    Peters and Schaal 2007, "Reinforcement learning by reward-weighted regression"; Lee et al. 2023,
    "Aligning text-to-image models using human feedback", eq. 4. The log-likelihood is minus the
    denoising error, or for tokens that of the hidden ones. weights: "advantage" is w = A itself,
    unbounded below, as Flow-GRPO's code publishes it.

    beta: temperature of the weights. num_noise_draws: times of a row. timestep_sampler: draws the
    times.
    """

    requires = Requires("gaussian", reads="sample")
    beta: float = 1.0
    weights: Literal["exp", "advantage"] = "exp"
    num_noise_draws: Draws = 1
    timestep_sampler: Annotated[TimeSampler, TIMES] = uniform

    def __post_init__(self) -> None:
        positive("objective.rwr", beta=self.beta)

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        return noised(policy, rollout, rng, self.timestep_sampler, self.num_noise_draws)

    def couples(self, policy: Policy) -> Literal["groups"]:
        return "groups"

    def measure(self, policy: Policy, point: Point) -> Tensor:
        return point.advantage[:, -1:]

    def couple(self, point: Point, measured: Tensor) -> Point:
        if self.weights == "advantage":
            return point
        rows, row = point.row_id.unique(return_inverse=True)
        # of each row once
        advantage = measured.new_zeros(len(rows)).scatter(0, row, measured[:, 0])
        group = point.group.new_zeros(len(rows)).scatter(0, row, point.group)
        weight = torch.zeros_like(advantage)
        for index in group.unique():
            members = group == index
            weight[members] = (advantage[members] / self.beta).softmax(0) * members.sum()
        observe("rwr/largest_weight", weight.max().expand(1, 1))
        return point.replace(coupling=Linearised(slope=weight[row, None]))

    def loss(self, policy: Policy, point: Point) -> Tensor:
        return -slope_of(point) * policy.dist(point).log_prob(point.target)
