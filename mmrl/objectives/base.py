"""What an objective is: where to evaluate the policy (``points``) and what to minimise there (``loss``).

A loss is elementwise, [B, L]. Masks, means over the global batch, micro-batches and gradient accumulation are the
trainer's business alone, so that none of them changes the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from samplers.noise import Rng

from ..dists import Dist
from ..policies.base import Policy
from ..types import Point, Rollout


class Objective(Protocol):
    """``behaviour`` names the weights that sample ("live" or a snapshot); ``snapshots`` those it needs kept."""

    behaviour: str
    snapshots: tuple[str, ...]

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        """The states to evaluate for these rows. All its points have tensors of one shape."""

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """[B, L] elementwise."""


def frozen(policy: Policy, name: str, point: Point) -> Dist:
    """The distribution under a snapshot, without gradient."""
    with policy.weights.using(name), torch.no_grad():
        return policy.dist(point)
