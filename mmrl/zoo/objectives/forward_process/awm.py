"""Advantage-weighted matching."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.distributions import Dist
from mmrl.core.effects import Requires
from mmrl.core.metrics import observe
from mmrl.core.numbers import Draws
from mmrl.core.registry import OBJECTIVES, TIMES
from mmrl.core.types import Point, Rollout
from mmrl.objectives.base import frozen
from mmrl.objectives.forward_process import error, mean_square, noised, positive, velocity
from mmrl.objectives.kl import KL, KLTerm, Regularised
from mmrl.objectives.surrogates import Width, both_sides, outside, ppo, summed
from mmrl.objectives.timestep_samplers import TimeSampler, steps
from mmrl.policies.base import Policy
from samplers.noise import Rng

TINY = 1e-10  # keeps the roots differentiable at 0
POWER = 0.25  # of ghuber
Scoring = Callable[[Tensor, Tensor], Tensor]
SCORES: dict[
    str, Scoring
] = {  # (denoising error l [B, 1], time t [B, 1]) -> what stands for the log-prob
    "uniform": lambda l, t: -l,  # noqa: E741
    "t": lambda l, t: -l * t,  # noqa: E741
    "t2": lambda l, t: -l * t**2,  # noqa: E741
    "huber": lambda l, t: -((l + TINY).sqrt() - TINY**0.5) * t,  # noqa: E741
    "ghuber": lambda l, t: -((l + TINY) ** POWER - TINY**POWER) * t / POWER,  # noqa: E741
}


@OBJECTIVES.register("awm")
@dataclass
class AWM(Regularised):
    """Clip a policy gradient whose log-prob is minus a weighted denoising error (AWM).

    Xue et al. 2025, "Advantage Weighted Matching: Aligning RL with Pretraining in Diffusion
    Models". The ratio is between the live and the sampling weights at the same time and noise; its
    log is minus the difference of errors.

    weighting: of the error l at time t: uniform -l, t -l t, t2 -l t^2, huber about -sqrt(l) t,
    ghuber about -4 l^(1/4) t. clip_range: range of the ratio, one number or [low, high]. kl,
    ema_kl: weights of the squared distances of the velocity to the reference's and to that of the
    moving average of the weights, which ``train.ema`` keeps; kl may be a schedule.
    num_noise_draws, timestep_sampler: number and distribution of a sample's times.

    advantage_clip: advantages are cut off at this size.
    """

    requires = Requires("gaussian", reads="sample", proportional=True)
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = "ghuber"
    clip_range: float | tuple[float, float] = 1.0
    advantage_clip: Width = 1.0
    kl: Annotated[float, Ge(0)] | KL = 1e-4
    ema_kl: Annotated[float, Ge(0)] = 0.0
    num_noise_draws: Draws = 6
    timestep_sampler: Annotated[TimeSampler, TIMES] = steps

    def __post_init__(self) -> None:
        self.term = KLTerm.of_velocities(self.kl, "awm")
        self.clip_bounds = both_sides(self.clip_range)
        positive(
            "objective.awm",
            clip_range=min(self.clip_bounds),
            advantage_clip=self.advantage_clip,
        )
        looked_at = {self.term.name: self.term.active, "ema": self.ema_kl}
        self.snapshots = ("old", *(name for name, weight in looked_at.items() if weight))
        self.score = SCORES[self.weighting]
        low, high = self.clip_bounds
        self.surrogate = partial(ppo, clip_low=low, clip_high=high)

    def extra_terms(self) -> str:
        return "kl" if self.term.active else "ema_kl" if self.ema_kl else ""

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        return noised(policy, rollout, rng, self.timestep_sampler, self.num_noise_draws)

    def loss(self, policy: Policy, point: Point) -> Tensor:
        dist = policy.dist(point)
        # on policy these are the live weights: no second pass is needed
        old = None if point.on_policy else frozen(policy, "old", point)
        t = point.time[:, None].double()
        new = self.score(error(dist, point).double(), t)
        before = new.detach() if old is None else self.score(error(old, point).double(), t)
        ratio = (new - before).detach().exp()
        observe("log_ratio", new - before, point.mask)
        observe("ratio", ratio, point.mask)
        observe("clip_fraction", outside(ratio, *self.clip_bounds).double(), point.mask)
        advantage = point.credit().clamp(-self.advantage_clip, self.advantage_clip)
        loss = summed(self.surrogate, new, before, advantage, point.mask)
        loss = loss.to(torch.promote_types(advantage.dtype, torch.float32))
        if self.term.in_force():
            loss = loss + self.term.weight() * self._distance(
                "kl", dist, point, self.term.reference_at(policy, point)
            )
        if self.ema_kl:
            loss = loss + self.ema_kl * self._distance(
                "kl_ema", dist, point, frozen(policy, "ema", point)
            )
        return loss

    def _distance(self, metric: str, dist: Dist, point: Point, other: Dist) -> Tensor:
        distance = mean_square(velocity(dist) - velocity(other))
        observe(metric, distance, point.mask)
        return distance
