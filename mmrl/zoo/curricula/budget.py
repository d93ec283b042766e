"""Makes data sources that give some prompts more samples than others: exploration budgets."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from annotated_types import Gt, Le

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count
from mmrl.core.registry import DATA
from mmrl.core.types import Copies, Prompt
from mmrl.data.base import Outcome
from mmrl.zoo.curricula.curriculum import Around, Source, over, with_entries
from mmrl.zoo.curricula.statistics import PromptRecord, PromptStatistics, successes


class Counted(Around):
    """Draws as ``inner`` does, and keeps statistics of every prompt, in checkpoints."""

    def __init__(self, inner: Sequence[Prompt], statistics: PromptStatistics):
        super().__init__(inner)
        self.statistics = statistics

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        self.statistics.learn([self.as_recorded(outcome) for outcome in outcomes])

    def as_recorded(self, outcome: Outcome) -> Outcome:
        """Change what the statistics take in of an outcome."""
        return outcome

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": self.statistics.state_dict(), "inner": super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.statistics.load_state_dict(state.get("statistics", {}))
        super().load_state_dict(state.get("inner", {}))


class Budgeted(Counted):
    """Draws as ``inner`` does; every prompt gets a part of the iteration's samples by its
    record."""

    def __init__(self, inner: Sequence[Prompt], budget: Knapsack):
        super().__init__(inner, PromptStatistics(budget.decay))
        self.budget = budget

    def as_recorded(self, outcome: Outcome) -> Outcome:
        return outcome._replace(rewards=successes(outcome.rewards, self.budget.threshold))

    def copies(self, prompts: Sequence[Prompt], group_size: int, iteration: int) -> Copies:
        records = [self.statistics[prompt["entry"]] for prompt in prompts]
        return self.budget.shares(records, group_size)

    def over(self, prompts: Sequence[Prompt]) -> Budgeted:
        return Budgeted(over(self.inner, prompts), self.budget)


class Bounded:
    """Keeps what exploration budgets share: how many samples a prompt may have."""

    held_out: list[Prompt]
    name: ClassVar[str]  # in a configuration

    def __init__(self, of: Source, least: int, most: int, multiple: int):
        if not multiple <= least <= most or least % multiple or most % multiple:
            raise UserError(
                f"{type(self).name}: least {least} and most {most} must be multiples of multiple "
                f"{multiple}, least not above most"
            )
        self.least = least
        self.most = most
        self.multiple = multiple
        self.held_out = list(of.held_out)

    def allotted(self, worths: Sequence[Callable[[int], float]], group_size: int) -> list[int]:
        """Share out ``group_size`` samples a prompt where they are worth most."""
        total = len(worths) * group_size
        return allotted(worths, total, min(self.least, group_size), self.most, self.multiple)


@DATA.register("knapsack")
class Knapsack(Bounded):
    """Give every prompt as many samples as are worth most: Knapsack RL's exploration budgets.

    Li et al. 2025, "Knapsack RL: Unlocking Exploration of LLMs via Optimizing Budget Allocation":
    with p the prompt's success rate so far, n samples are worth the chance that their rewards
    differ times what a step can gain, (1 - p^n - (1 - p)^n) p (1 - p)^2; the iteration's
    prompts_per_iteration * group_size samples are shared out so that the sum is largest. The worth
    grows ever more slowly with n, so giving each sample where it adds most is exact. p is
    (successes + 1/2) / (answers + 1): prompts not seen yet, or so far all right or all wrong, keep
    a share (our reading of the paper's fall-back).

    of: the data source. least, most: samples of a prompt. threshold: a reward above it is a
    success; null: the reward itself, in [0, 1], is how much of a success it is. decay: what is left
    of the weight of earlier answers at every new visit. multiple: counts are multiples of it, as
    trees need.
    """

    name = "knapsack"
    train: Budgeted

    def __init__(
        self,
        of: Source,
        least: Count = 2,
        most: Count = 64,
        threshold: float | None = 0.5,
        decay: Annotated[float, Gt(0), Le(1)] = 0.5,
        multiple: Count = 1,
    ):
        super().__init__(of, least, most, multiple)
        self.threshold = threshold
        self.decay = decay
        self.train = Budgeted(with_entries(of.train), self)

    def worth(self, p: float, n: int) -> float:
        """Return what n samples of a prompt of success rate p are worth."""
        return (1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2

    def shares(self, records: Sequence[PromptRecord], group_size: int) -> list[int]:
        """Share out ``group_size`` samples a prompt, as far as ``least`` and ``most`` allow."""
        rates = [(r.mean * r.samples + 0.5) / (r.samples + 1) for r in records]
        return self.allotted([partial(self.worth, rate) for rate in rates], group_size)


class Grown(Counted):
    """Draws as ``inner`` does; prompts whose last groups were flat get more of the samples."""

    def __init__(self, inner: Sequence[Prompt], growth: AdaptiveGroupSize):
        super().__init__(inner, PromptStatistics())
        self.growth = growth
        self.flat_visits: dict[int, int] = {}  # visits in a row with equal rewards, by entry

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        for outcome in outcomes:
            if outcome.rewards:
                count = self.flat_visits.get(outcome.entry, 0) + 1
                self.flat_visits[outcome.entry] = count if outcome.flat else 0

    def copies(self, prompts: Sequence[Prompt], group_size: int, iteration: int) -> Copies:
        flat = [self.flat_visits.get(prompt["entry"], 0) for prompt in prompts]
        return self.growth.sizes(flat, group_size)

    def state_dict(self) -> dict[str, Any]:
        flat = {str(entry): count for entry, count in self.flat_visits.items() if count}
        return super().state_dict() | {"flat": flat}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.flat_visits = {int(entry): n for entry, n in state.get("flat", {}).items()}

    def over(self, prompts: Sequence[Prompt]) -> Grown:
        return Grown(over(self.inner, prompts), self.growth)


@DATA.register("adaptive_group_size")
class AdaptiveGroupSize(Bounded):
    """Give prompts larger groups where their last ones were flat: GRPO with an adaptive G.

    A prompt whose last k groups had equal rewards wants growth^k times the samples of one whose
    last group differed; the iteration's prompts_per_iteration * group_size samples are shared out
    in that ratio, from ``least`` to ``most`` (our reading: the iteration costs the same).

    of: the data source. growth: of the group with every flat visit in a row. least, most: samples
    of a prompt. multiple: counts are multiples of it, as trees need.
    """

    name = "adaptive_group_size"
    train: Grown

    def __init__(
        self,
        of: Source,
        growth: Annotated[float, Gt(1)] = 2.0,
        least: Count = 4,
        most: Count = 64,
        multiple: Count = 1,
    ):
        super().__init__(of, least, most, multiple)
        self.growth = growth
        self.train = Grown(with_entries(of.train), self)

    def sizes(self, flat: Sequence[int], group_size: int) -> list[int]:
        """Share out ``group_size`` samples a prompt in the ratio of growth^k."""
        # a weight times the harmonic number of n is concave in n, and best where n is in its ratio
        worths = [partial(harmonic, self.growth ** min(visits, 30)) for visits in flat]
        return self.allotted(worths, group_size)


def harmonic(weight: float, n: int) -> float:
    """Return a worth by which ``allotted`` shares out in the ratio of the weights."""
    return weight * sum(1 / k for k in range(1, n + 1))


def allotted(
    worths: Sequence[Callable[[int], float]], total: int, least: int, most: int, multiple: int = 1
) -> list[int]:
    """Share out ``total`` samples so that the sum of the concave ``worths`` is largest: each next
    ``multiple`` of them where it adds most, the first of equals first. Exact for concave worths.

    What ``most`` leaves over is shared out evenly beyond it, so that the sum is ``total``.
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
