"""Statistics of every prompt's rewards, for data sources that choose prompts or group sizes by
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from mmrl.data.base import Outcome


@dataclass(frozen=True)
class Forgetting:
    """Tracks a success rate alpha / (alpha + beta) that forgets with the policy (SPO's tracker).

    rho = 2^(-D / half) within [least, most], D how far the policy has moved since the last visit;
    alpha <- rho alpha + r and beta <- rho beta + 1 - r of every answer's r in [0, 1].
    """

    half: float
    least: float
    most: float

    def begun(self, rewards: Sequence[float] | None) -> list[float]:
        """Return alpha and beta before the first visit, from a reference's rewards if there are
        any, weighted as many answers as the strongest forgetting keeps."""
        if not rewards:
            return [0.5, 0.5]
        count = 1 / (1 - self.least)
        right = (sum(rewards) + 0.5) / (len(rewards) + 1)
        return [count * right, count * (1 - right)]

    def visited(
        self, counts: Sequence[float], rewards: Sequence[float], moved: float
    ) -> list[float]:
        """Return alpha and beta after a visit whose answers earned ``rewards``."""
        alpha, beta = counts
        rho = min(max(2 ** (-moved / self.half), self.least), self.most)
        right = sum(rewards)
        return [rho * alpha + right, rho * beta + len(rewards) - right]


@dataclass
class PromptRecord:
    """Summarises the rewards of one prompt, over all its visits so far."""

    visits: int = 0  # iterations in which it was answered and scored
    samples: float = 0.0  # scored answers, with their decayed weights
    mean: float = 0.0  # of their rewards
    square: float = 0.0  # mean of the squares
    advantage: float = (
        0.0  # mean |A| of the last visit, A = (r - mean) / std; 0 where all are equal
    )
    iteration: int = -1  # of the last visit
    rewards: tuple[float, ...] = ()  # of the last visit
    diversity: float = 0.0  # of its answers, 0 to 1, where a data source wants it

    @property
    def variance(self) -> float:
        """Return the population variance of the rewards."""
        return max(self.square - self.mean**2, 0.0)


@dataclass
class PromptStatistics:
    """Keeps a record of every prompt by its ``entry``, the same on all processes, in checkpoints.

    ``decay``: factor on the weight of earlier answers at every visit; 1: no decay. ``drift``:
    factor at every iteration without a visit.
    """

    decay: float = 1.0
    records: dict[int, PromptRecord] = field(default_factory=dict)
    iteration: int = 0  # that of the next outcomes
    drift: float = 1.0

    def __getitem__(self, entry: int) -> PromptRecord:
        return self.records.get(entry) or PromptRecord()

    def weight(self, entry: int) -> float:
        """Return the total decayed weight of a prompt's answers."""
        record = self[entry]
        return record.samples * self._left(record)

    def see_diversity(self, values: Mapping[int, float]) -> None:
        """Record how much the answers to prompts differ, by entry."""
        for entry, value in values.items():
            self.records.setdefault(entry, PromptRecord()).diversity = value

    def learn(self, outcomes: Iterable[Outcome]) -> None:
        """Record the outcomes of an iteration. A prompt that was drawn twice is visited twice."""
        for outcome in outcomes:
            if outcome.rewards:
                record = self.records.setdefault(outcome.entry, PromptRecord())
                self._visit(record, outcome.rewards)
        self.iteration += 1

    def renew(self, outcomes: Iterable[Outcome]) -> None:
        """Replace the records of prompts by the rewards of new answers."""
        for outcome in outcomes:
            if outcome.rewards:
                earlier = self.records.get(outcome.entry) or PromptRecord()
                record = PromptRecord(visits=earlier.visits, diversity=earlier.diversity)
                self._visit(record, outcome.rewards)
                self.records[outcome.entry] = record

    def _visit(self, record: PromptRecord, rewards: Sequence[float]) -> None:
        before = record.samples * self.decay * self._left(record)
        record.samples = before + len(rewards)
        for name, power in (("mean", 1), ("square", 2)):
            level = sum(reward**power for reward in rewards)
            setattr(record, name, (before * getattr(record, name) + level) / record.samples)
        record.visits += 1
        record.iteration = self.iteration
        record.rewards = tuple(rewards)
        record.advantage = mean_advantage(rewards)

    def _left(self, record: PromptRecord) -> float:
        return self.drift ** max(self.iteration - 1 - record.iteration, 0)

    def state_dict(self) -> dict[str, Any]:
        records = {str(entry): asdict(record) for entry, record in self.records.items()}
        return {"iteration": self.iteration, "records": records}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.iteration = state.get("iteration", 0)
        self.records = {
            int(entry): PromptRecord(**{**record, "rewards": tuple(record["rewards"])})
            for entry, record in state.get("records", {}).items()
        }


def mean_advantage(rewards: Sequence[float]) -> float:
    """Return the mean |A| of a group, A = (r - mean) / std (population); 0 where all are equal."""
    mean = fmean(rewards)
    std = fmean([(reward - mean) ** 2 for reward in rewards]) ** 0.5
    return fmean([abs(reward - mean) for reward in rewards]) / std if std > 1e-12 else 0.0


def successes(rewards: Sequence[float], threshold: float | None) -> tuple[float, ...]:
    """Turn rewards into degrees of success from 0 to 1: whether each is above the threshold; None:
    the reward itself."""
    if threshold is None:
        return tuple(min(max(reward, 0.0), 1.0) for reward in rewards)
    return tuple(float(reward > threshold) for reward in rewards)
