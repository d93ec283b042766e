"""Branches samples that share their first steps into trees (BranchGRPO, Li et al. 2025,
arXiv:2509.06040).

The leaves are the rows; ``span`` adjacent rows share a state. The first row of a span represents
it: its name is that of the state and of the edge that leads there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Copies
from samplers.noise import Rng


@dataclass(frozen=True)
class Tree:
    """Sets how samples branch: the samples of a group are the leaves of trees (BranchGRPO).

    It needs ``advantage: branch``, and ``train.group_size`` a multiple of factor ^ splits.

    splits: the steps at which every state gets children, or how many such steps, evenly spread.
    factor: children at a split. noise: of siblings, independent; correlated, (xi_0 + scale xi_b) /
    sqrt(1 + scale^2) with a common xi_0, which keeps every edge's density exact; or published, the
    scored noise times ``scale``, only for comparison with the published code. scale: of that
    noise.
    """

    splits: Sequence[Annotated[int, Ge(0)]] | Annotated[int, Ge(1)] = 4
    factor: Annotated[int, Ge(2)] = 2
    noise: Literal["independent", "correlated", "published"] = "independent"
    scale: Annotated[float, Gt(0)] = 4.0

    def at(self, steps: int) -> tuple[int, ...]:
        """Return the split steps, each once, in order. UserError where they do not fit."""
        if isinstance(self.splits, int):
            splits = tuple(steps // self.splits * i for i in range(self.splits))
        else:
            splits = tuple(sorted(set(self.splits)))
        if (
            not splits
            or splits[-1] >= steps
            or len(set(splits)) < len(splits)
            or (steps < len(splits))
        ):
            raise UserError(
                f"policy option tree.splits {self.splits}: needs different steps "
                f"between 0 and {steps - 1}"
            )
        return splits

    def spans(self, steps: int, copies: Copies) -> list[int]:
        """Count the leaves that share a state, for each of the steps + 1 states. UserError where
        copies do not divide."""
        splits = self.at(steps)
        leaves = self.factor ** len(splits)
        for size in {copies} if isinstance(copies, int) else set(copies):
            if size % leaves == 0:
                continue
            raise UserError(
                f"train.group_size {size}: a tree with {len(splits)} splits by "
                f"{self.factor} has {leaves} leaves, so the "
                f"copies must be a multiple of {leaves}"
            )
        span = leaves
        spans = [span]
        for k in range(steps):
            span //= self.factor if k in splits else 1
            spans.append(span)
        return spans

    def draw(
        self,
        rng: Rng,
        child: Tensor,
        parent: Tensor,
        shape: tuple[int, ...],
        step: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Draw the noise [B, *] of the children named ``child`` [B], of parents named ``parent``
        [B], at a split."""
        noise = rng.normal(child, shape, step, dtype)
        if self.noise == "published":
            return self.scale * noise
        if self.noise == "correlated":
            common = rng.fold("tree").normal(parent, shape, step, dtype)
            norm: float = (1 + self.scale**2) ** 0.5
            return (common + self.scale * noise) / norm
        return noise


def size(spans: Sequence[int], leaves: int, noisy: Tensor) -> dict[str, float]:
    """Count what one tree (or row) of ``leaves`` costs: network forwards and edges with a density,
    per leaf."""
    states = [leaves // span for span in spans]
    edges = sum(
        after for (_, after), stochastic in zip(pairwise(states), noisy.tolist()) if stochastic
    )
    return {"forwards": sum(states[:-1]) / leaves, "edges": edges / leaves}
