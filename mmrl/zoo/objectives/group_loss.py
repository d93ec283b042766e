"""The base of losses that compare the samples of a group by their log-ratios, one number each.

A paper's loss is one line in those numbers (``of_group``). A sample's log-ratio R = log p - log
p_anchor is a sum over its decisions, in however many passes they are scored: tokens, tokens that
masked diffusion reveals, Gaussian steps. Before an optimizer step every pass is measured without
gradient, and ``couple`` finds the loss and its slope in every R; the loss of a decision is then
linear in its log-prob, so that micro-batches change nothing. ``train.loss_agg_mode`` must be
seq_mean_token_mean or seq_mean_token_mean_all for the loss as it is written. A policy that weighs
its decisions in the loss weighs them in R.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from mmrl.core.distributions import Dist
from mmrl.core.effects import Requires
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.numbers import Draws
from mmrl.core.registry import TIMES
from mmrl.core.types import Point, Rollout
from mmrl.objectives.base import Tangent, frozen
from mmrl.objectives.contracts import Couples
from mmrl.objectives.forward_process import error, noised
from mmrl.objectives.kl import Reference, Refresh
from mmrl.objectives.surrogates import row_sum
from mmrl.objectives.timestep_samplers import TimeSampler, logit_normal
from mmrl.policies.base import Policy
from mmrl.policies.capabilities import capabilities_of
from mmrl.zoo.objectives.following import Following
from samplers.noise import Rng

AnchorName = Literal["old", "ref"]
SHARED = (
    "this objective compares whole samples by their log-ratios, and those of a tree share steps: "
    "leave out the policy's option tree (branch_at), or choose policy_gradient"
)


class Groups:
    """Sums over the groups of a step, broadcast to the rows. ``index`` [R] long."""

    def __init__(self, group: Tensor):
        names, self.index = group.unique(return_inverse=True)
        self.count = len(names)

    def per_group(self, x: Tensor) -> Tensor:
        """Return [G]: sums of x [R]."""
        return x.new_zeros(self.count).index_add(0, self.index, x)

    def sum(self, x: Tensor) -> Tensor:
        """Return [R]: the sum over a row's group of x [R]."""
        return self.per_group(x)[self.index]

    def size(self, x: Tensor) -> Tensor:
        return self.sum(torch.ones_like(x))

    def centred(self, x: Tensor) -> Tensor:
        return x - self.sum(x) / self.size(x)

    def extreme(self, x: Tensor, how: Literal["amax", "amin"]) -> Tensor:
        """Return [G]: the largest or the smallest x [R] of every group."""
        start = x.new_full((self.count,), -torch.inf if how == "amax" else torch.inf)
        return start.scatter_reduce(0, self.index, x, how)

    def log_sum_exp(self, x: Tensor, members: Tensor) -> Tensor:
        """Return [R]: the logsumexp of x over the ``members`` [R] bool of a row's group; -inf for a
        group without any."""
        top = self.extreme(x.detach().masked_fill(~members, -torch.inf), "amax")[self.index]
        top = top.masked_fill(top.isinf(), 0.0)
        total = self.sum(torch.where(members, (x - top).exp(), 0.0))
        # filled before the logarithm, whose gradient at 0 is infinite
        empty = total == 0
        return (total.masked_fill(empty, 1.0).log() + top).masked_fill(empty, -torch.inf)


@dataclass(frozen=True)
class Samples:
    """Holds the rows of a step that are compared, one number each, [R], in the order of their
    names."""

    ratio: Tensor  # log p / p_anchor over its decisions
    logp: Tensor  # log p over its decisions; the gradient is that of ``ratio``
    advantage: Tensor
    length: Tensor  # decisions
    groups: Groups


