"""The data source that draws prompts by their tracked success rates: single-stream SPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.base import Outcome
from mmrl.zoo.curricula.drawing import Chosen, Source, by_weight, keyed_by_entry
from mmrl.zoo.curricula.statistics import Forgetting
from mmrl.zoo.curricula.subsets import read_curves
from samplers.noise import Rng


@DATA.register("single_stream")
@dataclass(eq=False)
class SingleStreamData(Chosen):
    """Draw prompts whose tracked success rate v is uncertain: SPO's prioritised sampling.

    Xu and Ding 2025, "Single-stream policy optimization": prompts are drawn without replacement
    with weights sqrt(v (1 - v)) + explore, v = alpha / (alpha + beta) by the tracker of the
    advantage ``single_stream``: alpha <- rho alpha + r, beta <- rho beta + 1 - r, rho = 2^(-D /
    half) within [forget_min, forget_max]. D, how far the policy has moved since the prompt's last
    visit, is measured by the stage ``policy_drift``; without it D is 0, so that rho = forget_max.
    Give data source and advantage the same options.

    of: the data source. explore: added to every weight. candidates: per prompt asked, drawn as
    ``of`` does, among which the weights choose, as in the published code; null: all prompts. low,
    high: bounds of the reward, mapped to [0, 1]. half: the D, nats, at which half is forgotten.
    forget_min, forget_max: bounds of rho. path: rewards of a reference, as written by
    mmrl.apps.prepare.reference_rewards or ``recorded``, from which alpha and beta start; null: 1/2
    each.
    """

    name = "single_stream"
    explore: Annotated[float, Gt(0)] = 0.05
    candidates: Annotated[float, Ge(1)] | None = None
    low: float = 0.0
    high: float = 1.0
    half: Annotated[float, Gt(0)] = 0.06
    forget_min: Annotated[float, Gt(0), Lt(1)] = 0.875
    forget_max: Annotated[float, Gt(0), Lt(1)] = 0.96
    path: Path | None = None

    memory = {"counts": keyed_by_entry}

    def __post_init__(self, of: Source) -> None:
        if self.forget_min > self.forget_max:
            raise UserError(
                f"single_stream: forget_min = {self.forget_min} must not be above forget_max = "
                f"{self.forget_max}"
            )
        if self.low >= self.high:
            raise UserError(f"single_stream: low = {self.low} must be below high = {self.high}")
        super().__post_init__(of)
        self.forgetting = Forgetting(self.half, self.forget_min, self.forget_max)
        curves = {} if self.path is None else read_curves(self.path, self.prompts)
        self.references = {entry: sum(curve, []) for entry, curve in curves.items()}

    def begin(self, inner: Sequence[Prompt]) -> None:
        super().begin(inner)
        self.counts: dict[int, list[float]] = {}  # alpha and beta, by entry
        self.drifts: dict[int, float] = {}  # of the prompts of this iteration, nats

    def graded(self, rewards: Sequence[float]) -> tuple[float, ...]:
        scaled = [(reward - self.low) / (self.high - self.low) for reward in rewards]
        return tuple(min(max(reward, 0.0), 1.0) for reward in scaled)

    def tracked(self, entry: int) -> list[float]:
        """Return alpha and beta of a prompt, before its first visit those of its references."""
        reference = self.graded(self.references.get(entry, ()))
        return self.counts.get(entry) or self.forgetting.begun(reference)

    def see(self, name: str, values: Mapping[int, Any]) -> None:
        super().see(name, values)
        if name == "drift":
            self.drifts |= values

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        super().learn(outcomes)
        for outcome in outcomes:
            if outcome.rewards:
                rewards, moved = self.graded(outcome.rewards), self.drifts.get(outcome.entry, 0.0)
                counts = self.forgetting.visited(self.tracked(outcome.entry), rewards, moved)
                self.counts[outcome.entry] = counts
        self.drifts = {}

    def rate(self, entry: int) -> float:
        """Return the tracked success rate of a prompt."""
        alpha, beta = self.tracked(entry)
        return alpha / (alpha + beta)

    def score(self, prompts: Sequence[Prompt], rng: Rng) -> Sequence[float]:
        rates = torch.tensor([self.rate(p["entry"]) for p in prompts], dtype=torch.float64)
        weights = (rates * (1 - rates)).clamp(min=0).sqrt() + self.explore
        return by_weight(prompts, weights, rng)
