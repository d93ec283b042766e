"""Averages advantages over decisions that several samples share: a plan with several images, images
that begin alike."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.branch import edge_mean
from mmrl.advantages.presets import grpo
from mmrl.advantages.shaping import Underneath
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout


@ADVANTAGES.register("tree_mean")
def tree_mean(
    rewards: Rewards | Tensor, rollout: Rollout, *, base: Underneath = grpo, siblings: bool = False
) -> Tensor:
    """Give an edge of a tree the mean advantage of the samples below it, as if they stood alone.

    base: the advantage of samples. siblings: an edge is judged by those that begin where it begins,
    less the mean of the edge before: a plan by its images' mean, an image beside the other images
    of its plan. [B, K]; [B, 1] without a tree.
    """
    of_samples = base(rewards, rollout)
    if rollout.edge_id is None:
        return of_samples
    leaf = of_samples.double().expand(rollout.edge_id.shape)
    scored = leaf.isfinite().double()
    columns = []
    before = last = None  # the edges above, and the column to the left, as (names, means)
    for k, name in enumerate(rollout.edge_id.unbind(1)):
        if last is None or not torch.equal(name, last[0]) or of_samples.shape[1] > 1:
            mean = edge_mean(leaf[:, k], scored[:, k], name)
            before = last if last is not None and not torch.equal(name, last[0]) else before
            last = name, mean
        columns.append(last[1] - before[1] if siblings and before is not None else last[1])
    return torch.stack(columns, 1).to(of_samples.dtype)
