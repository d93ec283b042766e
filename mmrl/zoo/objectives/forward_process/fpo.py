"""Flow matching policy gradients."""

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
from mmrl.objectives.base import Linearised, frozen, slope_of
from mmrl.objectives.contracts import Couples
from mmrl.objectives.forward_process import error, noised, positive, summed
from mmrl.objectives.surrogates import Width, both_sides
from mmrl.objectives.timestep_samplers import TimeSampler, uniform
from mmrl.policies.base import Policy
from samplers.noise import Rng


@OBJECTIVES.register("fpo")
@dataclass
class FPO(Couples):
    """PPO's clip on the ratio exp(mean (l_old - l)) of denoising errors l at the same noise (FPO).

    McAllister et al. 2025, "Flow Matching Policy Gradients", eq. 13: the mean stands in the
    exponent, so all draws of a sample have one ratio and are clipped together. clip_range: its
    range, one number or [low, high].

    advantage_clip: advantages are cut off at this size. num_noise_draws: times of a row.
    timestep_sampler: draws the times.
    """

    requires = Requires("gaussian", reads="sample")
    clip_range: float | tuple[float, float] = 0.05
    advantage_clip: Width = 5.0
    num_noise_draws: Draws = 8
    timestep_sampler: Annotated[TimeSampler, TIMES] = uniform

    def __post_init__(self) -> None:
        self.clip_bounds = both_sides(self.clip_range)
        positive(
            "objective.fpo",
            clip_range=min(self.clip_bounds),
            advantage_clip=self.advantage_clip,
        )
        self.snapshots = ("old",)

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        return noised(policy, rollout, rng, self.timestep_sampler, self.num_noise_draws)

    def couples(self, policy: Policy) -> Literal["groups"]:
        return "groups"

    def measure(self, policy: Policy, point: Point) -> Tensor:
        return error(frozen(policy, "old", point), point) - error(policy.dist(point), point)

    def couple(self, point: Point, measured: Tensor) -> Point:
        """Return the derivative of the clipped objective by the log-ratio."""
        _, row = point.row_id.unique(return_inverse=True)
        log_ratio = (summed(measured, row) / summed(torch.ones_like(measured), row))[row]
        ratio = log_ratio.exp()
        advantage = point.advantage.clamp(-self.advantage_clip, self.advantage_clip)
        low, high = self.clip_bounds
        clipped = torch.where(advantage > 0, ratio > 1 + high, ratio < 1 - low)
        for name, value in (
            ("log_ratio", log_ratio),
            ("ratio", ratio),
            ("clip_fraction", clipped.double()),
        ):
            observe(name, value, point.mask)
        return point.replace(
            coupling=Linearised(slope=torch.where(clipped, 0.0, advantage * ratio))
        )

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """Compute a loss that is linear in the error, with the gradient of PPO's loss; before
        ``couple`` the ratio is 1."""
        return slope_of(point) * error(policy.dist(point), point)
