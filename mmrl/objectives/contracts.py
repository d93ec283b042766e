"""What only some objectives do, a class for each, from which those that do it derive; the trainer
asks ``isinstance(objective, Couples)``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from mmrl.core.types import Point, Prompt, Rewards, Rollout
from mmrl.core.weights import Weights
from mmrl.objectives.base import Critic, Differentiable, Objective
from mmrl.policies.base import Policy
from samplers.noise import Rng


class Couples(Objective):
    """Has losses of a row that depend on other points of the step."""

    @abstractmethod
    def couples(self, policy: Policy) -> Literal["", "rows", "groups"]:
        """Say which points must share an optimizer step: all of a row, or of a group; "": any may.

        Then ``measure`` is evaluated without gradient on every pass of the step, and ``couple``
        sees all of this process's points at once. So micro-batches still change nothing.
        """

    @abstractmethod
    def measure(self, policy: Policy, point: Point) -> Tensor:
        """Return [B, L]: what ``couple`` has to know of every row."""

    @abstractmethod
    def couple(self, point: Point, measured: Tensor) -> Point:
        """Return all points of the step, with what ``loss`` must know of the others in
        ``coupling``.

        ``measured`` [B, L] is in the same order. Collective calls are allowed: a process without
        rows gets its idle points, of which nothing is kept, so that ``loss`` may see a point
        without a ``coupling``.
        """


class WeighsPoints(Objective):
    """Weighs the points of a step by what all of them are."""

    @abstractmethod
    def before_step(self, masks: Sequence[tuple[Tensor, bool]]) -> None:
        """Look at what an optimizer step trains on, before its points are made: the mask [B, L] of
        every point, and whether it is re-noised. Called alike on all processes."""


class HasTeacher(Objective):
    """Compares the policy with a model that is loaded beside it."""

    @abstractmethod
    def setup(self, policy: Policy) -> None:
        """Look at the policy before the first iteration; load what is needed beside it. Raises
        UserError where something does not fit it."""

    @abstractmethod
    def setup_dry_run(self, policy: Policy) -> None:
        """Take the policy for what ``setup`` would load, as a dry run does, which only counts."""


class ChecksRows(Objective):
    """Reads something of the rows of the data."""

    @abstractmethod
    def check(self, policy: Policy, prompts: Sequence[Prompt]) -> None:
        """Raise UserError, with file and line, if a row lacks what the objective reads of it."""


class HasCritic(Objective):
    """Has a snapshot that learns beside the policy."""

    @abstractmethod
    def critic(self) -> Critic:
        """Return what learns beside the policy."""


class FollowsReward(Objective):
    """May follow the gradient of the rewards, if ``differentiates``."""

    @abstractmethod
    def attach(self, reward: Differentiable) -> None:
        """Take the weighted sum of the rewards, with gradient, if ``differentiates``."""


class MovesSnapshots(Objective):
    """Moves its snapshots from iteration to iteration."""

    @abstractmethod
    def begin_iteration(self, weights: Weights, iteration: int, rng: Rng) -> None:
        """Prepare iteration ``iteration`` (from 0): update snapshots, choose
        ``behavior_policy``.

        ``rng`` belongs to the iteration and is the same on all processes, so that nothing but the
        snapshots need be saved. Called twice for one iteration it does nothing more.
        """

    def restarts(self, iteration: int) -> bool:
        """Tell whether the optimizer forgets its state before the steps of iteration
        ``iteration``, as its target has moved."""
        return False


class TracksOld(Objective):
    """Follows the live weights with the snapshot "old", else a copy of them."""

    @abstractmethod
    def old_decay(self, step: int) -> float:
        """Return the share of the snapshot "old" that an iteration ending at optimizer step
        ``step`` keeps.

        old = decay * old + (1 - decay) * live; 0 copies the live weights.
        """


class ShapesRewards(Objective):
    """Compares other rewards than those that were measured."""

    @abstractmethod
    def shaped(self, policy: Policy, rollout: Rollout, rewards: Rewards) -> Rewards:
        """Return the rewards as they are compared, such as less the KL of every sample.

        Called under the weights that sampled, without gradient; all processes have equally many
        rows.
        """


class CountsEpochs(Objective):
    """Looks at other points in every epoch over a rollout."""

    @abstractmethod
    def start_epoch(self, epoch: int | None) -> None:
        """Begin an epoch over a rollout, counted from 0; None: there is but one."""


class Stateful(Objective):
    """Learns something from iteration to iteration, which is saved with the run."""

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        """Learn from what was logged of iteration ``iteration`` (from 0); may add to it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what ``adapt`` has learnt, plain data fit for JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""


CONTRACTS: tuple[type[Objective], ...] = (
    Couples,
    WeighsPoints,
    HasTeacher,
    ChecksRows,
    HasCritic,
    FollowsReward,
    MovesSnapshots,
    TracksOld,
    ShapesRewards,
    CountsEpochs,
    Stateful,
)


def undeclared(objective: Objective) -> str | None:
    """Say which method an objective has that nobody calls, as it does not derive from the class of
    those who have it; None: there is none."""
    for contract in CONTRACTS:
        methods = contract.__abstractmethods__ - Objective.__abstractmethods__
        useless = [name for name in methods if hasattr(objective, name)]
        if useless and not isinstance(objective, contract):
            return (
                f"{type(objective).__name__} has {min(useless)}, which nobody calls: derive it "
                f"from mmrl.objectives.contracts.{contract.__name__}"
            )
    return None
