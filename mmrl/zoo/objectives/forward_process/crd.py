"""Centred reward distillation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.distributed import all_sum
from mmrl.core.effects import Requires
from mmrl.core.metrics import observe
from mmrl.core.numbers import Draws
from mmrl.core.registry import OBJECTIVES, TIMES
from mmrl.core.types import Fields, Point, Rollout
from mmrl.objectives.base import frozen
from mmrl.objectives.contracts import Couples, TracksOld
from mmrl.objectives.forward_process import (
    comparisons,
    mean_absolute,
    mean_square,
    noised,
    positive,
    summed,
    velocity,
)
from mmrl.objectives.kl import KL, KLTerm, Regularised
from mmrl.objectives.surrogates import Width
from mmrl.objectives.timestep_samplers import TimeSampler, steps
from mmrl.policies.base import Policy
from samplers.noise import Rng


@dataclass(frozen=True, kw_only=True)
class Centred(Fields):
    """Holds the targets of a row, one column for each direction of weights."""

    optimality: Tensor  # [B, D] wanted reward less its centre
    implicit_mean: Tensor  # [B, D] centre of the model's own rewards
    old_error: Tensor  # [B, 1] q_old


@OBJECTIVES.register("crd")
@dataclass
class CRD(Regularised, Couples, TracksOld):
    """Fit the model's implicit reward to the reward, both centred over the group (CRD).

    Flow-Factory's "Centered Reward Distillation". With q the denoising error over its mean absolute
    value, the implicit reward is r = -(q - q_old) and the wanted one a = 1/2 + A / (2
    advantage_clip); both are centred by their mean under weights p, and (beta r_c - a_c)^2 ("mse")
    or the cross-entropy of sigmoid(beta r_c) with sigmoid(a_c) ("bce") is minimised. temperature:
    None has equal weights; else the loss is the mean over p = softmax(a / temperature) and p =
    softmax(-a / temperature); 0 does what the published code does at 0: softmax(a) and equal
    weights. centre: over the group, or as published over all rows of an optimizer step.

    kl: weight of the squared distance of the velocity to the reference's, whose guidance is
    ``ref_guidance``, or a schedule. old_decay_rate: after step n, old = d old + (1 - d) live with d
    = min(old_decay_min + old_decay_rate n, old_decay_max).

    beta: scale of the implicit reward. form: of the loss, mse or bce. advantage_clip: advantages
    are cut off at this size. ref_guidance: guidance scale of the reference. num_noise_draws: times
    of a row. timestep_sampler: draws the times. old_decay_min, old_decay_max: bounds of the decay
    of old weights.
    """

    requires = Requires("gaussian", reads="sample")
    beta: float = 1.0
    form: Literal["mse", "bce"] = "mse"
    temperature: Annotated[float, Ge(0)] | None = None
    centre: Literal["group", "batch"] = "group"
    advantage_clip: Width = 5.0
    kl: Annotated[float, Ge(0)] | KL = 0.1
    ref_guidance: Annotated[float, Ge(0)] = 1.0
    num_noise_draws: Draws = 4
    timestep_sampler: Annotated[TimeSampler, TIMES] = steps
    old_decay_min: Annotated[float, Ge(0)] = 0.25
    old_decay_rate: Annotated[float, Ge(0)] = 0.005
    old_decay_max: Annotated[float, Ge(0)] = 0.999

    def __post_init__(self) -> None:
        self.term = KLTerm.of_velocities(self.kl, "crd")
        positive(
            "objective.crd",
            beta=self.beta,
            advantage_clip=self.advantage_clip,
            temperature=self.temperature or 1,
        )
        self.snapshots = ("old", self.term.name) if self.term.active else ("old",)

    def old_decay(self, step: int) -> float:
        return min(self.old_decay_min + self.old_decay_rate * step, self.old_decay_max)

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        return noised(
            policy, rollout, rng, self.timestep_sampler, self.num_noise_draws, shared=True
        )

    def couples(self, policy: Policy) -> Literal["groups"]:
        return "groups"

    def measure(self, policy: Policy, point: Point) -> Tensor:
        """Return [B, 2]: the model's implicit reward, and q_old, which ``loss`` needs again."""
        old = self._old(policy, point)
        return torch.cat([old - _scaled(velocity(policy.dist(point)), point.target), old], 1)

    def couple(self, point: Point, measured: Tensor) -> Point:
        """For each direction the centred wanted reward and the centre of the model's."""
        measured, old = measured.to(point.advantage.device).split(1, 1)
        optimality = self._optimality(point.advantage)
        group = comparisons(point)
        trained = point.mask.any(1, keepdim=True)  # an idle process's row has no weight

        def total(x: Tensor) -> Tensor:
            """Return [B, 1]: the sum over those that x [B, 1] is compared with."""
            return (
                summed(x, group)[group] if self.centre == "group" else all_sum(x.sum()).expand_as(x)
            )

        targets = []
        centres = []
        for slope in self._slopes():
            weight = (slope * optimality).exp() * trained
            weight = weight / total(weight)
            targets.append(optimality - total(weight * optimality))
            centres.append(total(weight * measured))
        centred = Centred(
            optimality=torch.cat(targets, 1), implicit_mean=torch.cat(centres, 1), old_error=old
        )
        return point.replace(coupling=centred)

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """Compute the loss; before ``couple`` the centre of a is 1/2 and that of r is 0."""
        v = velocity(policy.dist(point))
        centred = (
            point.coupled(Centred)
            if point.coupling is not None
            else Centred(
                optimality=self._optimality(point.advantage) - 0.5,
                implicit_mean=torch.zeros_like(point.advantage),
                old_error=self._old(policy, point),
            )
        )
        implicit = centred.old_error - _scaled(v, point.target)
        columns = zip(centred.optimality.split(1, 1), centred.implicit_mean.split(1, 1))
        each = [self._fit(self.beta * (implicit - mean), target) for target, mean in columns]
        loss = torch.stack(each).mean(0) * self.advantage_clip / self.beta
        if not self.term.in_force():
            return loss
        distance = mean_square(
            v - velocity(frozen(policy, self.term.name, point.replace(guidance=self.ref_guidance)))
        )
        observe("kl", distance, point.mask)
        return loss + self.term.weight() * distance

    def _slopes(self) -> tuple[float, ...]:
        """Return the slopes: weights are softmax(slope a), once for each."""
        if not self.temperature:
            return (0.0,) if self.temperature is None else (1.0, 0.0)
        return 1 / self.temperature, -1 / self.temperature

    def _optimality(self, advantage: Tensor) -> Tensor:
        return 0.5 + advantage.clamp(-self.advantage_clip, self.advantage_clip) / (
            2 * self.advantage_clip
        )

    def _old(self, policy: Policy, point: Point) -> Tensor:
        """Return [B, 1]: q_old."""
        return _scaled(velocity(frozen(policy, "old", point)), point.target)

    def _fit(self, implicit: Tensor, optimality: Tensor) -> Tensor:
        if self.form == "mse":
            return (implicit - optimality) ** 2
        return torch.nn.functional.binary_cross_entropy_with_logits(
            implicit, optimality.sigmoid(), reduction="none"
        )


def _scaled(v: Tensor, target: Tensor) -> Tensor:
    """Return [B, 1]: mean square error over the mean absolute error, which has no gradient."""
    off = v - target
    return mean_square(off) / mean_absolute(off.detach()).clamp_min(1e-5).to(off)
