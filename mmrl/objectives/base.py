"""What an objective is: where to evaluate the policy (``points``) and what to minimise there
(``loss``).

A loss is elementwise, [B, L]. Masks, means over the global batch, micro-batches and gradient
accumulation are the trainer's business alone, so that none of them changes the gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core.added_options import keep_constructor
from mmrl.core.distributions import Dist
from mmrl.core.effects import Requires
from mmrl.core.types import Fields, Media, Point, Prompt, Rollout
from mmrl.policies.base import Policy
from samplers.noise import Rng

Differentiable = Callable[[Media, list[Prompt]], Tensor]  # (media, prompts) -> [B], with gradient


class Objective(ABC):
    """Says where to evaluate the policy and what to minimise; the rest has defaults."""

    requires: Requires = Requires()

    behavior_policy: str = "live"  # the weights that sample: the live ones or a snapshot
    snapshots: tuple[str, ...] = ()  # those to keep
    # how far below and above 1 a ratio is not clipped; the gate of the log-probs is as narrow
    clip_bounds: tuple[float, float] = (math.inf, math.inf)

    def __init_subclass__(cls, **options: Any) -> None:
        """Make fields of a subclass options in addition to its base's; the constructor stays."""
        super().__init_subclass__(**options)
        keep_constructor(cls)

    @abstractmethod
    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        """Return the states to evaluate for these rows. Depends on the arguments alone, as it may
        be called more than once in a step. All points have tensors of one shape."""

    @abstractmethod
    def loss(self, policy: Policy, point: Point) -> Tensor:
        """Compute the loss of every decision, [B, L]."""

    def unfit(self, policy: Any) -> Iterator[tuple[str, str]]:
        """Yield (option, sentence) for options that do not apply to a policy (object or class)."""
        return iter(())

    def extra_terms(self) -> str:
        """Name an option whose term has a gradient whatever the advantage is; "": none is set."""
        return ""


@dataclass(frozen=True)
class Critic:
    """Names a snapshot that is trained along with the policy, by its own objective on the same
    rows: ``steps`` optimizer steps before each of the policy's."""

    snapshot: str
    objective: Objective
    steps: int = 1
    lr: float | None = None  # None: that of the policy's optimizer
    # trained with the snapshot; has its own weights, created by ``measure``
    head: Head | None = None


class Head(ABC):
    """A module trained along with a snapshot, and how it gets its weights."""

    module: Any  # torch.nn.Module

    @abstractmethod
    def measure(self, policy: Policy, point: Point) -> None:
        """Create the weights, by a pass at a point of the critic's objective."""

    @abstractmethod
    def restore(self, policy: Policy, tensors: Mapping[str, Tensor]) -> None:
        """Create the weights as they were saved."""


@dataclass(frozen=True, kw_only=True)
class Linearised(Fields):
    """Holds a loss of several points, linearised in the contribution of each row."""

    slope: Tensor  # [B, L] derivative of the step's loss by the row's contribution


@dataclass(frozen=True, kw_only=True)
class Tangent(Linearised):
    """Holds a tangent that also has the value of the loss."""

    value: Tensor  # [B, L] the row's share of the loss


def slope_of(point: Point) -> Tensor:
    """Return the slope [B, L] that ``couple`` found; before it, the advantage."""
    return point.advantage if point.coupling is None else point.coupled(Linearised).slope


def frozen(policy: Policy, name: str, point: Point) -> Dist:
    """Return the distribution under a snapshot, without gradient."""
    with policy.weights.using(name), torch.no_grad():
        return policy.dist(point)
