"""Differentiable rewards: backpropagate their gradient through the last steps of the sampler."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.distributions import Gaussian, as_gaussian
from mmrl.core.effects import Requires
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.numbers import Count
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import LatentPath, Point, Rollout, Transition, WholePath
from mmrl.objectives.base import Differentiable, frozen
from mmrl.objectives.contracts import FollowsReward
from mmrl.policies.base import Policy
from mmrl.policies.contracts import FollowsProcess
from samplers.noise import Rng

STEPS = "follows the sampler's steps"
# of two Gaussians with one variance, means d standard deviations apart; d2 = d^2 per dimension
DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda d2: d2 / 2,
    "hellinger": lambda d2: -torch.expm1(-d2 / 8),
    "total_variation": lambda d2: torch.erf((d2 + 1e-12).sqrt() / (2 * math.sqrt(2))),
    "chi2": lambda d2: torch.expm1(d2.clamp_max(20)),
}


@OBJECTIVES.register("draft")
@dataclass
class Draft(FollowsReward):
    """Maximise a differentiable reward through the sampler's ``last`` last steps (DRaFT, ROCM).

    Clark et al. 2024, "Directly Fine-Tuning Diffusion Models on Differentiable Rewards" (DRaFT-K;
    null: all steps); Shekhar and Zhang 2025, "ROCM: RLHF on consistency models", which adds ``kl``
    times a divergence to the reference's transitions: kl, hellinger, total_variation or chi2, per
    dimension; with a divergence, on a consistency model, it is ROCM. Stochastic steps reuse the
    noise that was drawn. Every reward with a weight must be differentiable.

    last: sampler steps that are differentiated; null: all. kl: weight of the divergence.
    divergence: kl, hellinger, total_variation or chi2.
    """

    # it redraws the noise of single paths
    requires = Requires("gaussian", single_paths=True, differentiates=True)
    last: Count | None = 1
    kl: Annotated[float, Ge(0)] = 0.0
    divergence: Literal["kl", "hellinger", "total_variation", "chi2"] = "kl"

    def __post_init__(self) -> None:
        self.snapshots = ("ref",) if self.kl else ()
        self.reward: Differentiable | None = None

    def attach(self, reward: Differentiable) -> None:
        """Take the trainer's rewards, with gradient."""
        self.reward = reward

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> list[Point]:
        if rollout.edge_id is not None:
            raise UserError(
                "objective draft follows single paths, whose noise it draws again: leave "
                "out policy option tree"
            )
        return whole_paths(rollout, self.last)

    def loss(self, policy: Policy, point: Point) -> Tensor:
        x = point.state[:, 0]
        far = []
        steps = steps_of(point)
        path = point.whole_path
        for k, step in enumerate(steps, start=path.noise_level.shape[1] - len(steps)):
            dist = as_gaussian(policy.dist(step.replace(state=x)), STEPS)
            if self.kl:
                far.append(self._distance(policy, step.replace(state=x), dist))
            x = dist.mean
            if path.stream is not None:
                x = x + dist.std * FollowsProcess.of(policy).noise(path.stream, point.row_id, k)
        reward = rewarded(self.reward, policy, point, x)
        observe("reward/differentiated", reward, point.mask)
        loss = -reward
        if self.kl:
            distance = sum(far[1:], far[0]) / len(far)
            observe("kl", distance, point.mask)
            loss = loss + self.kl * distance
        return loss

    def _distance(self, policy: Policy, step: Point, dist: Gaussian) -> Tensor:
        """Return [B, 1]: divergence of a transition from the reference's. A step without noise
        counts as if the clean prediction had variance 1/2, as at re-noised states."""
        rows = (-1, *[1] * (dist.std.ndim - 1))
        length = (step.time - step.transition.next_time).view(rows)
        scale = torch.where(dist.std > 0, dist.std, length * math.sqrt(0.5))
        reference = as_gaussian(frozen(policy, "ref", step), STEPS)
        off = (dist.mean - reference.mean) / scale
        return DIVERGENCES[self.divergence](off.square().flatten(1).mean(1, keepdim=True))


