"""Preferences between the best and the worst sample of a group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.core.distributions import as_gaussian
from mmrl.core.effects import Requires
from mmrl.core.host import sent
from mmrl.core.metrics import observe
from mmrl.core.numbers import Draws
from mmrl.core.registry import OBJECTIVES, TIMES
from mmrl.core.types import Point, Rollout
from mmrl.core.weights import Weights
from mmrl.objectives.base import Linearised, frozen, slope_of
from mmrl.objectives.contracts import Couples, MovesSnapshots
from mmrl.objectives.forward_process import comparisons, error, noised, positive, summed
from mmrl.objectives.kl import Reference, Refresh
from mmrl.objectives.timestep_samplers import TimeSampler, logit_normal
from mmrl.policies.base import Policy
from mmrl.zoo.objectives.following import Following
from samplers.noise import Rng


class _Following(Following, Couples):
    """Holds the reference that pairs are relative to, which may follow the policy."""

    refresh: Refresh | None

    def anchor(self) -> None:
        """Choose the snapshot."""
        self.reference = Reference(self.refresh)
        self.snapshots = (self.reference.name,)


@OBJECTIVES.register("diffusion_dpo")
@dataclass
class DiffusionDPO(_Following):
    """Prefer the best of a group to the worst, by denoising errors at shared noise (Diffusion-DPO).

    Wallace et al. 2024, "Diffusion Model Alignment Using Direct Preference Optimization", eq. 14,
    on fresh pairs: with e the denoising error and D = e - e_ref, minimises -log sigmoid(-(beta / 2)
    (D_best - D_worst)). Groups of equal advantages make no pair. num_noise_draws, timestep_sampler:
    number and distribution of a pair's times of the forward process. refresh: the reference follows
    the policy (TR-DPO, Gorbatovski et al. 2024); null: it stays the base.

    beta: weight of the reference.
    """

    requires = Requires("gaussian", reads="sample", offline=True)
    beta: float = 100.0
    num_noise_draws: Draws = 1
    timestep_sampler: Annotated[TimeSampler, TIMES] = logit_normal
    refresh: Refresh | None = None

    def __post_init__(self) -> None:
        positive("objective.diffusion_dpo", beta=self.beta)
        self.anchor()

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        paired = rollout.replace(trainable=pairs(rollout))
        return noised(policy, paired, rng, self.timestep_sampler, self.num_noise_draws, shared=True)

    def couples(self, policy: Policy) -> Literal["groups"]:
        return "groups"

    def measure(self, policy: Policy, point: Point) -> Tensor:
        return error(policy.dist(point), point) - error(
            frozen(policy, self.reference.name, point), point
        )

    def couple(self, point: Point, measured: Tensor) -> Point:
        """Compute each row's derivative of the loss by its error."""
        pair = comparisons(point)
        mean = summed(point.advantage, pair) / 2
        side = (point.advantage - mean[pair]).sign()  # [B, 1] 1 for the best, -1 for the worst
        score = (summed(side * measured, pair) * self.beta / 2)[pair]
        observe("dpo/loss", softplus(score), point.mask)
        observe("dpo/right", (score < 0).double(), point.mask)
        # times 2: a pair is two rows of the mean
        return point.replace(coupling=Linearised(slope=self.beta * score.sigmoid() * side))

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """Compute a loss that is linear in the error, with the gradient of the loss above."""
        return slope_of(point) * error(policy.dist(point), point)


def pairs(rollout: Rollout, rng: Rng | None = None) -> Tensor:
    """Return [B] bool: the rows of highest and of lowest advantage of each group, the first ones
    where several are equal.

    With ``rng`` the best is paired not with the worst but with a random one of lower advantage.
    """
    alive = rollout.alive().long()
    # every transfer waits for the device: one for all whole numbers
    groups, names, alive = torch.stack([rollout.group, rollout.row_id, alive]).cpu()
    every = rollout.advantages()[:, -1].cpu()
    trainable = alive.bool()
    chosen = torch.zeros_like(trainable)
    for group in groups[trainable].unique():
        rows = ((groups == group) & trainable).nonzero()[:, 0]
        advantage = every[rows]
        if advantage.max() > advantage.min():
            lower = rows[advantage < advantage.max()]
            rival = (
                rows[advantage.argmin()]
                if rng is None
                else lower[rng.uniform(names[lower]).argmax()]
            )
            chosen[rows[advantage.argmax()]] = chosen[rival] = True
    return sent(chosen, rollout.group.device)


