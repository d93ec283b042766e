"""Terms of answers and pictures that others made: a supervised loss beside the policy's own
(CHORD), and a loss without a clip (LUFFY)."""

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
    """Adds the supervised loss of answers that somebody else wrote: (1 - mu) L_RL + mu L_SFT, each
    a mean over its own decisions (with ``train.loss_agg_mode: token_mean``).

    Zhang et al. 2025, "On-policy RL meets off-policy experts: Harmonizing supervised fine-tuning
    and reinforcement learning via dynamic weighting" (CHORD). mu rises in ``warmup_iterations``
    iterations from 0 to ``peak`` and falls in ``decay_iterations`` on a half cosine to ``valley``;
    a step of the paper is an iteration, one batch of samples, as in the authors' code. phi: every
    token's loss is weighed by p (1 - p), p the policy's own probability of it, without its gradient
    (CHORD-phi, with mu constant: valley as peak).

    Of flow and diffusion models nobody knows the steps to somebody else's picture: their supervised
    loss is that of objective ``sft``, the mean square of the output less its target at fresh noise,
    one even draw of a time a picture.
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
        """Return [B, L]: -log p, or with ``phi`` weighed."""
        if not self.phi:
            return -logp
        p = logp.detach().exp()
        return -p * (1 - p) * logp


@dataclass
class Imitation(Term):
    """sft: the supervised loss of answers that others wrote (CHORD, ``demonstrations``)."""

    sft: Supervision | None = None

    regroups = True
    imitates = True

    def __post_init__(self) -> None:
        self.scales = (1.0, 1.0)  # of own decisions and of pictures of others, in this step
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

    # Of flow and diffusion models: pictures of others, at fresh noise.

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
        """Scale decisions on the path and pictures of others to means over their own numbers, of
        all processes."""
        device = masks[0][0].device if masks else None
        counts = torch.zeros(2, dtype=torch.float64, device=device)
        for mask, renoised in masks:
            counts[int(renoised)] += mask.sum()
        decisions, pictures = all_sum(counts).tolist()
        total = decisions + pictures
        self.scales = (total / max(decisions, 1), total / max(pictures, 1))

    # Of models that write tokens: answers of others, each token's weight that of its own mean.

    def couples(self, policy: Policy) -> Literal["", "rows"]:
        return "" if decisions_of(policy) == "gaussian" else "rows"

    def couple(self, point: Point, measured: Tensor) -> Point:
        """Say how much a decision counts, so that the supervised loss and the other are means over
        their own decisions, those of all processes."""
        expert = written_by_others(point)[:, None]
        counts = torch.stack([(point.mask & ~expert).sum(), (point.mask & expert).sum()])
        counts = all_sum(counts).to(point.recorded)
        scale = counts.sum() / counts.clamp_min(1)
        weight = torch.where(expert, scale[1], scale[0]).expand_as(point.mask)
        return point.replace(coupling=TokenWeights(weight=weight))

    def add(self, loss: Tensor, at: Scored) -> Tensor:
        """Return [B, L]: (1 - mu) of the policy loss, mu of the supervised one on answers of
        others."""
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
    """shaping: of tokens: gamma of -A rho / (rho + gamma), the loss of answers that others wrote
    and of guided ones (the stage ``refinement``), which is not clipped: LUFFY (0.1), RGR-GRPO."""

    shaping: Annotated[float, Gt(0)] | None = None

    of = "tokens"
    instead: ClassVar = {
        "shaping": "the steps that lead to somebody else's picture are not known: leave it out"
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
