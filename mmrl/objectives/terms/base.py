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
# which terms say nothing about a policy's decisions
FOREIGN = {"gaussian": "tokens", "categorical": "steps"}


@dataclass(frozen=True)
class Scored:
    """Holds a point and what the current weights say of its decisions."""

    policy: Policy
    point: Point
    dist: Dist
    logp: Tensor  # [B, L] 0 where nothing is trained on
    recorded: Tensor  # [B, L] likewise, under the weights that sampled
    old: Tensor  # [B, L] what the ratio divides by
    advantage: Tensor  # [B, 1] or [B, L], within ``advantage_clip``


@dataclass
class Term:
    """Is a part of a policy gradient. Its fields are options of the objective beside the others.

    A subclass fills in what it needs: most have one of ``factor`` and ``add``, and ``unfit``.
    """

    # its options mean nothing for decisions of the other kind; and what to do instead, by option
    of: ClassVar[Literal["", "tokens", "steps"]] = ""
    instead: ClassVar[Mapping[str, str]] = {}
    # looks at decisions of several points: ``couples`` says which, for a policy
    regroups: ClassVar[bool] = False
    # corrects for samples of older weights; learns from finished samples of others
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
        """Tell whether it looks at whole samples, which must not share steps."""
        return False

    def snapshots(self) -> tuple[str, ...]:
        """Name the weights to keep."""
        return ()

    def unfit(self, policy: Any, loss: PolicyLoss, coupled: bool) -> Iterator[tuple[str, str]]:
        """Yield (option, sentence) for what means nothing for a policy, an object or a class.

        loss: of the surrogate. coupled: it, or another term, looks at several points at once.
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
        """Return the rollout whose decisions are trained on, with what the term has to know."""
        return rollout

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        """Return points of its own, beside those of the path."""
        return ()

    # The loss.

    def loss(self, policy: Policy, point: Point) -> Tensor | None:
        """Compute the loss [B, L] of a point of its own; None: the point is not."""
        return None

    def widen(self, scale: Tensor | float, point: Point) -> Tensor | float:
        """Return what the clip of the ratio is multiplied by, given what it was without."""
        return scale

    def substitute(self, loss: Tensor, at: Scored) -> Tensor:
        """Return the policy loss [B, L], of some decisions another than the surrogate's."""
        return loss

    def factor(self, at: Scored) -> Tensor | None:
        """Return what the policy loss is multiplied by, [B, 1] or [B, L]; None: 1."""
        return None

    def add(self, loss: Tensor, at: Scored) -> Tensor:
        """Return the loss [B, L] with this term in it."""
        return loss

    # Losses of several points, as in ``Objective``.

    def couples(self, policy: Policy) -> Literal["", "rows", "groups"]:
        return ""

    def measure(self, policy: Policy, point: Point) -> Tensor:
        return torch.zeros_like(point.recorded[:, :1])

    def couple(self, point: Point, measured: Tensor) -> Point:
        return point

    def before_step(self, masks: Sequence[tuple[Tensor, bool]]) -> None:
        """See ``Objective.weigh``."""

    # What happens around the update, as in ``Objective``.

    def shaped(self, policy: Policy, rollout: Rollout, rewards: Rewards) -> Rewards:
        return rewards

    def begin_iteration(self, weights: Weights, iteration: int) -> None:
        """See ``Objective.begin_iteration``."""

    def restarts(self, iteration: int) -> bool:
        return False

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        """See ``Objective.adapt``."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what is the term's of the objective's state."""


def decisions_of(policy: Any) -> str:
    """Return the kind of a policy's decisions; "": it does not say."""
    can = capabilities_of(policy)
    return "" if can is None else can.decisions


def in_one(policy: Any) -> bool:
    """Tell whether one pass scores all decisions of a sample, as far as the policy says."""
    can = capabilities_of(policy)
    return can is None or (can.decisions != "gaussian" and can.one_pass)
