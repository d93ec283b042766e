"""GRPO-Guard: the clipped policy gradient with a ratio that has the same scale at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmrl.core.distributions import TINY, Dist, as_gaussian
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import Point
from mmrl.objectives.base import frozen
from mmrl.objectives.decisions import OF_TOKENS
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.objectives.surrogates import Width, outside, summed
from mmrl.policies.base import Policy


@OBJECTIVES.register("grpo_guard")
class Guard(PolicyGradient):
    """Normalise the ratio, log rho = mean_d[e_old (mu - mu_old)], and balance steps (GRPO-Guard).

    Wang et al. 2025, "GRPO-Guard: Mitigating Implicit Over-Optimization in Flow Matching via
    Regulated Clipping". e_old is the noise that was injected, (x' - mu_old) / std, so that log rho
    is (log-ratio + KL(new || old)) times std. balance: the loss of a step is divided by its length,
    as the official code does. All else as in policy_gradient.
    """

    needs = "gaussian"
    not_options = ("surrogate", "timestep_weighting", "importance_sampling", "sft", *OF_TOKENS)

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

    def loss(self, policy: Policy, point: Point) -> Tensor:
        dist = policy.dist(point)
        old = frozen(policy, "old", point)
        log_ratio = normalised(dist, old, point.target)
        ratio = log_ratio.exp()
        # what the gate looks at
        logp, recorded = self._log_probs(policy, point, dist)
        observe("log_ratio", logp - recorded, point.mask)
        observe("ratio", ratio, point.mask)
        observe("clip_fraction", outside(ratio, *self.clip_bounds).double(), point.mask)
        zero = torch.zeros_like(log_ratio)
        loss = summed(self.surrogate, log_ratio, zero, self._credit(point), point.mask)
        if self.balance:
            loss = loss / (point.time - point.transition.next_time)[:, None]
        if self.term.in_force() and self.kl.where == "loss":
            penalty = self._kl(policy, point, dist, logp, point.old(logp, recorded))
            loss = loss + self.term.weight() * penalty
        return loss


def normalised(dist: Dist, old: Dist, target: Tensor) -> Tensor:
    """Return [B, 1]: mean over dimensions of e_old (mu - mu_old). Raises UserError for a policy
    without Gaussian steps."""
    now, before = (as_gaussian(each, "compares means") for each in (dist, old))
    noise = (target - before.mean) / before.std.clamp_min(TINY)
    return (noise * (now.mean - before.mean)).flatten(1).mean(1, keepdim=True)