class GroupLoss(Following, Couples):
    """``of_group``: [R] whose mean over the rows is the loss."""

    # paths of a deterministic sampler have no log-ratios
    requires = Requires(reads="decisions", visits=True, single_paths=True, offline=True)

    def __init__(
        self,
        anchor: AnchorName | Refresh = "old",
        average: bool = False,
        num_noise_draws: Draws | None = None,
        timestep_sampler: Annotated[TimeSampler, TIMES] = logit_normal,
    ):
        """Take the options of every loss of this kind. anchor: the weights that R is relative to:
        old, the sampling weights; ref, the base; or a reference that follows the policy. average: R
        is a mean over the decisions instead of a sum. num_noise_draws, timestep_sampler: for flow
        and diffusion models, R is minus the excess denoising error of the finished sample, a mean
        over this many times of the forward process with noise shared by the group; then any solver
        may sample. null: R is that of the path."""
        self.anchor = anchor
        self.average = average or num_noise_draws is not None
        self.num_noise_draws = num_noise_draws
        self.timestep_sampler = timestep_sampler
        self.requires = replace(self.requires, visits=num_noise_draws is None)
        self.reference = Reference(anchor if isinstance(anchor, Refresh) else None)
        self.anchored = "old" if anchor == "old" else self.reference.name
        remembered = anchor == "old" and num_noise_draws is None  # by the rollout itself
        self.snapshots = () if remembered else (self.anchored,)

    @abstractmethod
    def of_group(self, samples: Samples) -> Tensor:
        """Return [R]: the loss of the group that a row is in, or its share of it."""

    def unfit(self, policy: Any) -> Iterator[tuple[str, str]]:
        can = capabilities_of(policy)
        if self.num_noise_draws and can is not None and can.decisions != "gaussian":
            yield (
                "num_noise_draws",
                "denoising errors are of flow and diffusion models: leave it out",
            )

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        if rollout.edge_id is not None:
            raise UserError(SHARED)
        if self.num_noise_draws is None:
            return policy.path(rollout)
        return noised(
            policy, rollout, rng, self.timestep_sampler, self.num_noise_draws, shared=True
        )

    def couples(self, policy: Policy) -> Literal["groups"]:
        return "groups"

    def measure(self, policy: Policy, point: Point) -> Tensor:
        """Return [B, 2]: the point's part of every row's R and log p."""
        logp = self._log_prob(policy.dist(point), point)
        if self.snapshots:
            old = self._log_prob(frozen(policy, self.anchored, point), point)
        else:
            old = point.old(logp, _recorded(point))
        weight = 1.0 if point.weight is None else point.weight
        parts = (row_sum(weight * x, point.mask) for x in (logp - old, logp))
        return torch.cat(list(parts), 1)

    def couple(self, point: Point, measured: Tensor) -> Point:
        """Return the value of every row's loss, and its slope in the row's R."""
        names, index = point.row_id.unique(return_inverse=True)

        def by_row(x: Tensor) -> Tensor:
            return x.new_zeros(len(names), *x.shape[1:]).index_add(0, index, x)

        length = by_row(point.mask.sum(1))
        # an idle pass has rows without decisions; one device sync, not one for every tensor
        rows = (length > 0).nonzero()[:, 0]
        totals = by_row(measured.detach())
        weighed = point.advantage.to(measured) * point.mask
        advantage = by_row(weighed.sum(1)) / length.clamp_min(1)
        group = torch.zeros_like(names).index_copy(0, index, point.group)
        with torch.enable_grad():
            leaf = totals[rows, 0].requires_grad_()
            value = self.of_group(
                self._samples(leaf, totals[rows, 1], advantage[rows], length[rows], group[rows])
            )
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        if not len(leaf):
            return point
        observe("group/log_ratio", leaf)
        every = totals.new_zeros(len(names), 2)
        every[rows] = torch.stack([value.detach(), slope], 1)
        of_point = every[index]
        return point.replace(coupling=Tangent(value=of_point[:, :1], slope=of_point[:, 1:]))

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """Compute the loss; before ``couple`` it is minus the advantage times the log-prob."""
        logp = self._log_prob(policy.dist(point), point)
        if self.num_noise_draws is None:
            observe("log_ratio", logp - _recorded(point), point.current())
        if point.coupling is None:
            return -point.advantage * logp
        tangent = point.coupled(Tangent)
        # times the decisions by which the mean over a row divides: R is a sum
        slope = tangent.slope * point.num_decisions[:, None]
        return tangent.value + slope * (logp - logp.detach())

    def _log_prob(self, dist: Dist, point: Point) -> Tensor:
        """Return [B, L]: log-probs, or minus denoising errors; 0 where nothing is trained on."""
        renoised = self.num_noise_draws is not None
        value = -error(dist, point) if renoised else dist.log_prob(point.target)
        return torch.where(point.mask, value, 0.0)

    def _samples(
        self, ratio: Tensor, logp: Tensor, advantage: Tensor, length: Tensor, group: Tensor
    ) -> Samples:
        logp = logp + (ratio - ratio.detach())
        divisor = length if self.average else 1
        return Samples(ratio / divisor, logp / divisor, advantage, length, Groups(group))


def _recorded(point: Point) -> Tensor:
    return torch.where(point.mask, point.recorded, 0.0)
