"""Advantages of text methods: over the batch, weighted by length, scaled, or of the best only.

Shapes and missing samples are as in ``mmrl.advantages.group``. The *length* of a row is the number
of its decisions, ``rollout.mask``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.group import ZeroVariance
from mmrl.advantages.groups import Groups, finished, measured
from mmrl.advantages.normalise import moments
from mmrl.advantages.process import by_step
from mmrl.advantages.select import drop
from mmrl.core.distributed import all_max, all_sum
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout
from mmrl.zoo.advantages.quantities import length as length_of

TINY = 1e-8  # verl's, under the root of a whitening


@ADVANTAGES.register("reinforce")
@by_step
def reinforce(rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
    """Use the reward itself, without a baseline (REINFORCE, Williams 1992).

    It suits rewards that already are weights of the score function, such as ``noisy: {how:
    forward}``; with other rewards the gradient has a far larger variance than with a baseline.
    """
    double, groups = measured(rewards, rollout)
    return finished(double.total(), rewards, groups.present)


@ADVANTAGES.register("reinforce_pp")
@by_step
def reinforce_pp(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    baseline: bool = False,
    weigh: Literal["tokens", "rows"] = "tokens",
    zero_variance_groups: ZeroVariance = "keep",
) -> Tensor:
    """Whiten rewards over the whole batch, ``baseline``: less the group's mean first (REINFORCE++).

    weigh: the unit of mean and std: tokens (verl: the mean is subtracted, sample variance + 1e-8
    under the root, and long answers weigh more) or rows (ms-swift: the std of the rows + 1e-4, and
    with the baseline no second mean).

    baseline: subtract the group's mean first. zero_variance_groups: keep groups of equal rewards,
    or drop them from the batch.
    """
    double, groups = measured(rewards, rollout)
    value = groups.centred(double.total()) if baseline else double.total()
    if weigh == "rows":
        mean, variance = moments(value, groups.present, ddof=1)
        whitened = (value - (0.0 if baseline else mean)) / (variance.sqrt() + 1e-4)
    else:
        whitened = _by_tokens(value, length_of(rollout).to(value), groups)
    return finished(
        _unless_equal(whitened, double, groups, baseline),
        rewards,
        drop(groups, double, zero_variance_groups),
    )


def _by_tokens(value: Tensor, length: Tensor, groups: Groups) -> Tensor:
    """Return (x - mean) / sqrt(variance + 1e-8) [B], every row counted as often as it has
    decisions."""
    weight = length * groups.present
    value = value.masked_fill(~groups.present, 0.0)
    count, total = all_sum(torch.stack([weight.sum(), (weight * value).sum()]))
    mean: Tensor = total / count.clamp_min(1)
    variance: Tensor = all_sum((weight * (value - mean).square()).sum()) / (count - 1).clamp_min(1)
    return (value - mean) * (variance + TINY).rsqrt()


def _unless_equal(whitened: Tensor, double: Rewards, groups: Groups, baseline: bool) -> Tensor:
    """Set advantages to 0 where all rewards are equal: in a group with the baseline, in the batch
    without."""
    total = double.total()
    if baseline:
        return whitened.masked_fill(groups.flat(total)[groups.index], 0.0)
    scored = torch.cat([total[groups.present], total.new_full((1,), -torch.inf)])
    under = torch.cat([-total[groups.present], total.new_full((1,), -torch.inf)])
    high, low = all_max(torch.stack([scored.max(), under.max()]))
    return torch.zeros_like(whitened) if high + low <= 0 else whitened


@ADVANTAGES.register("opo")
@by_step
def opo(
    rewards: Rewards | Tensor, rollout: Rollout, *, zero_variance_groups: ZeroVariance = "keep"
) -> Tensor:
    """Subtract the group's mean weighted by length, the best baseline (OPO, Hao et al. 2025, eq.
    9).

    zero_variance_groups: keep groups of equal rewards, or drop them from the batch.
    """
    double, groups = measured(rewards, rollout)
    total = double.total()
    length = length_of(rollout).to(total.device)
    centred = groups.centred(total)  # first, so that equal rewards give exactly 0
    mean = groups.sum(length * centred.masked_fill(~groups.present, 0.0)) / groups.sum(
        length
    ).clamp_min(1)
    advantage = (centred - mean[groups.index]).masked_fill(groups.flat(total)[groups.index], 0.0)
    return finished(advantage, rewards, drop(groups, double, zero_variance_groups))


@ADVANTAGES.register("gpg")
@by_step
def gpg(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    scale: float = 1.0,
    count: Literal["groups", "rewards"] = "groups",
    zero_variance_groups: ZeroVariance = "keep",
) -> Tensor:
    """Scale reward - group's mean by samples / informative samples (GPG, Chu et al. 2025).

    count: informative are the samples of groups whose rewards differ (the paper), or those with a
    nonzero reward (verl's code).

    scale: of the advantage. zero_variance_groups: keep groups of equal rewards, or drop them from
    the batch.
    """
    if scale <= 0:
        raise UserError(f"gpg: scale must be greater than 0, it is {scale}")
    double, groups = measured(rewards, rollout)
    total = double.total()
    level = groups.flat(total)[groups.index]
    teach = groups.present & (~level if count == "groups" else total != 0)
    samples, useful = all_sum(torch.stack([groups.present.sum(), teach.sum()]).double())
    advantage = (
        groups.centred(total).masked_fill(level, 0.0) * samples / useful.clamp_min(1) / scale
    )
    return finished(advantage, rewards, drop(groups, double, zero_variance_groups))


@ADVANTAGES.register("pass_at_k")
@by_step
def pass_at_k(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    eps: float = 1e-6,
    zero_variance_groups: ZeroVariance = "keep",
) -> Tensor:
    """Train only the best answer: its margin over the second / (sample std + eps) (verl's pass@k).

    Of two equal best answers the first by name counts, with advantage 0.

    eps: added to the std. zero_variance_groups: keep groups of equal rewards, or drop them from the
    batch.
    """
    double, groups = measured(rewards, rollout)
    total = double.total()
    best = total.masked_fill(~groups.present, -torch.inf)
    order = torch.argsort(rollout.row_id.to(best.device), stable=True)
    order = order[torch.argsort(best[order], descending=True, stable=True)]
    # by group, best first, then by name
    order = order[torch.argsort(groups.index[order], stable=True)]
    group_rows = torch.bincount(groups.index, minlength=groups.count)
    first = order[group_rows.cumsum(0) - group_rows]  # [P] row of the best
    # [P], or a row of another group
    second = order[(group_rows.cumsum(0) - group_rows + 1).clamp(max=len(order) - 1)]
    several = groups.size() > 1
    std = groups.variance(total, 1).sqrt()
    lead = torch.where(several, (best[first] - best[second]) / (std + eps), 0.0)
    advantage = torch.zeros_like(total).index_copy(
        0, first, torch.where(groups.flat(total), 0.0, lead)
    )
    return finished(advantage, rewards, drop(groups, double, zero_variance_groups))
