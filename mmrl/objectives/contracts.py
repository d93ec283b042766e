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
    """The loss of a row depends on other points of the step."""

    @abstractmethod
    def couples(self, policy: Policy) -> Literal["", "rows", "groups"]:
        """Say which points must share an optimizer step: all of a row, or of a group; "": any may.

        Then ``measure`` is evaluated without gradient on every pass of the step, and ``couple``
        sees all of this process's points at once. So micro-batches still change nothing.
        """

    @abstractmethod
    def measure(self, policy: Policy, point: Point) -> Tensor:
        """Return [B, L]: what ``couple`` needs of every row."""

    @abstractmethod
    def couple(self, point: Point, measured: Tensor) -> Point:
        """Return all points of the step, with what ``loss`` needs of the others in ``coupling``.

        ``measured`` [B, L] is in the same order. Collective calls are allowed: a process without
        rows gets its idle points, of which nothing is kept, so that ``loss`` may see a point
        without a ``coupling``.
        """


class WeighsPoints(Objective):
    """Weights the points of a step, given all of them."""

    @abstractmethod
    def before_step(self, masks: Sequence[tuple[Tensor, bool]]) -> None:
        """Inspect what an optimizer step trains on, before its points are made: the mask [B, L] of
        every point, and whether it is re-noised. Called on all processes alike."""


class HasTeacher(Objective):
    """Compares the policy with a second model, which it loads."""

    @abstractmethod
    def setup(self, policy: Policy) -> None:
        """Check the policy before the first iteration and load the second model. Raises UserError
        if something does not fit the policy."""

    @abstractmethod
    def setup_dry_run(self, policy: Policy) -> None:
        """Use the policy instead of what ``setup`` would load: a dry run only counts."""


class ChecksRows(Objective):
    """Reads fields of the rows of the data."""

    @abstractmethod
    def check(self, policy: Policy, prompts: Sequence[Prompt]) -> None:
        """Raise UserError, with file and line, if a row lacks a field that the objective reads."""


class HasCritic(Objective):
    """Has a snapshot that is trained along with the policy."""

    @abstractmethod
    def critic(self) -> Critic:
        """Return what is trained along with the policy."""


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
        """Tell whether the optimizer's state is reset before the steps of iteration
        ``iteration``, as its target has moved."""
        return False


class TracksOld(Objective):
    """The snapshot "old" is a moving average of the live weights, not a copy of them."""

    @abstractmethod
    def old_decay(self, step: int) -> float:
        """Return the share of the snapshot "old" that an iteration ending at optimizer step
        ``step`` keeps.

        old = decay * old + (1 - decay) * live; 0 copies the live weights.
        """


class ShapesRewards(Objective):
    """Changes the rewards before they are compared."""

    @abstractmethod
    def shaped(self, policy: Policy, rollout: Rollout, rewards: Rewards) -> Rewards:
        """Return the rewards to compare, such as the measured ones minus the KL of every sample.

        Called under the sampling weights, without gradient; all processes have equally many rows.
        """


class CountsEpochs(Objective):
    """Evaluates different points in every epoch over a rollout."""

    @abstractmethod
    def start_epoch(self, epoch: int | None) -> None:
        """Begin an epoch over a rollout, counted from 0; None: there is only one."""


class Stateful(Objective):
    """Learns something from iteration to iteration, which is saved with the run."""

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        """Adapt to the metrics of iteration ``iteration`` (from 0); may add to them."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what ``adapt`` has learnt, plain data fit for JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""


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
    """Name a method that is never called, because the objective does not derive from the class
    that declares it; None: there is none."""
    for contract in CONTRACTS:
        methods = contract.__abstractmethods__ - Objective.__abstractmethods__
        useless = [name for name in methods if hasattr(objective, name)]
        if useless and not isinstance(objective, contract):
            return (
                f"{type(objective).__name__} has {min(useless)}, which is never called: derive it "
                f"from mmrl.objectives.contracts.{contract.__name__}"
            )
    return None
