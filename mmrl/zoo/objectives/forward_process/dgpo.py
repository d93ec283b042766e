"""Direct group preference optimisation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.distributions import Dist
from mmrl.core.effects import Requires
from mmrl.core.metrics import observe
from mmrl.core.numbers import Draws
from mmrl.core.registry import OBJECTIVES, TIMES
from mmrl.core.types import Fields, Point, Rollout
from mmrl.objectives.base import frozen
from mmrl.objectives.contracts import Couples, TracksOld
from mmrl.objectives.forward_process import (
    comparisons,
    error,
    mean_square,
    noised,
    positive,
    summed,
    velocity,
)
from mmrl.objectives.kl import KL, KLTerm, Regularised
from mmrl.objectives.surrogates import Width
from mmrl.objectives.timestep_samplers import TimeSampler, early_steps
from mmrl.policies.base import Policy
from samplers.noise import Rng


@dataclass(frozen=True, kw_only=True)
class Preference(Fields):
    """Holds what a row gets from the comparison of its group."""

    advantage: Tensor  # [B, 1] times the group's weight sigmoid(S)
    old_error: Tensor | None  # [B, 1] under the old weights; None: nothing is clipped
    start: Tensor | None  # [B, *] velocity of the initial weights; None: without a KL


@OBJECTIVES.register("dgpo")
@dataclass
class DGPO(Regularised, Couples, TracksOld):
    """Prefer the good half of a group to the bad half, by denoising errors at shared noise (DGPO).

    Luo et al. 2025, "Reinforcing Diffusion Models by Direct Group Preference Optimization". With d
    the denoising error, S = sum_i A_i beta (d_i - d_i^ref) / G over the G samples of a group,
    minimises mean_i sigmoid(S) A_i d_i, whose gradient is that of (1 / beta) mean_g softplus(S_g).

    clip_range: a sample's error gives no gradient once exp(d^old - d) has moved by that much in its
    direction; null: no clip. reference: the weights of d^ref: the initial ones, guided by
    ``ref_guidance``, or the old ones, a moving average. kl: weight of the squared distance of the
    velocity to that of the initial weights, guided likewise, or a schedule. num_noise_draws,
    timestep_sampler: number and distribution of a sample's times of the forward process.
    behavior_policy: the weights that sample. old_decay_rate: after step n, old = c old + (1 - c)
    live with c = min(old_decay_max, old_decay_rate n).

    beta: scale of the difference of errors. advantage_clip: advantages are cut off at this size.
    ref_guidance: guidance scale of the reference. old_decay_max: largest decay of the sampling
    weights.
    """

    requires = Requires("gaussian", reads="sample")
    beta: float = 100.0
    clip_range: float | None = 1e-2
    advantage_clip: Width = 5.0
    kl: Annotated[float, Ge(0)] | KL = 0.02
    reference: Literal["ref", "old"] = "ref"
    ref_guidance: Annotated[float, Ge(0)] = 1.0
    num_noise_draws: Draws = 4
    timestep_sampler: Annotated[TimeSampler, TIMES] = early_steps
    behavior_policy: Literal["live", "old"] = "live"
    old_decay_rate: Annotated[float, Ge(0)] = 0.001
    old_decay_max: Annotated[float, Ge(0)] = 0.3

    def __post_init__(self) -> None:
        self.term = KLTerm.of_velocities(self.kl, "dgpo")
        positive(
            "objective.dgpo",
            beta=self.beta,
            advantage_clip=self.advantage_clip,
            clip_range=self.clip_range or 1.0,
        )
        lagging = self.clip_range or "old" in (self.behavior_policy, self.reference)
        self.snapshots = (
            *(("old",) if lagging else ()),
            *((self.term.name,) if self._based else ()),
        )

    def old_decay(self, step: int) -> float:
        return min(self.old_decay_max, self.old_decay_rate * step)

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        return noised(
            policy, rollout, rng, self.timestep_sampler, self.num_noise_draws, shared=True
        )

    def couples(self, policy: Policy) -> Literal["groups"]:
        return "groups"

    def measure(self, policy: Policy, point: Point) -> Tensor:
        """Return [B, 2 + D]: the excess of the error over the reference's; for the clip, the error
        under the old weights; and the velocity of the initial weights, which ``loss`` needs
        again."""
        live = error(policy.dist(point), point)
        lagging = self.clip_range or self.reference == "old"
        old = error(frozen(policy, "old", point), point) if lagging else torch.zeros_like(live)
        start = velocity(self._start(policy, point)) if self._based else point.target
        gap = live - (old if self.reference == "old" else mean_square(start - point.target))
        return torch.cat([gap, old, start.flatten(1) if self.term.active else gap[:, :0]], 1)

    def couple(self, point: Point, measured: Tensor) -> Point:
        gap, old, start = measured.to(point.advantage.device).tensor_split((1, 2), 1)
        advantage = point.advantage.clamp(-self.advantage_clip, self.advantage_clip)
        group = comparisons(point)
        size = summed(torch.ones_like(gap), group)
        score = summed(advantage * self.beta * gap, group) / size.clamp_min(1)
        weight = score.sigmoid()[group]
        observe("dgpo/weight", weight, point.mask)
        preference = Preference(
            advantage=weight * advantage,
            old_error=old if self.clip_range else None,
            start=start.view_as(point.target) if self.term.active else None,
        )
        return point.replace(coupling=preference)

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """Compute the loss; before ``couple`` all weights are 1 and nothing is clipped."""
        dist = policy.dist(point)
        denoising_error = error(dist, point)
        preference = Preference(advantage=point.advantage, old_error=None, start=None)
        if point.coupling is not None:
            preference = point.coupled(Preference)
        advantage = preference.advantage
        width = self.clip_range
        if width and preference.old_error is not None:
            ratio = (preference.old_error - denoising_error.detach()).exp()
            far = torch.where(advantage > 0, ratio > 1 + width, ratio < 1 - width)
            observe("ratio", ratio, point.mask)
            observe("clip_fraction", far.double(), point.mask)
            denoising_error = torch.where(far, denoising_error.detach(), denoising_error)
        loss = advantage * denoising_error
        if not self.term.active:
            return loss
        start = preference.start
        if start is None:
            start = velocity(self._start(policy, point))
        distance = mean_square(velocity(dist) - start)
        observe("kl", distance, point.mask)
        return loss + self.term.weight() * distance

    @property
    def _based(self) -> bool:
        """Tell whether the initial weights are needed."""
        return self.reference == "ref" or self.term.active

    def _start(self, policy: Policy, point: Point) -> Dist:
        return frozen(policy, self.term.name, point.replace(guidance=self.ref_guidance))
