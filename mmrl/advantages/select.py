"""Selects the rows of a group that are worth an update."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.groups import Groups
from mmrl.core.errors import UserError
from mmrl.core.types import Rewards


def best_and_worst(score: Tensor, groups: Groups, row: Tensor, n: int) -> Tensor:
    """Mark [B] the n / 2 highest and n / 2 lowest of each group by score [B], or all if it has no
    more than n.

    DanceGRPO (Xue et al. 2025), "best-of-n", but inside every group rather than over all prompts of
    a process. Equal scores are kept in the order of ``row`` [B], the row ids, so that the choice
    does not depend on positions in the batch.
    """
    if n < 2 or n % 2:
        raise UserError(
            f"best_of must be an even number of at least 2 (half best, half worst), not {n}"
        )
    rank = ranks(score, groups, row)
    size = groups.size()[groups.index]  # [B] how many compete
    return groups.present & ((rank < n // 2) | (rank >= size - n // 2))


def ranks(score: Tensor, groups: Groups, row: Tensor) -> Tensor:
    """Return the place [B] of every present row in its group, 0 for the lowest score [B].

    Equal scores are ordered by ``row`` [B], the row ids. The places of missing rows are undefined.
    """
    size = groups.size()  # [P]
    # the missing come after every group
    group = torch.where(groups.present, groups.index, groups.count)
    order = torch.argsort(row.to(score.device), stable=True)
    order = order[torch.argsort(score[order], stable=True)]
    order = order[torch.argsort(group[order], stable=True)]  # [B] by group, score, name
    start = torch.cat([size.new_zeros(1), size.cumsum(0)])  # [P + 1]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - start[group[order]]
    return rank


def drop(groups: Groups, rewards: Rewards, flat: str) -> Tensor:
    """Mark [B] the rows with a reward, and with "drop" only those of groups whose rewards
    differ."""
    if flat != "drop":
        return groups.present
    return groups.present & ~groups.flat(rewards.total())[groups.index]
