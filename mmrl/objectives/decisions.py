"""Selects and arranges decisions: a share of every row's, all of a row in order, a weight each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.distributed import all_gather_rows
from mmrl.core.types import Fields, Point
from samplers.noise import Rng

WHOLE = (
    "compares whole samples, which are scored in several passes here: choose the surrogate ppo, "
    "cispo, sapo, spo or reinforce"
)


@dataclass(frozen=True, kw_only=True)
class TokenWeights(Fields):
    """Holds how much every token's policy gradient counts."""

    weight: Tensor  # [B, L]


class RowTable:
    """Arranges all points of a step by row, so that the decisions of a row are contiguous."""

    def __init__(self, row_id: Tensor):
        _, self.row = row_id.unique(return_inverse=True)
        count = self.row.bincount()
        order = self.row.argsort(stable=True)
        place = torch.arange(len(order), device=order.device)
        self.visit = torch.empty_like(order)
        self.visit[order] = place - (count.cumsum(0) - count)[self.row[order]]
        self.shape = (len(count), int(count.max()))

    def spread(self, x: Tensor) -> Tensor:
        """Lay x [B, L, *] out by rows, [R, V L, *]: V visits a row, zeros where a row has fewer."""
        table = x.new_zeros(*self.shape, *x.shape[1:])
        table[self.row, self.visit] = x
        return table.flatten(1, 2)

    def collect(self, table: Tensor) -> Tensor:
        """Collect points [B, L] back from rows [R, V L]."""
        visits: Tensor = table.unflatten(1, (self.shape[1], -1))
        return visits[self.row, self.visit]


def one_pass(point: Point) -> bool:
    """Tell whether the point holds all decisions of its rows."""
    return not (point.mask.sum(1) != point.num_decisions).any()


def subset(mask: Tensor, fraction: float, rng: Rng | None, row: Tensor) -> Tensor:
    """Return [B, K] bool: int(n * fraction), at least one, of the n decisions of each row, the
    first or (with rng) random."""
    order = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    if rng is not None:
        order = rng.uniform(row, (mask.shape[1],))
    # [B, K] place among the row's own
    rank = torch.where(mask, order.double(), torch.inf).argsort(1).argsort(1)
    count = mask.sum(1, keepdim=True)
    # int(n * fraction), despite 0.3 * 10 < 3
    keep = (count.double() * fraction + 1e-9).floor().clamp_min(1)
    return mask & (rank < keep)


def of_high_entropy(point: Point, entropy: Tensor, share: float) -> Point:
    """Keep the share of tokens of highest entropy [B, L] of the whole step, on all processes."""
    every = all_gather_rows(entropy[point.mask]).double().sort().values
    if not len(every):
        return point
    rank = (1 - share) * (len(every) - 1)  # the quantile by linear interpolation
    below = every[int(rank)]
    above = every[min(int(rank) + 1, len(every) - 1)]
    chosen = entropy >= torch.lerp(below, above, rank % 1)
    return point.replace(coupling=TokenWeights(weight=chosen.to(entropy)))


def written_by_others(point: Point) -> Tensor:
    """Mark the rows that are demonstrations, [B] bool."""
    rows = point.provenance.is_ground_truth
    return torch.zeros_like(point.row_id, dtype=torch.bool) if rows is None else rows
