"""Averages advantages over decisions that samples share, such as a plan of several images or a
common prefix; compares samples within a tree and across trees."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from mmrl.advantages.edges import edge_mean
from mmrl.advantages.groups import Groups, finished, measured
from mmrl.advantages.normalise import whiten
from mmrl.advantages.presets import grpo
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout
from mmrl.zoo.advantages.shaping import Underneath


@ADVANTAGES.register("tree_mean")
def tree_mean(
    rewards: Rewards | Tensor, rollout: Rollout, *, base: Underneath = grpo, siblings: bool = False
) -> Tensor:
    """Give an edge of a tree the mean advantage of the samples below it.

    base: the advantage of samples, compared as if independent. siblings: an edge is compared with
    its siblings: the mean of its parent edge is subtracted, so a plan counts by its images' mean,
    an image relative to the other images of its plan. [B, K]; [B, 1] without a tree.
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


@ADVANTAGES.register("tree_grpo")
def tree_grpo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    ddof: Literal[0, 1] = 1,
    eps: Annotated[float, Gt(0)] = 1e-6,
    intra: float = 1.0,
    inter: float = 1.0,
) -> Tensor:
    """Compare a sample within its tree and with all trees of the prompt (Tree-GRPO).

    Ji et al. 2025, "Tree search for LLM agent reinforcement learning". intra (r - mean of the tree)
    / (its std + eps) + inter (r - mean of the prompt) / (its std + eps), of finished samples; a
    shared edge has the mean of its samples. Samples that share their first edge are a tree. ddof:
    of both standard deviations.

    eps: added to the stds. intra: weight of the comparison within the tree. inter: weight of that
    with all trees.
    """
    double, groups = measured(rewards, rollout)
    if rollout.edge_id is None:
        raise UserError(
            "advantage tree_grpo compares the samples of a tree; give the policy one, such as "
            "tree: {}"
        )
    total = double.total()
    first = rollout.edge_id[:, 0].to(total.device)
    roots, index = (first + groups.index * (first.max() + 1)).unique(return_inverse=True)
    trees = Groups(index, groups.present, len(roots))
    within = whiten(total, trees, "group", ddof, eps, "add")
    between = whiten(total, groups, "group", ddof, eps, "add")
    return finished(intra * within + inter * between, rewards, groups.present)


vars(tree_grpo)["needs_tree"] = True  # the configuration refuses it without one
