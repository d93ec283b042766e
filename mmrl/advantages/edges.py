"""Advantages of trees, whose samples share the edges at which they branched."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.types import Rollout


def edge_mean(value: Tensor, weight: Tensor, name: Tensor) -> Tensor:
    """Return the weighted mean [B] of the rows of each name, NaN where all weights are 0."""
    _, index = name.unique(return_inverse=True)
    count = int(index.max()) + 1
    total = value.new_zeros(count).index_add(0, index, value.nan_to_num(0.0) * weight)
    return (total / value.new_zeros(count).index_add(0, index, weight))[index]


def by_edge(advantage: Tensor, rollout: Rollout) -> Tensor:
    """Give an edge of a tree the mean advantage of the samples below it, on all their rows, [B, K].

    An edge is trained on at one of its rows only, so that the gradient is that of all samples;
    those without an advantage are left out of the mean. Without a tree the advantage, [B, 1] or [B,
    K], stays as it is.
    """
    if rollout.edge_id is None:
        return advantage
    leaf = advantage.double().expand(rollout.edge_id.shape)
    names = rollout.edge_id + rollout.group[:, None] * (int(rollout.edge_id.max()) + 1)
    edges: list[Tensor] = []
    for k, name in enumerate(names.unbind(1)):
        repeated = k > 0 and torch.equal(name, names[:, k - 1])
        repeated = repeated and torch.equal(leaf[:, k], leaf[:, k - 1])
        edges.append(
            edges[-1] if repeated else edge_mean(leaf[:, k], leaf[:, k].isfinite().double(), name)
        )
    return torch.stack(edges, 1).to(advantage.dtype)
