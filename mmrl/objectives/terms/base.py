"""What a term of the policy gradient is: a part of the loss with its own options, check, metrics
and state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mmrl.core.distributions import Dist
from mmrl.core.types import Point, Rewards, Rollout
from mmrl.core.weights import Weights
from mmrl.objectives.policy_loss import PolicyLoss
from mmrl.policies.base import Policy
from mmrl.policies.capabilities import capabilities_of
from samplers.noise import Rng

OF_BOTH = "a sample of this policy has tokens and steps of a picture: leave it out"
# which terms do not apply to a policy's decisions
FOREIGN = {"gaussian": "tokens", "categorical": "steps"}


@dataclass(frozen=True)
class Scored:
    """Holds a point and its log-probs under the current weights."""

    policy: Policy
    point: Point
    dist: Dist
    logp: Tensor  # [B, L] 0 where nothing is trained on
    recorded: Tensor  # [B, L] likewise, under the sampling weights
    old: Tensor  # [B, L] what the ratio divides by
    advantage: Tensor  # [B, 1] or [B, L], within ``advantage_clip``


@dataclass
class Term:
    """A part of a policy gradient. Its fields are options of the objective.

    A subclass fills in what it needs: most have one of ``factor`` and ``add``, and ``unfit``.
    """

    # its options do not apply to decisions of the other kind; what to do instead, by option
    of: ClassVar[Literal["", "tokens", "steps"]] = ""
    instead: ClassVar[Mapping[str, str]] = {}
    # depends on decisions of several points: ``couples`` says which, for a policy
    regroups: ClassVar[bool] = False
    # corrects for samples of older weights; learns from demonstrations
    corrects: ClassVar[bool] = False
    imitates: ClassVar[bool] = False

    def chosen(self) -> list[str]:
        """Name the options that differ from their defaults."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    def active(self) -> bool:
        """Tell whether the options ask for anything."""
        return bool(self.chosen())

    def moves_all(self) -> bool:
        """Tell whether it has a gradient whatever the advantage is."""
        return False

    def single_paths(self) -> bool:
        """Tell whether it needs whole samples, which must not share steps."""
        return False

    def snapshots(self) -> tuple[str, ...]:
        """Name the weights to keep."""
        return ()

    def unfit(self, policy: Any, loss: PolicyLoss, coupled: bool) -> Iterator[tuple[str, str]]:
        """Yield (option, sentence) for what does not apply to a policy (object or class).

        loss: of the surrogate. coupled: it, or another term, depends on several points at once.
        """
        decisions = decisions_of(policy)
        if self.of and decisions == "mixed":
            yield from ((name, OF_BOTH) for name in self.chosen() if name in self.instead)
        elif self.of and FOREIGN.get(decisions) == self.of:
            yield from (
                (name, self.instead[name]) for name in self.chosen() if name in self.instead
            )

    # What is trained on.

    def trained(self, rollout: Rollout, rng: Rng) -> Rollout:
        """Return the rollout whose decisions are trained on, with what the term needs."""
        return rollout

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        """Return additional points of this term, besides those on the path."""
        return ()

    # The loss.

    def loss(self, policy: Policy, point: Point) -> Tensor | None:
        """Compute the loss [B, L] of a point of this term; None: the point is another's."""
        return None

    def widen(self, scale: Tensor | float, point: Point) -> Tensor | float:
        """Return the factor on the clip of the ratio, given the factor without this term."""
        return scale

    def substitute(self, loss: Tensor, at: Scored) -> Tensor:
        """Return the policy loss [B, L], with the surrogate's replaced at some decisions."""
        return loss

    def factor(self, at: Scored) -> Tensor | None:
        """Return the factor on the policy loss, [B, 1] or [B, L]; None: 1."""
        return None

    def add(self, loss: Tensor, at: Scored) -> Tensor:
        """Return the loss [B, L] with this term added."""
        return loss

    # Losses of several points, as in ``Objective``.

    def couples(self, policy: Policy) -> Literal["", "rows", "groups"]:
        return ""

    def measure(self, policy: Policy, point: Point) -> Tensor:
        return torch.zeros_like(point.recorded[:, :1])

    def couple(self, point: Point, measured: Tensor) -> Point:
        return point

    def before_step(self, masks: Sequence[tuple[Tensor, bool]]) -> None:
        """See ``WeighsPoints.before_step``."""

    # What happens around the update, as in ``Objective``.

    def shaped(self, policy: Policy, rollout: Rollout, rewards: Rewards) -> Rewards:
        return rewards

    def begin_iteration(self, weights: Weights, iteration: int) -> None:
        """See ``MovesSnapshots.begin_iteration``."""

    def restarts(self, iteration: int) -> bool:
        return False

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        """See ``Stateful.adapt``."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the term's part of the objective's state."""


def decisions_of(policy: Any) -> str:
    """Return the kind of a policy's decisions; "": unknown."""
    can = capabilities_of(policy)
    return "" if can is None else can.decisions


def in_one(policy: Any) -> bool:
    """Tell whether one pass scores all decisions of a sample, as far as is known."""
    can = capabilities_of(policy)
    return can is None or (can.decisions != "gaussian" and can.one_pass)
