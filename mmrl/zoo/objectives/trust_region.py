"""Flow-DPPO: the policy gradient with a trust region by divergence instead of by ratio."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmrl.core.distributions import TINY, Dist, as_gaussian
from mmrl.core.effects import Requires
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import Point, Rollout
from mmrl.objectives.base import Objective, frozen
from mmrl.objectives.forward_process import mean_square, positive, velocity
from mmrl.objectives.surrogates import Width
from mmrl.policies.base import Policy
from samplers.noise import Rng

CLAMP = 0.99  # of the time in the published standard deviation


@OBJECTIVES.register("flow_dppo")
@dataclass
class FlowDPPO(Objective):
    """The loss -A rho, or 0 where the KL to the old policy is large and would grow (Flow-DPPO).

    As in Tencent's UniRL (2026). The KL is mean_d (mu - mu_old)^2 / (2 std^2), a mean over the
    dimensions; a decision is dropped if it reaches ``threshold`` while rho > 1 and A > 0, or rho <
    1 and A < 0. Nothing else is clipped. std: "exact" is that of the step; "published" is
    flow_sde's with the time clamped to 0.99 in its denominator; "one" leaves it out.

    threshold: of the KL. advantage_clip: advantages are cut off at this size.
    """

    threshold: float = 1e-5
    advantage_clip: Width = 5.0
    std: Literal["exact", "published", "one"] = "exact"
    requires = Requires("gaussian", reads="decisions", visits=True)

    def __post_init__(self) -> None:
        positive(
            "objective.flow_dppo", threshold=self.threshold, advantage_clip=self.advantage_clip
        )
        self.snapshots = ("old",)

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        return policy.path(rollout)

    def loss(self, policy: Policy, point: Point) -> Tensor:
        dist = policy.dist(point)
        old = frozen(policy, "old", point)
        kl = mean_square(velocity(dist) - velocity(old)) / (2 * self._variance(dist, point))
        logp = dist.log_prob(point.target)
        advantage = point.advantage.clamp(-self.advantage_clip, self.advantage_clip)
        recorded = point.recorded
        observe("log_ratio", logp - recorded, point.mask)
        observe("ratio", (logp - recorded).exp(), point.mask)
        observe("kl_old", kl, point.mask)
        return gated(self.threshold, logp, recorded, advantage, kl.detach(), point.mask)

    def _variance(self, dist: Dist, point: Point) -> Tensor:
        """Return the variance of a step, [B, 1]."""
        if self.std == "one":
            return torch.ones_like(point.recorded)
        if self.std == "exact":
            purpose = "divides by a step's variance"
            std = as_gaussian(dist, purpose).row_std(purpose, "set std to published or one")
            return std.clamp_min(TINY) ** 2
        t = point.time
        step = point.transition
        length = t - step.next_time
        return (step.noise_level**2 * t / (1 - t.clamp(max=CLAMP)) * length).clamp_min(TINY**2)[
            :, None
        ]


def gated(
    threshold: float, logp: Tensor, old: Tensor, advantage: Tensor, kl: Tensor, mask: Tensor
) -> Tensor:
    """-A rho, or 0 where kl >= threshold and the update would move rho further from 1. All [B,
    L]."""
    ratio = (logp - old).exp()
    away = ((ratio > 1) & (advantage > 0)) | ((ratio < 1) & (advantage < 0))
    dropped = away & (kl >= threshold)
    observe("clip_fraction", dropped.double(), mask)
    return torch.where(dropped, 0.0, -advantage * ratio)
