"""Data sources that give some prompts more samples than others: exploration budgets."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from annotated_types import Gt

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count
from mmrl.core.registry import DATA
from mmrl.core.types import Copies, Prompt
from mmrl.data.base import Outcome
from mmrl.zoo.curricula.drawing import Around, Counted, Portion, Source, keyed_by_entry
from mmrl.zoo.curricula.statistics import successes


class Budget(Around, ABC):
    """Allocates the samples of an iteration to the prompts where they are worth most."""

    name: ClassVar[str]  # in a configuration
    least: int  # samples of a prompt
    most: int
    multiple: int  # counts are multiples of it

    def __post_init__(self, of: Source) -> None:
        least, most, multiple = self.least, self.most, self.multiple
        if not multiple <= least <= most or least % multiple or most % multiple:
            raise UserError(
                f"{self.name}: least {least} and most {most} must be multiples of multiple "
                f"{multiple}, least not above most"
            )
        super().__post_init__(of)

    @abstractmethod
    def worth(self, prompt: Prompt) -> Callable[[int], float]:
        """Return the value of n samples of a prompt, concave in n."""

    def copies(self, prompts: Sequence[Prompt], group_size: int, iteration: int) -> Copies:
        worths = [self.worth(prompt) for prompt in prompts]
        total = len(worths) * group_size
        return allotted(worths, total, min(self.least, group_size), self.most, self.multiple)


@DATA.register("knapsack")
@dataclass(eq=False)
class Knapsack(Budget, Counted):
    """Allocate samples to prompts by their value: Knapsack RL's exploration budgets.

    Li et al. 2025, "Knapsack RL: Unlocking Exploration of LLMs via Optimizing Budget Allocation":
    with p the prompt's success rate so far, the value of n samples is the chance that their rewards
    differ times the gain of a step, (1 - p^n - (1 - p)^n) p (1 - p)^2; the iteration's
    prompts_per_iteration * group_size samples maximise the sum. The value is concave in n, so the
    greedy allocation is exact. p is (successes + 1/2) / (answers + 1): prompts not seen yet, or so
    far all right or all wrong, keep a share (our reading of the paper's fall-back).

    of: the data source. least, most: samples of a prompt. threshold: a reward above it is a
    success; null: the reward, in [0, 1], is the degree of success. decay: factor on the weight of
    earlier answers at every visit. multiple: counts are multiples of it, as trees need.
    """

    name = "knapsack"
    least: Count = 2
    most: Count = 64
    threshold: float | None = 0.5
    decay: Portion = 0.5
    multiple: Count = 1

    def graded(self, rewards: Sequence[float]) -> tuple[float, ...]:
        return successes(rewards, self.threshold)

    def worth(self, prompt: Prompt) -> Callable[[int], float]:
        record = self.statistics[prompt["entry"]]
        p = (record.mean * record.samples + 0.5) / (record.samples + 1)
        return lambda n: (1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2


@DATA.register("adaptive_group_size")
@dataclass(eq=False)
class AdaptiveGroupSize(Budget):
    """Give prompts larger groups where their last ones were flat: GRPO with an adaptive G.

    A prompt whose last k groups had equal rewards gets growth^k times the samples of one whose last
    group differed; the iteration's prompts_per_iteration * group_size samples are allocated in that
    ratio, from ``least`` to ``most`` (our reading: the iteration costs the same).

    of: the data source. growth: factor on the group size per consecutive flat visit. least, most:
    samples of a prompt. multiple: counts are multiples of it, as trees need.
    """

    name = "adaptive_group_size"
    growth: Annotated[float, Gt(1)] = 2.0
    least: Count = 4
    most: Count = 64
    multiple: Count = 1

    memory = {"flat": keyed_by_entry}

    def begin(self, inner: Sequence[Prompt]) -> None:
        super().begin(inner)
        self.flat: dict[int, int] = {}  # consecutive visits with equal rewards, by entry

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        for outcome in outcomes:
            if outcome.rewards:
                visits = self.flat.get(outcome.entry, 0) + 1
                self.flat[outcome.entry] = visits if outcome.flat else 0

    def worth(self, prompt: Prompt) -> Callable[[int], float]:
        # a weight times the harmonic number of n is concave in n, and best where n is in its ratio
        visits = self.flat.get(prompt["entry"], 0)
        return partial(harmonic, self.growth ** min(visits, 30))


def harmonic(weight: float, n: int) -> float:
    """Return a value function by which ``allotted`` allocates in the ratio of the weights."""
    return weight * sum(1 / k for k in range(1, n + 1))


def allotted(
    worths: Sequence[Callable[[int], float]], total: int, least: int, most: int, multiple: int = 1
) -> list[int]:
    """Allocate ``total`` samples greedily to maximise the sum of ``worths``: each next ``multiple``
    of them where it adds most, the first of equals first. Exact for concave worths.

    What is left at ``most`` is spread evenly beyond it, so that the sum is ``total``.
    """
    counts = [least] * len(worths)
    queue = [(-(worth(least + multiple) - worth(least)), i) for i, worth in enumerate(worths)]
    heapq.heapify(queue)
    for _ in range((total - sum(counts)) // multiple):
        if not queue:
            smallest = min(range(len(counts)), key=lambda i: counts[i])
            counts[smallest] += multiple
            continue
        _, i = heapq.heappop(queue)
        counts[i] += multiple
        if counts[i] + multiple <= most:
            rise = worths[i](counts[i] + multiple) - worths[i](counts[i])
            heapq.heappush(queue, (-rise, i))
    return counts
