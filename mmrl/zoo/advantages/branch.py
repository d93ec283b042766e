"""Compares every edge of a tree of samples with the other edges of its depth (BranchGRPO)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.advantages.edges import edge_mean
from mmrl.advantages.groups import Groups, measured
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import LatentPath, Rewards, Rollout

SAME = 1e-6  # a smaller spread of rewards counts as zero


@ADVANTAGES.register("branch")
class Branch:
    """Compare the edges of a depth by the rewards of the leaves below them (BranchGRPO, TreeRPO).

    Li et al. 2025, "BranchGRPO", sections 3.3 and 3.4. fusion: "mean" of the leaves; "path" lets
    every node weigh its children by softmax(alpha log-prob of their edge), from the leaves up.
    among: an edge is compared with all of its prompt and depth, or with its "siblings", which have
    the same parent (Yang et al. 2025, "TreeRPO: Tree relative policy optimization"); the roots of
    one prompt are siblings. ddof, eps: of the standard deviation. prune_depth: these edges (1 is
    the first) are not trained; all move one depth earlier every ``slide_every`` iterations until
    the first is at ``slide_stop``. prune_width: after the last split only half of the chains are
    trained, the better one of each split ("siblings") or the best and the worst of all
    ("extremes").

    alpha: of that softmax. slide_every: iterations after which the pruned depths move; 0: never.
    slide_stop: the first pruned depth at last. keep: share of the edges that stay.
    """

    needs_tree = True  # the configuration refuses it without one

    def __init__(
        self,
        fusion: Literal["mean", "path"] = "mean",
        alpha: float = 1.0,
        among: Literal["depth", "siblings"] = "depth",
        ddof: Literal[0, 1] = 1,
        eps: Annotated[float, Gt(0)] = 1e-8,
        prune_depth: Sequence[Annotated[int, Ge(1)]] = (),
        slide_every: Annotated[int, Ge(0)] = 0,
        slide_stop: Annotated[int, Ge(1)] = 1,
        prune_width: Literal["siblings", "extremes"] | None = None,
        keep: Annotated[float, Gt(0), Le(1)] = 0.5,
    ):
        self.fusion = fusion
        self.alpha = alpha
        self.among = among
        self.ddof = ddof
        self.eps = eps
        self.prune_depth = tuple(prune_depth)
        self.slide_every = slide_every
        self.slide_stop = slide_stop
        self.prune_width = prune_width
        self.keep = keep
        self.iteration = 0

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return the advantages [B, K], NaN for edges that are pruned or have no reward below;
        count the iteration."""
        edge_id = rollout.edge_id
        if edge_id is None:
            raise UserError(
                "advantage branch compares the edges of a tree; give the policy one, "
                "such as tree: {}"
            )
        double, groups = measured(rewards, rollout)
        leaf = double.total().masked_fill(~groups.present, torch.nan)  # [B]
        fused = self._fuse(
            leaf, rollout, edge_id
        )  # [B, K] reward of the edge that leads to depth k + 1
        if self.among == "siblings":
            edges = self._beside_siblings(fused, edge_id, rollout.group)
        else:
            edges = self._beside_depth(fused, edge_id, rollout.group)
        advantage = torch.stack(edges, 1)
        advantage = advantage.masked_fill(
            self._pruned(advantage, edge_id, rollout.group), torch.nan
        )
        self.iteration += 1
        return advantage.float()

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"])

    def _fuse(self, leaf: Tensor, rollout: Rollout, edge_id: Tensor) -> Tensor:
        """Return the rewards [B, K] of the edges, the same on all rows that share one."""
        fused = [leaf]  # from the leaves up
        logprob = rollout.logprob.double()
        if isinstance(rollout.trajectory, LatentPath):  # steps without noise have no density
            logprob = torch.where(rollout.trajectory.noise_level > 0, logprob, 0.0)
        for k in reversed(range(1, edge_id.shape[1])):
            below = fused[-1]
            name = edge_id[:, k]
            parent = edge_id[:, k - 1]
            if self.fusion == "mean" and torch.equal(name, parent):
                fused.append(below)  # further tokens of an edge
            elif self.fusion == "mean":
                weight = (~leaf.isnan()).double()
                fused.append(edge_mean(leaf, weight, parent))
            else:
                score = logprob[:, k]
                # one for every edge, however the rows are named now
                rows = _first(name) & ~below.isnan()
                weight = (self.alpha * (score - _most(score, parent))).exp() * rows
                fused.append(edge_mean(below, weight, parent))
        return torch.stack(fused[::-1], 1)

    def _normalised(self, reward: Tensor, name: Tensor, group: Tensor) -> Tensor:
        """Return (reward - mean) / (std + eps) [B] over the different edges of each group [B], a
        prompt or siblings; 0 where they are equal."""
        first = _first(name)
        prompts, index = group.unique(return_inverse=True)
        edges = Groups(index, first & ~reward.isnan(), len(prompts))
        values = reward.nan_to_num(0.0)
        std = edges.variance(values, self.ddof).sqrt()[index]
        centred = torch.where(std < SAME, 0.0, edges.centred(values) / (std + self.eps))
        return centred.masked_fill(reward.isnan(), torch.nan)

    def _beside_depth(self, fused: Tensor, edge_id: Tensor, group: Tensor) -> list[Tensor]:
        """Return for each of the K decisions the rewards [B] of the edges, normalised over all of
        their prompt there."""
        edges: list[Tensor] = []
        for k in range(fused.shape[1]):
            alike = k and torch.equal(edge_id[:, k], edge_id[:, k - 1])
            if alike and torch.equal(fused[:, k], fused[:, k - 1]):
                edges.append(edges[-1])
            else:
                edges.append(self._normalised(fused[:, k], edge_id[:, k], group))
        return edges

    def _beside_siblings(self, fused: Tensor, edge_id: Tensor, group: Tensor) -> list[Tensor]:
        """Return for each of the K decisions the rewards [B] of the edges, normalised at an edge's
        start over its siblings."""
        above = parents(edge_id, group)
        edges = [self._normalised(fused[:, 0], edge_id[:, 0], above[:, 0])]
        for k in range(1, fused.shape[1]):
            begins = above[:, k] != above[:, k - 1]
            if not begins.any():
                edges.append(edges[-1])
                continue
            fresh = self._normalised(fused[:, k], edge_id[:, k], above[:, k])
            edges.append(torch.where(begins, fresh, edges[-1]))
        return edges

    def _pruned(self, advantage: Tensor, edge_id: Tensor, group: Tensor) -> Tensor:
        """Tell which edges [B, K] are pruned."""
        pruned = torch.zeros_like(advantage, dtype=torch.bool)
        if self.prune_depth:
            slid = self.iteration // self.slide_every if self.slide_every else 0
            slid = min(slid, max(0, min(self.prune_depth) - self.slide_stop))
            for depth in self.prune_depth:
                if depth - slid <= pruned.shape[1]:
                    pruned[:, depth - slid - 1] = True
        if self.prune_width:
            counts = [len(names.unique()) for names in edge_id.unbind(1)]
            last = max([k for k in range(1, len(counts)) if counts[k] > counts[k - 1]], default=0)
            siblings = last and self.prune_width == "siblings"
            parent = edge_id[:, last - 1] if siblings else group
            pruned[:, last + 1 :] |= self._narrow(advantage[:, -1], parent)[:, None]
        return pruned

    def _narrow(self, advantage: Tensor, parent: Tensor) -> Tensor:
        """Tell which chains [B] are left out."""
        pruned = torch.ones_like(advantage, dtype=torch.bool)
        for name in parent.unique():
            rows = (parent == name).nonzero()[:, 0]
            order = rows[
                advantage[rows].nan_to_num(-torch.inf).argsort(descending=True, stable=True)
            ]
            if self.prune_width == "siblings":
                pruned[order[: max(1, int(len(rows) * self.keep))]] = False
            else:
                count = min(len(rows), max(2, int(len(rows) * self.keep)))
                pruned[order[: count // 2]] = pruned[order[len(rows) - (count - count // 2) :]] = (
                    False
                )
        return pruned


def _first(name: Tensor) -> Tensor:
    """Mark one row of every name, [B] bool."""
    _, index = name.unique(return_inverse=True)
    place = torch.arange(len(name), device=name.device)
    least = place.new_full((int(index.max()) + 1,), len(name)).scatter_reduce(
        0, index, place, "amin"
    )
    return least[index] == place


def _most(value: Tensor, name: Tensor) -> Tensor:
    """Return the largest value [B] among the rows of each name."""
    names, index = name.unique(return_inverse=True)
    return value.new_full((len(names),), -torch.inf).scatter_reduce(0, index, value, "amax")[index]


def parents(edge_id: Tensor, group: Tensor) -> Tensor:
    """Number the parent edge [B, K] of each edge; of the first edges, their prompt.

    An edge that spans several decisions has one name in each and begins at the first of them: where
    fewer rows share it than the decision before.
    """
    names = edge_id + group[:, None] * (int(edge_id.max()) + 1)
    above = -1 - group
    columns = [above]
    before = names[:, 0]
    shared = _shared_by(before)
    for k, name in enumerate(names[:, 1:].unbind(1)):
        if not torch.equal(name, before):
            rows = _shared_by(name)
            above = torch.where(rows < shared, before * names.shape[1] + k, above)
            before = name
            shared = rows
        columns.append(above)
    return torch.stack(columns, 1)


def _shared_by(name: Tensor) -> Tensor:
    """Return how many rows [B] share each name."""
    _, index, count = name.unique(return_inverse=True, return_counts=True)
    shared: Tensor = count[index]
    return shared
