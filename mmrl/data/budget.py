"""Makes data sources that give some prompts more samples than others: exploration budgets."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from annotated_types import Gt, Le

from mmrl.config.options import Count
from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Copies, Prompt
from mmrl.data.curriculum import Around, Source, over, with_entries
from mmrl.data.prompts import Outcome
from mmrl.data.statistics import PromptRecord, PromptStatistics


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
        return outcome._replace(rewards=self.budget.successes(outcome.rewards))

    def copies(self, prompts: Sequence[Prompt], group_size: int, iteration: int) -> Copies:
        records = [self.statistics[prompt["entry"]] for prompt in prompts]
        return self.budget.shares(records, group_size)

    def over(self, prompts: Sequence[Prompt]) -> Budgeted:
        return Budgeted(over(self.inner, prompts), self.budget)


@DATA.register("knapsack")
class Knapsack:
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

    train: Budgeted
    held_out: list[Prompt]

    def __init__(
        self,
        of: Source,
        least: Count = 2,
        most: Count = 64,
        threshold: float | None = 0.5,
        decay: Annotated[float, Gt(0), Le(1)] = 0.5,
        multiple: Count = 1,
    ):
        if not multiple <= least <= most or least % multiple or most % multiple:
            raise UserError(
                f"knapsack: least {least} and most {most} must be multiples of multiple "
                f"{multiple}, least not above most"
            )
        self.least = least
        self.most = most
        self.threshold = threshold
        self.decay = decay
        self.multiple = multiple
        self.train = Budgeted(with_entries(of.train), self)
        self.held_out = list(of.held_out)

    def successes(self, rewards: Sequence[float]) -> tuple[float, ...]:
        """Turn rewards into how much of a success each is, from 0 to 1."""
        if self.threshold is None:
            return tuple(min(max(reward, 0.0), 1.0) for reward in rewards)
        return tuple(float(reward > self.threshold) for reward in rewards)

    def worth(self, p: float, n: int) -> float:
        """Return what n samples of a prompt of success rate p are worth."""
        return (1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2

    def shares(self, records: Sequence[PromptRecord], group_size: int) -> list[int]:
        """Share out ``group_size`` samples a prompt, as far as ``least`` and ``most`` allow."""
        rates = [(r.mean * r.samples + 0.5) / (r.samples + 1) for r in records]
        worths = [partial(self.worth, rate) for rate in rates]
        total = len(records) * group_size
        return allotted(worths, total, min(self.least, group_size), self.most, self.multiple)


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
