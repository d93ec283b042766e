"""GRPO-Guard: the clipped policy gradient with a ratio that has the same scale at every step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmrl.core.distributions import TINY, Dist, as_gaussian
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES
from mmrl.objectives.base import frozen
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.objectives.surrogates import Width, outside, summed
from mmrl.objectives.terms import KLPenalty, Scored, TimestepShare


@OBJECTIVES.register("grpo_guard")
class Guard(PolicyGradient):
    """Normalise the ratio, log rho = mean_d[e_old (mu - mu_old)], and balance steps (GRPO-Guard).

    Wang et al. 2025, "GRPO-Guard: Mitigating Implicit Over-Optimization in Flow Matching via
    Regulated Clipping". e_old is the noise that was injected, (x' - mu_old) / std, so that log rho
    is (log-ratio + KL(new || old)) times std. balance: the loss of a step is divided by its length,
    as the official code does. All else as in policy_gradient.
    """

    requires = replace(PolicyGradient.requires, decisions="gaussian")
    not_options = ("surrogate",)
    term_types = (TimestepShare, KLPenalty)

    def __init__(
        self,
        clip_range: float | tuple[float, float] = 2e-6,
        advantage_clip: Width | None = 5.0,
        balance: bool = True,
        **options: Any,
    ):
        super().__init__(clip_range=clip_range, advantage_clip=advantage_clip, **options)
        self.balance = balance
        self.snapshots = (*self.snapshots, "old")

    def policy_loss(self, at: Scored) -> Tensor:
        point = at.point
        log_ratio = normalised(at.dist, frozen(at.policy, "old", point), point.target)
        ratio = log_ratio.exp()
        observe("ratio", ratio, point.mask)
        observe("clip_fraction", outside(ratio, *self.clip_bounds).double(), point.mask)
        zero = torch.zeros_like(log_ratio)
        credit = self.surrogate.credit(point)
        loss = summed(self.surrogate.function, log_ratio, zero, credit, point.mask)
        if self.balance:
            loss = loss / (point.time - point.transition.next_time)[:, None]
        return loss


def normalised(dist: Dist, old: Dist, target: Tensor) -> Tensor:
    """Return [B, 1]: mean over dimensions of e_old (mu - mu_old). Raises UserError for a policy
    without Gaussian steps."""
    now, before = (as_gaussian(each, "compares means") for each in (dist, old))
    noise = (target - before.mean) / before.std.clamp_min(TINY)
    return (noise * (now.mean - before.mean)).flatten(1).mean(1, keepdim=True)