@OBJECTIVES.register("adjoint_matching")
@dataclass
class AdjointMatching(FollowsReward):
    """Regress each step's change on the reward's gradient, carried back by the base (Adjoint
    Matching).

    Domingo-Enrich et al. 2025, "Adjoint Matching: Fine-tuning Flow and Diffusion Generative Models
    with Memoryless Stochastic Optimal Control", eq. 37 to 39, for the sampler's own steps: with
    base means F_k and standard deviations s_k, a_K = -strength grad r(x_K), a_k = (dF_k / dx)^T
    a_(k+1), and the loss of step k is
    |(mean_k - F_k(x_k)) / s_k + s_k a_(k+1)|^2 / 2.

    Use ``sde_type: memoryless, noise_level: 1``, which makes the optimum the base's distribution
    tilted by exp(strength reward), and ``noise_window: all_but_last``, so that the reward's
    gradient is taken at a sample without fresh noise. strength: of the reward against the base.
    """

    requires = Requires("gaussian", visits=True, differentiates=True)
    strength: Annotated[float, Ge(0)] = 1.0

    def __post_init__(self) -> None:
        self.snapshots = ("ref",)
        self.reward: Differentiable | None = None

    def attach(self, reward: Differentiable) -> None:
        """Take the trainer's rewards, with gradient."""
        self.reward = reward

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> list[Point]:
        return whole_paths(rollout, None)

    def loss(self, policy: Policy, point: Point) -> Tensor:
        steps = list(steps_of(point))
        adjoints = self._adjoints(policy, point, steps)  # K times [B, *], a_(k + 1)
        total = point.advantage.new_zeros(())
        for step, adjoint in zip(steps, adjoints):
            dist = as_gaussian(policy.dist(step), STEPS)
            base = as_gaussian(frozen(policy, "ref", step), STEPS)
            if not (dist.std > 0).all():
                continue  # a step without noise has no control
            off = (dist.mean - base.mean) / dist.std + dist.std * adjoint
            total = total + 0.5 * off.square().flatten(1).mean(1, keepdim=True)
        return total

    def _adjoints(self, policy: Policy, point: Point, steps: list[Point]) -> list[Tensor]:
        with torch.enable_grad():
            end = point.state[:, -1].detach().requires_grad_()
            reward = rewarded(self.reward, policy, point, end)
            (adjoint,) = torch.autograd.grad(-self.strength * reward.sum(), end)
        observe("reward/differentiated", reward.detach(), point.mask)
        adjoints = [adjoint]
        for step in reversed(steps[1:]):
            with policy.weights.using("ref"), torch.enable_grad():
                x = step.state.detach().requires_grad_()
                mean = as_gaussian(policy.dist(step.replace(state=x)), STEPS).mean
                (adjoint,) = torch.autograd.grad((mean * adjoint).sum(), x)
            adjoints.append(adjoint)
        return adjoints[::-1]


def whole_paths(rollout: Rollout, last: int | None) -> list[Point]:
    """Make one point a row of the ``last`` n steps of its path (None: of all), which has the times
    and noise levels of all K steps; its state is [B, n + 1, *].
    """
    path = rollout.trajectory
    if not isinstance(path, LatentPath):
        raise UserError(
            "this objective follows the sampler's steps: it is for flow and diffusion "
            "models, not for tokens"
        )
    first = 0 if last is None else max(0, path.noise_level.shape[1] - last)
    alive = rollout.alive()
    return [
        Point(
            group=rollout.group,
            cond=rollout.cond,
            row_id=rollout.row_id,
            mask=alive[:, None],
            num_decisions=alive.long(),
            state=path.states[:, first:].to(rollout.sample.dtype),
            target=rollout.sample,
            step=WholePath(time=path.time, noise_level=path.noise_level, stream=path.stream),
            advantage=rollout.advantages()[:, -1:],
            prompts=rollout.prompts,
        )
    ]


def steps_of(point: Point) -> list[Point]:
    """Return the last n steps of a point made by ``whole_paths``."""
    count = point.state.shape[1] - 1
    path = point.whole_path
    first = path.noise_level.shape[1] - count
    return [
        point.replace(
            state=point.state[:, k],
            target=point.state[:, k + 1],
            step=Transition(
                time=path.time[:, first + k],
                next_time=path.time[:, first + k + 1],
                noise_level=path.noise_level[:, first + k],
            ),
        )
        for k in range(count)
    ]


def rewarded(reward: Differentiable | None, policy: Policy, point: Point, sample: Tensor) -> Tensor:
    """Return [B, 1]: the rewards of finished samples, with gradient to them. UserError if a reward
    has none."""
    if reward is None:
        raise UserError("this objective needs a differentiable reward; it gets it from the trainer")
    rollout = Rollout(
        group=point.group,
        cond=point.cond,
        row_id=point.row_id,
        sample=sample,
        prompts=point.prompts,
        logprob=point.mask.to(sample),
        mask=point.mask,
    )
    earned = reward(policy.decode(rollout), rollout.prompt_per_row())
    if not earned.requires_grad and torch.is_grad_enabled():
        raise UserError(
            "the reward gives no gradient: this objective needs differentiable rewards "
            "(docs/rewards.md says which are)"
        )
    return earned[:, None].to(sample)