@OBJECTIVES.register("d3po")
@dataclass
class D3PO(_Following):
    """Prefer the best of a group to the worst at every step of their paths (D3PO).

    Yang et al. 2024, "Using Human Feedback to Fine-tune Diffusion Models without Any Reward Model",
    eq. 13: with m the log-ratio of a step to the reference, minimises -log sigmoid(beta (m_best -
    m_worst)), each at its own state. refresh: the reference follows the policy (TR-DPO); null: it
    stays the base.

    beta: weight of the reference.
    """

    requires = Requires("gaussian", reads="decisions", visits=True)
    beta: float = 0.1
    refresh: Refresh | None = None

    def __post_init__(self) -> None:
        positive("objective.d3po", beta=self.beta)
        self.anchor()

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> list[Point]:
        chosen = rollout.row_id[pairs(rollout)]
        each = policy.path(rollout)
        return [
            point.replace(mask=point.mask & torch.isin(point.row_id, chosen)[:, None])
            for point in each
        ]

    def couples(self, policy: Policy) -> Literal["groups"]:
        return "groups"

    def measure(self, policy: Policy, point: Point) -> Tensor:
        return policy.dist(point).log_prob(point.target) - frozen(
            policy, self.reference.name, point
        ).log_prob(point.target)

    def couple(self, point: Point, measured: Tensor) -> Point:
        pair = comparisons(point)
        side = (point.advantage - summed(point.advantage, pair)[pair] / 2).sign()
        score = (summed(side * measured, pair) * self.beta)[pair]
        observe("dpo/loss", softplus(-score), point.mask)
        observe("dpo/right", (score > 0).double(), point.mask)
        # a pair is two rows of the mean
        slope = 2 * self.beta * (-score).sigmoid() * side
        return point.replace(coupling=Linearised(slope=slope))

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """Compute a loss that is linear in the log-prob, with the gradient of the loss above."""
        dist = as_gaussian(policy.dist(point), "compares the steps of two samplers")
        logp = dist.log_prob(point.target)
        if point.logprob is not None:
            observe("log_ratio", logp - point.logprob, point.mask)
        return -slope_of(point) * logp


@OBJECTIVES.register("seppo")
@dataclass
class SePPO(MovesSnapshots, Couples):
    """Compare the best sample with another, which may count as good, of an earlier checkpoint
    (SePPO).

    Zhang et al. 2024, "SePPO: Semi-Policy Preference Optimization for Diffusion Alignment". In
    every iteration a checkpoint drawn at random from all earlier ones samples and is the reference;
    the winner's rival is any other of its samples. Where the reference fits the winner better than
    the current model does, its samples count as good and the rival is followed, otherwise it is
    avoided: minimises -log sigmoid(-(beta / 2) (D_w + flip D_r)) with D = e - e_ref the excess
    denoising error and flip the sign of D_w.

    pool: how many checkpoints are kept, each as large as the trained weights. They are a uniform
    sample of all iterations so far, the base model included (reservoir sampling, Vitter 1985).

    beta: weight of the reference. num_noise_draws: times of a row. timestep_sampler: draws the
    times.
    """

    requires = Requires("gaussian", reads="sample")
    beta: float = 100.0
    num_noise_draws: Draws = 1
    timestep_sampler: Annotated[TimeSampler, TIMES] = logit_normal
    pool: Annotated[int, Ge(1), Le(1000)] = 4

    def __post_init__(self) -> None:
        positive("objective.seppo", beta=self.beta)
        self.snapshots = tuple(f"earlier-{slot}" for slot in range(self.pool))
        self.behavior_policy = self.snapshots[0]

    def begin_iteration(self, weights: Weights, iteration: int, rng: Rng) -> None:
        """Possibly store the live weights; then draw the checkpoint that samples and is the
        reference."""
        slot = iteration if iteration < self.pool else _below(rng.fold("slot"), iteration + 1)
        if slot < self.pool:
            weights.track(self.snapshots[slot], 0.0)
        self.behavior_policy = self.snapshots[
            _below(rng.fold("reference"), min(iteration + 1, self.pool))
        ]

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        paired = rollout.replace(trainable=pairs(rollout, rng.fold("rival")))
        return noised(policy, paired, rng, self.timestep_sampler, self.num_noise_draws, shared=True)

    def couples(self, policy: Policy) -> Literal["groups"]:
        return "groups"

    def measure(self, policy: Policy, point: Point) -> Tensor:
        """Return [B, 1]: the error beyond the reference's."""
        return error(policy.dist(point), point) - error(
            frozen(policy, self.behavior_policy, point), point
        )

    def couple(self, point: Point, measured: Tensor) -> Point:
        pair = comparisons(point)
        wins = point.advantage > summed(point.advantage, pair)[pair] / 2
        flip = summed(torch.where(wins, measured, 0.0), pair)[pair].sign()
        # a reference only as good as the model: its sample does not count as good
        flip = torch.where(flip == 0, -1.0, flip)
        side = torch.where(wins, torch.ones_like(flip), flip)
        score = (summed(side * measured, pair) * self.beta / 2)[pair]
        observe("seppo/followed", (flip > 0).double(), point.mask)
        observe("dpo/loss", softplus(score), point.mask)
        return point.replace(coupling=Linearised(slope=self.beta * score.sigmoid() * side))

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """Compute a loss that is linear in the error, with the gradient of the loss above."""
        return slope_of(point) * error(policy.dist(point), point)


def _below(rng: Rng, bound: int) -> int:
    """Return a random number of 0 to ``bound`` - 1."""
    return int(rng.uniform(torch.zeros(1)) * bound)
