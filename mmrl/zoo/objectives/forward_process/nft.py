"""Negative-aware fine-tuning of diffusion models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from torch import Tensor

from mmrl.core.effects import Requires
from mmrl.core.metrics import observe
from mmrl.core.numbers import Draws
from mmrl.core.registry import OBJECTIVES, TIMES
from mmrl.core.types import Point, Rollout
from mmrl.objectives.base import frozen
from mmrl.objectives.contracts import TracksOld
from mmrl.objectives.forward_process import mean_absolute, mean_square, noised, positive, velocity
from mmrl.objectives.kl import KL, KLTerm, Regularised
from mmrl.objectives.surrogates import Width
from mmrl.objectives.timestep_samplers import TimeSampler, steps
from mmrl.policies.base import Policy
from samplers.noise import Rng


@OBJECTIVES.register("nft")
@dataclass
class NFT(Regularised, TracksOld):
    """Fit good samples with the velocity, bad ones with its reflection at the old one
    (DiffusionNFT).

    Zheng et al. 2025, "DiffusionNFT: Online Diffusion Reinforcement with Forward Process", eq. 5.
    The optimality r = 1/2 + A / (2 advantage_clip) weighs two denoising errors of the clean sample,
    of v+ = beta v + (1 - beta) v_old and of v- = (1 + beta) v_old - beta v, each divided by its own
    mean absolute value.

    kl: weight of the squared distance of the velocity to the reference's, or a schedule.
    num_noise_draws, timestep_sampler: number and distribution of a sample's times of the forward
    process. decay: how the old weights, which also sample, follow the live ones: 0 at once, 1 with
    decay min(0.001 step, 0.5), 2 with decay min(0.0075 (step - 75), 0.999).

    beta: distance of v+ and v- from the old velocity. advantage_clip: advantages are cut off at
    this size.
    """

    requires = Requires("gaussian", reads="sample")
    beta: float = 1.0
    advantage_clip: Width = 5.0
    kl: Annotated[float, Ge(0)] | KL = 1e-4
    num_noise_draws: Draws = 9
    timestep_sampler: Annotated[TimeSampler, TIMES] = steps
    decay: Literal[0, 1, 2] = 1

    def __post_init__(self) -> None:
        self.term = KLTerm.of_velocities(self.kl, "nft")
        positive("objective.nft", beta=self.beta, advantage_clip=self.advantage_clip)
        self.behavior_policy = "old"
        self.snapshots = (self.term.name,) if self.term.active else ()

    def old_decay(self, step: int) -> float:
        flat, slope, most = ((0, 0.0, 0.0), (0, 0.001, 0.5), (75, 0.0075, 0.999))[self.decay]
        return min(max(0, step - flat) * slope, most)

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        return noised(policy, rollout, rng, self.timestep_sampler, self.num_noise_draws)

    def loss(self, policy: Policy, point: Point) -> Tensor:
        v = velocity(policy.dist(point))
        old = velocity(frozen(policy, "old", point))
        good = self.beta * v + (1 - self.beta) * old
        bad = (1 + self.beta) * old - self.beta * v
        optimality = (0.5 + point.advantage / (2 * self.advantage_clip)).clamp(0, 1)
        fit = optimality * _error(point, good) + (1 - optimality) * _error(point, bad)
        observe("nft/moved", mean_square(v - old), point.mask)
        loss = self.advantage_clip * fit / self.beta
        if not self.term.in_force():
            return loss
        distance = mean_square(v - velocity(self.term.reference_at(policy, point)))
        observe("kl", distance, point.mask)
        return loss + self.term.weight() * distance


def _error(point: Point, v: Tensor) -> Tensor:
    """Return [B, 1]: mean square error of the predicted clean sample over its mean absolute error,
    which has no gradient."""
    off = point.renoised.x0_per_output.view(-1, *[1] * (v.ndim - 1)) * (v - point.target)
    return mean_square(off) / mean_absolute(off.detach()).clamp_min(1e-5).to(off)
