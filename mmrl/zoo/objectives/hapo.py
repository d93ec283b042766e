"""HAPO: every token's advantage and clip follow the entropy it was drawn at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.core.decisions import entropy_scale
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import Point, Rewards, Rollout
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.objectives.policy_loss import watch
from mmrl.objectives.surrogates import summed
from mmrl.objectives.terms import OF_TOKENS, Scored
from mmrl.policies.base import Policy
from samplers.warp import EntropyScale


@OBJECTIVES.register("hapo")
class HAPO(PolicyGradient):
    """Policy gradient with advantage and clip adapted to each token's entropy (HAPO).

    Liu et al. 2025, "From uniform to heterogeneous". h in [-1, 1] is the relative log H of a token
    within the iteration, of the entropies that the policy records: (log H - median) / std, divided
    by the largest or by minus the smallest (our reading of the published scales). The clip is [1 -
    low (1 - clip_strength h), 1 + high] for h <= 0 and [1 - low, 1 + high (1 + clip_strength h)]
    for h > 0: confident tokens may fall further, uncertain ones rise further. A is multiplied by 1
    + advantage_strength h, for h > 0 where the ratio has left the inner half of the clip, for h <=
    0 inside it. clip_low, clip_high: low and high. Use it with the advantage hapo and the policy's
    adaptive_temperature. Others as in policy_gradient.

    clip_strength: how far the entropy moves the clip. advantage_strength: how far it scales the
    advantage.
    """

    requires = replace(PolicyGradient.requires, decisions="categorical", proportional=False)
    not_options = ("surrogate", "clip_range")
    term_types = OF_TOKENS
    scale: EntropyScale | None = None  # of this iteration

    @staticmethod
    def records(options: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the policy's options that turn on the records needed."""
        return ("record_entropy",)

    def __init__(
        self,
        clip_low: Annotated[float, Gt(0)] = 0.2,
        clip_high: Annotated[float, Gt(0)] = 0.28,
        clip_strength: Annotated[float, Ge(0), Le(1)] = 1.0,
        advantage_strength: Annotated[float, Ge(0), Le(1)] = 1.0,
        **options: Any,
    ):
        super().__init__(**options)
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.clip_strength = clip_strength
        self.advantage_strength = advantage_strength

    @torch.no_grad()
    def shaped(self, policy: Policy, rollout: Rollout, rewards: Rewards) -> Rewards:
        """Measure the entropies of the iteration; the rewards are those of policy_gradient."""
        self.scale = entropy_scale(rollout)
        return super().shaped(policy, rollout, rewards)

    def policy_loss(self, at: Scored) -> Tensor:
        point = at.point
        h = self._places(point)
        scale = self.clip_scale(point)
        low = scale * self.clip_low * (1 - self.clip_strength * h.clamp(max=0))
        high = scale * self.clip_high * (1 + self.clip_strength * h.clamp(min=0))
        ratio = (at.logp - at.old).exp()
        near = (ratio > 1 - low / 2) & (ratio < 1 + high / 2)
        factor = torch.where(near == (h > 0), 1.0, 1 + self.advantage_strength * h)
        advantage = at.advantage * factor
        bounded = torch.minimum(torch.maximum(ratio, 1 - low), 1 + high)

        def clipped(logp: Tensor, old: Tensor, plain: Tensor, mask: Tensor) -> Tensor:
            return torch.maximum(-plain * factor * ratio, -plain * factor * bounded)

        loss = summed(clipped, at.logp, at.old, self.surrogate.credit(point), point.mask)
        stopped = (advantage > 0) & (ratio > 1 + high) | (advantage < 0) & (ratio < 1 - low)
        watch(ratio, stopped.double(), stopped.double(), point)
        return loss

    def _places(self, point: Point) -> Tensor:
        """Return h [B, L]; 0 before an iteration has begun, or where nothing is recorded."""
        if self.scale is None or point.entropy is None:
            return torch.zeros_like(point.mask, dtype=point.recorded.dtype)
        return self.scale(point.entropy)
