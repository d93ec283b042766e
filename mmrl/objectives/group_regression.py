"""Losses that see a whole group at once: how the answers' log-ratios differ should be how their
rewards differ.

Each is one line, the loss of a group's scores. Before a step ``couple`` finds its value and its
slope in every score, over all answers of the step, so that micro-batches change nothing; the loss
of a row is then linear in its own score. ``train.loss_agg_mode`` must be row or every_row for the
loss as it is written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import Point, Rollout
from mmrl.objectives.base import Objective, Tangent
from mmrl.objectives.surrogates import row_mean, row_sum
from mmrl.policies.base import Policy
from samplers.noise import Rng

Positive = Annotated[float, Gt(0)]


class _Groups:
    """Sums over the groups of a step. ``index`` [B] long."""

    def __init__(self, group: Tensor):
        _, self.index = group.unique(return_inverse=True)
        self.count = int(self.index.max()) + 1

    def sum(self, x: Tensor) -> Tensor:
        """[B] the sum over a row's group of x [B]."""
        return x.new_zeros(self.count).index_add(0, self.index, x)[self.index]

    def size(self, x: Tensor) -> Tensor:
        return self.sum(torch.ones_like(x))

    def centred(self, x: Tensor) -> Tensor:
        return x - self.sum(x) / self.size(x)


class _Regression(Objective):
    """``score``: one number an answer. ``of_group``: [B] whose mean over the rows is the loss."""

    needs = "one pass"

    @abstractmethod
    def score(self, logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        """[B, 1] from log-probs [B, L]."""

    @abstractmethod
    def of_group(self, score: Tensor, advantage: Tensor, groups: _Groups) -> Tensor:
        """[B] from scores and advantages [B]."""

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        if policy.capabilities.decisions != "categorical":
            raise UserError(
                f"{type(self).__name__} is an objective of text: "
                f"{type(policy).__name__} writes none"
            )
        for point in policy.path(rollout):
            if (point.mask.sum(1) != point.num_decisions).any():
                raise UserError(
                    "this objective compares whole answers: it is for models that "
                    "score them in one pass"
                )
            yield point

    def couples(self, policy: Policy) -> Literal["groups"]:
        return "groups"

    def measure(self, policy: Policy, point: Point) -> Tensor:
        return self._scored(policy, point)[0]

    def couple(self, point: Point, measured: Tensor) -> Point:
        """The value of every row's loss, and its slope in the row's score."""
        if not point.mask.any():
            return point
        advantage = row_mean(point.advantage.expand_as(point.mask), point.mask)[:, 0].to(measured)
        with torch.enable_grad():
            score = measured[:, 0].detach().requires_grad_()
            value = self.of_group(score, advantage, _Groups(point.group))
            (slope,) = torch.autograd.grad(value.sum(), score)
        tangent = Tangent(value=value.detach()[:, None], slope=slope[:, None])
        return point.replace(coupling=tangent)

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """Before ``couple`` it is minus the advantage times the score."""
        score, log_ratio = self._scored(policy, point)
        observe("log_ratio", log_ratio, point.current())
        observe("score", score.expand_as(log_ratio), point.mask)
        if point.coupling is None:
            return -point.advantage * score.expand_as(log_ratio)
        tangent = point.coupled(Tangent)
        return (tangent.value + tangent.slope * (score - score.detach())).expand_as(log_ratio)

    def _scored(self, policy: Policy, point: Point) -> tuple[Tensor, Tensor]:
        """[B, 1] score and [B, L] log-ratio to the recorded."""
        logp = torch.where(point.mask, policy.dist(point).log_prob(point.target), 0.0)
        recorded = torch.where(point.mask, point.recorded, 0.0)
        old = point.old(logp, recorded)
        return self.score(logp, old, point.mask), logp - recorded


@OBJECTIVES.register("gvpo")
class GVPO(_Regression):
    """Minimise 1/2 sum_i ((R_i - mean R) - (r_i - mean r))^2 / (n - 1), R = beta log(p / p_old)
    (GVPO).

    Zhang et al. 2025, "GVPO: Group variance policy optimization". Take ``advantage: dr_grpo``,
    which is r - mean r.
    """

    def __init__(self, beta: Positive = 0.1):
        self.beta = beta

    def score(self, logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        return self.beta * row_sum(logp - old, mask)

    def of_group(self, score: Tensor, advantage: Tensor, groups: _Groups) -> Tensor:
        size = groups.size(score)
        error = groups.centred(score) - groups.centred(advantage)
        return error.square() / 2 * size / (size - 1).clamp_min(1)


@OBJECTIVES.register("reg_grpo")
class RegGRPO(_Regression):
    """Predict the advantage by the answer's log-ratio R: (A_i - beta (R_i - mean R))^2 (Reg-GRPO).

    Park et al. 2025, DeepVideo-R1. No clip, no minimum. ``beta`` stands where the log-ratios' own
    std could: that is 0 on the first step.
    """

    def __init__(self, beta: Positive = 1.0):
        self.beta = beta

    def score(self, logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        return row_sum(logp - old, mask)

    def of_group(self, score: Tensor, advantage: Tensor, groups: _Groups) -> Tensor:
        return (advantage - self.beta * groups.centred(score)).square()


@OBJECTIVES.register("real")
class REAL(_Regression):
    """Classify answers: log(1 + sum_neg e^s) + log(1 + sum_pos e^-s), s = mean log-ratio / tau
    (REAL).

    As in ms-swift. Positive answers are those with A > 0, negative ones those with A < 0; a group
    without both counts as 0 (with ``flat: drop`` in the advantage not at all).
    """

    def __init__(self, tau: Positive = 0.1):
        self.tau = tau

    def score(self, logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        return row_mean(logp - old, mask) / self.tau

    def of_group(self, score: Tensor, advantage: Tensor, groups: _Groups) -> Tensor:
        good = (advantage > 0).to(score)
        bad = (advantage < 0).to(score)
        loss = torch.log1p(groups.sum(bad * score.exp())) + torch.log1p(
            groups.sum(good * (-score).exp())
        )
        return loss * ((groups.sum(good) > 0) & (groups.sum(bad) > 0))
