"""What an objective is: where to evaluate the policy (``points``) and what to minimise there
(``loss``).

A loss is elementwise, [B, L]. Masks, means over the global batch, micro-batches and gradient
accumulation are the trainer's business alone, so that none of them changes the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmrl.core.distributions import Dist
from mmrl.core.types import Media, Point, Prompt, Rewards, Rollout
from mmrl.core.weights import Weights
from mmrl.policies.base import Policy
from samplers.noise import Rng


class Objective(Protocol):
    """``behavior_policy`` names the weights that sample ("live" or a snapshot); ``snapshots`` those
    it needs kept.

    A class may say by ``reads`` which states of a path it looks at, so that the others need not be
    kept: "path" (all, also where nothing is said), "decisions" (before and after each), or "sample"
    (only the finished one).
    """

    behavior_policy: str
    snapshots: tuple[str, ...]

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        """The states to evaluate for these rows, a function of these arguments: they may be made
        more than once in a step. All its points have tensors of one shape."""

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """[B, L] elementwise."""


@runtime_checkable
class Coupled(Protocol):
    """An objective whose loss of one row needs the others of its group, such as a preference inside
    the group.

    Every optimizer step then holds whole groups. Before it, ``measure`` is evaluated without
    gradient on every pass; ``couple`` sees all of this process's points of the step at once and
    returns them ready for the elementwise ``loss``, with the weights it found in place of the
    advantage or in ``known``, say. So micro-batches still change nothing. ``couple`` may make
    collective calls: a process without rows gets its idle points, of which nothing is kept. A class
    whose options decide says by ``couples`` whether it does.
    """

    def measure(self, policy: Policy, point: Point) -> Tensor:
        """[B, L] what has to be known of every row."""

    def couple(self, point: Point, measured: Tensor) -> Point:
        """All points of the step, with ``measured`` [B, L] in the same order."""


@runtime_checkable
class Lagging(Protocol):
    """An objective whose snapshot ``old`` follows the live weights slowly; otherwise it is copied
    every iteration."""

    def old_decay(self, step: int) -> float:
        """After an iteration, at optimizer step ``step``: old = decay * old + (1 - decay) *
        live."""


@runtime_checkable
class Revisiting(Protocol):
    """An objective that samples with, or compares with, earlier checkpoints of its own training."""

    def revisit(self, weights: Weights, iteration: int, rng: Rng) -> None:
        """Before iteration ``iteration`` (from 0): update the snapshots; choose ``behavior_policy``
        anew.

        ``rng`` belongs to the iteration and is the same on all processes, so that nothing but the
        snapshots need be saved. Called twice for one iteration it does nothing more.
        """


@runtime_checkable
class Shaping(Protocol):
    """An objective that changes the rewards before they are compared, such as by the KL of every
    sample."""

    def shaped(self, policy: Policy, rollout: Rollout, rewards: Rewards) -> Rewards:
        """Under the weights that sampled, without gradient; all processes have equally many
        rows."""


@runtime_checkable
class Adaptive(Protocol):
    """An objective that learns something itself. What it knows is saved: ``state_dict`` is plain
    data, fit for JSON."""

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        """After iteration number ``iteration`` (from 0), with what was logged of it; may add to
        it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def couples(objective: Objective) -> bool:
    """Does it want to see all rows of a step before its loss?"""
    return isinstance(objective, Coupled) and getattr(objective, "couples", True)


@runtime_checkable
class Differentiates(Protocol):
    """An objective that follows the gradient of the rewards themselves."""

    def attach(self, reward: Callable[[Media, list[Prompt]], Tensor]) -> None:
        """Takes the weighted sum of the rewards, (media, prompts) -> [B], with gradient."""


def frozen(policy: Policy, name: str, point: Point) -> Dist:
    """The distribution under a snapshot, without gradient."""
    with policy.weights.using(name), torch.no_grad():
        return policy.dist(point)
