"""Makes the data source that draws prompts by their tracked success rates: single-stream SPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.base import Outcome
from mmrl.zoo.curricula.curriculum import Source, over, with_entries
from mmrl.zoo.curricula.selection import Chosen, Unrenewed, best, uniform
from mmrl.zoo.curricula.statistics import Forgetting, PromptStatistics
from mmrl.zoo.curricula.subsets import read_curves
from samplers.noise import Rng


class Tracked(Chosen):
    """Draws by a tracker of every prompt's success rate, which is in checkpoints."""

    def __init__(self, inner: Sequence[Prompt], rule: SingleStreamData):
        super().__init__(inner, rule)
        self.tracker = rule
        self.counts: dict[int, list[float]] = {}  # alpha and beta, by entry
        self.drifts: dict[int, float] = {}  # of the prompts of this iteration, nats

    def over(self, prompts: Sequence[Prompt]) -> Tracked:
        return Tracked(over(self.inner, prompts), self.tracker)

    def rate(self, entry: int) -> float:
        """Return the tracked success rate of a prompt."""
        alpha, beta = self.counts.get(entry) or self.tracker.begun(entry)
        return alpha / (alpha + beta)

    def see(self, name: str, values: Mapping[int, Any]) -> None:
        super().see(name, values)
        if name == "drift":
            self.drifts |= values

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        for outcome in outcomes:
            if outcome.rewards:
                counts = self.counts.get(outcome.entry) or self.tracker.begun(outcome.entry)
                rewards = self.tracker.rewards(outcome.rewards)
                moved = self.drifts.get(outcome.entry, 0.0)
                forgetting = self.tracker.forgetting
                self.counts[outcome.entry] = forgetting.visited(counts, rewards, moved)
        self.drifts = {}

    def state_dict(self) -> dict[str, Any]:
        counts = {str(entry): list(counts) for entry, counts in self.counts.items()}
        return super().state_dict() | {"counts": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.counts = {int(entry): list(counts) for entry, counts in state["counts"].items()}


@DATA.register("single_stream")
class SingleStreamData(Unrenewed):
    """Draw prompts whose tracked success rate v is uncertain: SPO's prioritised sampling.

    Xu and Ding 2025, "Single-stream policy optimization": prompts are drawn without repeats with
    weights sqrt(v (1 - v)) + explore, v = alpha / (alpha + beta) by the tracker of the advantage
    ``single_stream``: alpha <- rho alpha + r, beta <- rho beta + 1 - r, rho = 2^(-D / half) within
    [forget_min, forget_max]. D, how far the policy has moved since the prompt's last visit, is what
    the stage ``policy_drift`` measures; without it 0, so that rho = forget_max. Give the two the
    same options.

    of: the data source. explore: added to every weight. candidates: of every prompt that is asked,
    drawn as ``of`` does, among which the weights choose, as in the published code; null: all
    prompts. low, high: bounds of the reward, brought to [0, 1]. half: the D, nats, at which half is
    forgotten. forget_min, forget_max: bounds of rho. path: rewards of a reference, as
    mmrl.apps.prepare.reference_rewards or ``recorded`` write them, that begin alpha and beta;
    null: 1/2 each.
    """

    train: Tracked
    held_out: list[Prompt]
    measures: frozenset[str] = frozenset()

    def __init__(
        self,
        of: Source,
        explore: Annotated[float, Gt(0)] = 0.05,
        candidates: Annotated[float, Ge(1)] | None = None,
        low: float = 0.0,
        high: float = 1.0,
        half: Annotated[float, Gt(0)] = 0.06,
        forget_min: Annotated[float, Gt(0), Lt(1)] = 0.875,
        forget_max: Annotated[float, Gt(0), Lt(1)] = 0.96,
        path: Path | None = None,
    ):
        if forget_min > forget_max:
            raise UserError(
                f"single_stream: forget_min = {forget_min} must not be above forget_max = "
                f"{forget_max}"
            )
        if low >= high:
            raise UserError(f"single_stream: low = {low} must be below high = {high}")
        self.explore = explore
        self.multiple = candidates
        self.low = low
        self.high = high
        self.forgetting = Forgetting(half, forget_min, forget_max)
        inner = with_entries(of.train)
        curves = {} if path is None else read_curves(path, inner)
        self.references = {entry: sum(curve, []) for entry, curve in curves.items()}
        self.train = Tracked(inner, self)
        self.held_out = list(of.held_out)

    def statistics(self) -> PromptStatistics:
        return PromptStatistics()

    def rewards(self, rewards: Sequence[float]) -> tuple[float, ...]:
        scaled = [(reward - self.low) / (self.high - self.low) for reward in rewards]
        return tuple(min(max(reward, 0.0), 1.0) for reward in scaled)

    def begun(self, entry: int) -> list[float]:
        """Return alpha and beta of a prompt before its first visit."""
        return self.forgetting.begun(self.rewards(self.references.get(entry, ())))

    def choose(self, data: Chosen, count: int, iteration: int, seed: int) -> list[Prompt]:
        assert isinstance(data, Tracked)
        prompts: Sequence[Prompt] = data.prompts
        if self.multiple is not None:
            prompts = data.candidates(int(self.multiple * count), iteration, seed)
        rates = torch.tensor([data.rate(p["entry"]) for p in prompts], dtype=torch.float64)
        weights = (rates * (1 - rates)).clamp(min=0).sqrt() + self.explore
        # the largest of u^(1 / w) are a sample by weights without repeats (Efraimidis, Spirakis)
        keys = uniform(prompts, Rng.of(seed, "single_stream", iteration)).log() / weights
        return best(prompts, keys.tolist(), count)
