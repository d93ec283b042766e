"""Normalises rewards within groups or the batch and combines several of them, all in float64."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.groups import Groups
from mmrl.core.distributed import all_sum
from mmrl.core.types import Rewards

Std = Literal["group", "global", "none"]
EpsMode = Literal["add", "floor", "sqrt"]
Combine = Literal["sum", "gdpo", "aggregate"]


def moments(x: Tensor, present: Tensor, ddof: int = 0) -> tuple[Tensor, Tensor]:
    """Return the (mean, variance) of the present values of x [B] over all processes, scalars; 0
    where nothing is present."""
    x = x[present]
    count, total = all_sum(torch.stack([x.new_tensor(float(len(x))), x.sum()]))
    mean = total / count.clamp(min=1)
    return mean, all_sum((x - mean).square().sum()) / (count - ddof).clamp(min=1)


def root(variance: Tensor, eps: float, mode: EpsMode) -> Tensor:
    """Return a standard deviation that can be divided by: std + eps, max(std, eps) or sqrt(variance
    + eps)."""
    if mode == "sqrt":
        return (variance + eps).sqrt()
    std = variance.sqrt()
    return std + eps if mode == "add" else std.clamp(min=eps)


def whiten(x: Tensor, groups: Groups, std: Std, ddof: int, eps: float, mode: EpsMode) -> Tensor:
    """Return (x - mean of the group) / std [B], exactly 0 in flat groups.

    The global std is that of all rewards about their common mean, the differences between prompts
    included.
    """
    scale = spread(x, groups, std, ddof, eps, mode)
    return (groups.centred(x) / scale).masked_fill(groups.flat(x)[groups.index], 0.0)


def spread(x: Tensor, groups: Groups, std: Std, ddof: int, eps: float, mode: EpsMode) -> Tensor:
    """Return what ``whiten`` divides by, [B] or a scalar."""
    if std == "group":
        return root(groups.variance(x, ddof), eps, mode)[groups.index]
    if std == "global":
        return root(moments(x, groups.present, ddof)[1], eps, mode)
    return torch.ones_like(x)


def combined(
    rewards: Rewards,
    groups: Groups,
    combine: Combine,
    std: Std,
    ddof: int,
    eps: float,
    mode: EpsMode,
) -> Tensor:
    """Combine several rewards into one advantage [B].

    sum: of the weighted sum of the rewards. aggregate: the weighted sum of the advantages of each.
    gdpo: that, divided by its own std over the whole batch, so that the scale does not depend on
    the number of rewards; a sum that cancels but for the rounding of the rewards is 0.
    """
    if combine == "sum":
        return whiten(rewards.total(), groups, std, ddof, eps, mode)
    parts = (
        rewards.weights[name] * whiten(x, groups, std, ddof, eps, mode)
        for name, x in rewards.items()
    )
    added = torch.stack(list(parts)).sum(0)
    if combine == "aggregate":
        return added
    rounding = [
        abs(rewards.weights[name]) * x.abs() / spread(x, groups, std, ddof, eps, mode)
        for name, x in rewards.items()
    ]
    noise = 2 * torch.finfo(torch.float32).eps * torch.stack(rounding).sum(0).nan_to_num(0.0)
    added = added.masked_fill(added.abs() <= noise, 0.0)
    _, variance = moments(added, groups.present, ddof)  # the mean is 0, every group being centred
    # 0 also where all is flat and eps is 0
    return torch.where(added == 0, 0.0, added / root(variance, eps, mode))


def flat_rows(rewards: Rewards, groups: Groups, combine: Combine) -> Tensor:
    """Mark the rows [B] whose group has no spread in the total or, if each reward is normalised
    separately, in any reward."""
    if combine == "sum":
        return groups.flat(rewards.total())[groups.index]
    return torch.stack([groups.flat(x) for x in rewards.values()]).all(0)[groups.index]
