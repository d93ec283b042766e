"""The clipped policy gradient: PPO's surrogate on grouped advantages, on any family's decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmrl.core.distributions import Dist, Gaussian
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import Point, Rollout, Surrogate
from mmrl.objectives.base import Objective, frozen
from mmrl.objectives.surrogates import both_sides, outside, ppo
from mmrl.policies.base import Policy
from samplers.noise import Rng


@OBJECTIVES.register("grpo")
@dataclass
class PolicyGradient(Objective):
    """Clipped policy gradient with KL to the reference: Flow-GRPO, DanceGRPO, GRPO.

    clip_range: range of the ratio, one number or [low, high]. advantage_clip: bound on |A|. kl:
    weight of the KL to the reference, from the same distributions. kl_form: "gaussian" is that KL;
    "flow_grpo" is it times the step length, as Flow-GRPO publishes it. timestep_fraction,
    timestep_selection: how much of every row's decisions is trained on, and which. behavior_policy:
    the weights that sample. timestep_weighting: "noise" multiplies the loss of a step by the noise
    injected there, so that the early, decisive steps count more (TempFlow-GRPO, He et al. 2025; its
    code is not public).
    """

    clip_range: float | tuple[float, float] = 1e-4
    advantage_clip: float = 5.0
    kl: float = 0.0
    kl_form: Literal["gaussian", "flow_grpo"] = "gaussian"
    timestep_fraction: float = 1.0
    timestep_selection: Literal["first", "random"] = "first"
    behavior_policy: str = "live"
    timestep_weighting: Literal["even", "noise"] = "even"
    surrogate: Surrogate = field(init=False, repr=False)
    called: ClassVar[str] = "objective.grpo"
    # looks at decisions on the path: a sampler without noise has none
    visits: ClassVar[bool] = True
    reads: ClassVar[str] = "decisions"

    def __post_init__(self) -> None:
        self.clip_bounds = both_sides(self.clip_range)
        if min(self.clip_bounds) <= 0 or self.advantage_clip <= 0 or self.kl < 0:
            raise UserError(
                f"{self.called} needs clip_range > 0, advantage_clip > 0 and kl >= 0; got "
                f"clip_range "
                f"{self.clip_range}, "
                f"advantage_clip {self.advantage_clip}, kl {self.kl}"
            )
        if not 0 < self.timestep_fraction <= 1:
            raise UserError(
                f"{self.called}.timestep_fraction must lie in (0, 1], not {self.timestep_fraction}"
            )
        low, high = self.clip_bounds
        self.surrogate = partial(ppo, clip_low=low, clip_high=high)
        self.snapshots = ("ref",) if self.kl else ()

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        chosen = subset(
            rollout.mask,
            self.timestep_fraction,
            rng if self.timestep_selection == "random" else None,
            rollout.row_id,
        )
        return policy.path(rollout.replace(mask=chosen))

    def loss(self, policy: Policy, point: Point) -> Tensor:
        dist = policy.dist(point)
        logp = dist.log_prob(point.target)
        old = point.old(logp, point.logprob)
        advantage = point.advantage.clamp(-self.advantage_clip, self.advantage_clip)
        # the gate looks at what rounding makes of it
        observe("log_ratio", logp - point.logprob, point.current())
        self._observe(logp - old, point.mask)
        loss = self.surrogate(logp, old, advantage, point.mask) * self._weight(dist)
        return loss + self.kl * self._kl(policy, point, dist) if self.kl else loss

    def _weight(self, dist: Dist) -> Tensor | float:
        if self.timestep_weighting == "even":
            return 1.0
        if not isinstance(dist, Gaussian):
            raise UserError(
                f"{self.called}.timestep_weighting noise is for flow and diffusion models; use even"
            )
        return dist.std.flatten(1)[:, :1]

    def _kl(self, policy: Policy, point: Point, dist: Dist) -> Tensor:
        kl = dist.kl(frozen(policy, "ref", point))
        observe("kl", kl, point.mask)
        if self.kl_form == "flow_grpo":
            if point.next_time is None:
                raise UserError(f"{self.called}.kl_form flow_grpo is for flow models; use gaussian")
            kl = kl * (point.time - point.next_time)[:, None]
        return kl

    def _observe(self, log_ratio: Tensor, mask: Tensor) -> None:
        ratio = log_ratio.exp()
        observe("ratio", ratio, mask)
        observe("clip_fraction", outside(ratio, *self.clip_bounds).double(), mask)


def subset(mask: Tensor, fraction: float, rng: Rng | None, row: Tensor) -> Tensor:
    """[B, K] bool: int(n * fraction), at least one, of the n decisions of each row, the first or
    (with rng) random."""
    if fraction == 1:
        return mask
    order = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    if rng is not None:
        order = rng.uniform(row, (mask.shape[1],))
    # [B, K] place among the row's own
    rank = torch.where(mask, order.double(), torch.inf).argsort(1).argsort(1)
    count = mask.sum(1, keepdim=True)
    # int(n * fraction), despite 0.3 * 10 < 3
    keep = (count.double() * fraction + 1e-9).floor().clamp_min(1)
    return mask & (rank < keep)
