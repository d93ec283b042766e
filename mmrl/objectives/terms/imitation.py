"""Terms for demonstrations: a supervised loss added to the policy loss (CHORD), and a loss without
a clip (LUFFY)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.core.distributed import all_sum
from mmrl.core.metrics import observe
from mmrl.core.types import Point, Renoised, Rollout, Transition
from mmrl.objectives.decisions import TokenWeights, written_by_others
from mmrl.objectives.forward_process import mean_square, noised, velocity
from mmrl.objectives.policy_loss import PolicyLoss
from mmrl.objectives.terms.base import Scored, Term, decisions_of
from mmrl.objectives.timestep_samplers import uniform
from mmrl.policies.base import Policy
from samplers.noise import Rng


@dataclass(frozen=True)
class Supervision:
    """Adds the supervised loss of demonstrations: (1 - mu) L_RL + mu L_SFT, each a mean over its
    own decisions (with ``train.loss_agg_mode: token_mean``).

    Zhang et al. 2025, "On-policy RL meets off-policy experts: Harmonizing supervised fine-tuning
    and reinforcement learning via dynamic weighting" (CHORD). mu rises in ``warmup_iterations``
    iterations from 0 to ``peak`` and falls in ``decay_iterations`` on a half cosine to ``valley``;
    a step of the paper is an iteration, one batch of samples, as in the authors' code. phi: every
    token's loss is weighted by p (1 - p), p the policy's probability of it, without gradient
    (CHORD-phi, with mu constant: valley as peak).

    For flow and diffusion models the denoising path of an external image is unknown: the supervised
    loss is that of objective ``sft``, the mean squared error of the output at fresh noise, at one
    uniformly drawn time per image.

    peak: the largest mu. valley: mu at the end. warmup_iterations: in which mu rises from 0.
    decay_iterations: in which it falls on half a cosine.
    """

    peak: Annotated[float, Ge(0), Le(1)] = 0.9
    valley: Annotated[float, Ge(0), Le(1)] = 0.05
    warmup_iterations: Annotated[int, Ge(0)] = 0
    decay_iterations: Annotated[int, Ge(0)] = 200
    phi: bool = False

    def mu(self, iteration: int) -> float:
        """Return the weight of the supervised loss in an iteration, counted from 0."""
        if iteration < self.warmup_iterations:
            return self.peak * iteration / self.warmup_iterations
        if iteration >= self.warmup_iterations + self.decay_iterations:
            return self.valley
        share = (iteration - self.warmup_iterations) / self.decay_iterations
        return self.valley + (self.peak - self.valley) * (1 + math.cos(math.pi * share)) / 2

    def loss(self, logp: Tensor) -> Tensor:
        """Return [B, L]: -log p, weighted with ``phi``."""
        if not self.phi:
            return -logp
        p = logp.detach().exp()
        return -p * (1 - p) * logp


@dataclass
class Imitation(Term):
    """sft: the supervised loss of demonstrations (CHORD, stage ``demonstrations``)."""

    sft: Supervision | None = None

    regroups = True
    imitates = True

    def __post_init__(self) -> None:
        self.scales = (1.0, 1.0)  # of own decisions and of external images, in this step
        self.iteration = 0

    def moves_all(self) -> bool:
        return self.active()

    def unfit(self, policy: Any, loss: PolicyLoss, coupled: bool) -> Iterator[tuple[str, str]]:
        if self.sft is None:
            return
        if self.sft.phi and decisions_of(policy) == "gaussian":
            yield "sft", "phi weighs tokens by their probability: leave phi out"
        if coupled:
            yield "sft", "it needs a loss of single decisions: choose ppo without top_entropy"

    # Flow and diffusion models: external images, at fresh noise.

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterator[Point]:
        expert = rollout.provenance.is_ground_truth
        if decisions_of(policy) != "gaussian" or expert is None:
            return
        rows = rollout[expert & rollout.alive()]
        if len(rows):
            yield from noised(policy, rows, rng.fold("imitation"), uniform, 1)

    def loss(self, policy: Policy, point: Point) -> Tensor | None:
        if self.sft is None or not isinstance(point.step, Renoised):
            return None
        error = mean_square(velocity(policy.dist(point)) - point.target)
        observe("sft/loss", error, point.mask)
        return self.scales[1] * self.sft.mu(self.iteration) * error

    def before_step(self, masks: Sequence[tuple[Tensor, bool]]) -> None:
        """Scale decisions on the path and external images to means over their own counts, over all
        processes."""
        device = masks[0][0].device if masks else None
        counts = torch.zeros(2, dtype=torch.float64, device=device)
        for mask, renoised in masks:
            counts[int(renoised)] += mask.sum()
        decisions, pictures = all_sum(counts).tolist()
        total = decisions + pictures
        self.scales = (total / max(decisions, 1), total / max(pictures, 1))

    # Models that write tokens: demonstrations, averaged over their own tokens.

    def couples(self, policy: Policy) -> Literal["", "rows"]:
        return "" if decisions_of(policy) == "gaussian" else "rows"

    def couple(self, point: Point, measured: Tensor) -> Point:
        """Weight every decision so that the supervised and the policy loss are each a mean over
        their own decisions on all processes."""
        expert = written_by_others(point)[:, None]
        counts = torch.stack([(point.mask & ~expert).sum(), (point.mask & expert).sum()])
        counts = all_sum(counts).to(point.recorded)
        scale = counts.sum() / counts.clamp_min(1)
        weight = torch.where(expert, scale[1], scale[0]).expand_as(point.mask)
        return point.replace(coupling=TokenWeights(weight=weight))

    def add(self, loss: Tensor, at: Scored) -> Tensor:
        """Return [B, L]: (1 - mu) of the policy loss, mu of the supervised loss on
        demonstrations."""
        if self.sft is None:
            return loss
        point = at.point
        mu = self.sft.mu(self.iteration)
        if isinstance(point.step, Transition):
            return self.scales[0] * (1 - mu) * loss
        expert = written_by_others(point)[:, None]
        imitation = self.sft.loss(at.logp)
        observe("sft/loss", imitation, point.mask & expert)
        if isinstance(point.coupling, TokenWeights):
            imitation = imitation * point.coupling.weight
        return torch.where(expert, mu * imitation, (1 - mu) * loss)

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        self.iteration = iteration + 1

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state.get("iteration", 0))


@dataclass
class Shaping(Term):
    """shaping: of tokens: gamma of -A rho / (rho + gamma), the unclipped loss of demonstrations and
    of guided answers (stage ``refinement``): LUFFY (0.1), RGR-GRPO."""

    shaping: Annotated[float, Gt(0)] | None = None

    of = "tokens"
    instead: ClassVar = {
        "shaping": "the steps that lead to an external picture are not known: leave it out"
    }

    def unfit(self, policy: Any, loss: PolicyLoss, coupled: bool) -> Iterator[tuple[str, str]]:
        yield from super().unfit(policy, loss, coupled)
        if self.shaping is not None and loss.of_rows:
            yield "shaping", "it is of single decisions: choose ppo or another that is"

    def substitute(self, loss: Tensor, at: Scored) -> Tensor:
        if self.shaping is None:
            return loss
        # rho / (rho + gamma)
        share = torch.sigmoid(at.logp - at.old - math.log(self.shaping))
        return torch.where(written_by_others(at.point)[:, None], -at.advantage * share, loss)
