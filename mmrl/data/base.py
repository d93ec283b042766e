"""The contract of training prompts: a sequence, of which every iteration draws a batch, or a
curriculum that decides itself which."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, overload

from mmrl.core.errors import UserError
from mmrl.core.types import Copies, Prompt
from samplers.noise import Rng


def batch(prompts: Sequence[Prompt], count: int, iteration: int, seed: int) -> list[Prompt]:
    """Return the prompts of an iteration, ``count`` of them: epoch after epoch, each in its own
    random order.

    Stateless: the position in the data follows from the iteration, so a resumed run continues
    exactly. No prompt repeats within an epoch; a batch may span two epochs, or several if it is
    larger.
    """
    if not prompts:
        raise UserError("there are no prompts to draw from")
    return as_curriculum(prompts).batch(count, iteration, seed)


def pick(prompts: Sequence[Prompt], u: float, iteration: int) -> Prompt:
    """Return one of the prompts that ``iteration`` may draw, for u in [0, 1)."""
    return as_curriculum(prompts).pick(u, iteration)


def place(position: int, size: int, seed: int, *names: int | str) -> int:
    """Return the index, among ``size`` prompts, of draw number ``position``: epoch after epoch,
    each in its own random order."""
    epoch, slot = divmod(position, size)
    return _order(size, seed, epoch, *names)[slot]


@lru_cache(maxsize=64)
def _order(n: int, seed: int, epoch: int, *names: int | str) -> tuple[int, ...]:
    return tuple(Rng.of(seed, "data", *names, epoch).permutation(n).tolist())


class Curriculum(Sequence[Prompt]):
    """Holds training prompts and decides itself which of them an iteration draws."""

    prompts: Sequence[Prompt]

    @property
    def measures(self) -> frozenset[str]:
        """Name what ``see`` is to be given of an iteration's answers before ``learn``:
        "diversity", how much those to a prompt differ, 0 to 1; "entropy", of every answer [reward,
        mean entropy of its decisions]."""
        return frozenset()

    @property
    def prompts_per_question(self) -> int:
        """Return how many consecutive prompts of a batch are one question, whose answers are
        compared."""
        return 1

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return self.prompts[index]

    @abstractmethod
    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        """Return ``count`` prompts; the same on all processes, and after a resume."""

    def pick(self, u: float, iteration: int) -> Prompt:
        return self[int(u * len(self))]

    def presented(self, prompt: Prompt, iteration: int) -> Prompt:
        """Return a prompt of the data as this iteration asks it, such as with a hint."""
        return prompt

    def reserved(self, count: int, iteration: int) -> list[Prompt]:
        """Return the prompts that an iteration of ``count`` must include, whoever chooses the
        rest."""
        return []

    @abstractmethod
    def restricted(self, prompts: Sequence[Prompt]) -> Curriculum:
        """Return the same curriculum over some of its prompts, with no history."""

    def shares(self, iteration: int) -> Mapping[str, float]:
        """Return the share of an iteration of each source of a mixture; {}: it is no mixture."""
        return {}

    def copies(self, prompts: Sequence[Prompt], group_size: int, iteration: int) -> Copies:
        """Return how often each prompt of an iteration is answered: ``group_size`` times, or a list
        of numbers with that mean."""
        return group_size

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from the rewards of an iteration's groups; called on all processes alike."""

    def see_update(self, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of an iteration's update, before ``learn``; called on all processes
        alike."""

    def see(self, name: str, values: Mapping[int, Any]) -> None:
        """Receive measurements of prompts, by ``entry``: one of ``measures``, or "drift", how far
        the policy has moved since it last answered; called on all processes alike."""

    def predict_by(self, predict: Callable[[Sequence[Prompt]], list[float]]) -> None:
        """Receive a function that predicts the rewards of prompts by a value model of the policy's
        kind; it must be called on all processes alike."""

    def rescoring(self, iteration: int) -> int:
        """Return how many answers to every prompt to sample after this iteration, for measurement
        only; 0: none."""
        return 0

    def renew(self, outcomes: Sequence[Outcome], diversity: Mapping[int, float]) -> None:
        """Receive the results of such answers to all prompts; called on all processes alike."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned, after a resume."""


class Epochs(Curriculum):
    """Draws plain prompts, epoch after epoch, each in its own random order."""

    def __init__(self, prompts: Sequence[Prompt]):
        self.prompts = prompts

    def batch(self, count: int, iteration: int, seed: int) -> list[Prompt]:
        positions = range(iteration * count, (iteration + 1) * count)
        return [self.prompts[place(position, len(self), seed)] for position in positions]

    def restricted(self, prompts: Sequence[Prompt]) -> Epochs:
        return Epochs(prompts)


def as_curriculum(prompts: Sequence[Prompt]) -> Curriculum:
    """Wrap plain prompts as a curriculum; return a curriculum as it is."""
    return prompts if isinstance(prompts, Curriculum) else Epochs(prompts)


class Outcome(NamedTuple):
    """Holds the rewards of one group: the ``entry`` of its prompt, their mean, whether they are all
    equal, and all that could be scored."""

    entry: int
    mean: float
    flat: bool
    rewards: tuple[float, ...] = ()
