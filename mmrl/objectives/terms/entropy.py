"""The entropy bonus of models that write tokens, whose weight may adapt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.core.distributions import Gaussian
from mmrl.core.metrics import observe
from mmrl.objectives.terms.base import Scored, Term

Positive = Annotated[float, Gt(0)]


@dataclass(frozen=True)
class Entropy:
    """Entropy bonus: the loss minus weight times the entropy of the token's distribution.

    With ``target`` (nats a token) the weight adapts (He et al. 2025, Skywork-OR1, section 4): after
    every iteration it rises by ``step`` if the mean entropy was below the target and falls by it
    otherwise, within [low, high]; and it is 0 for as long as the entropy is above the target.

    weight: of the bonus, or what it starts with. target: nats a token below which there is a bonus;
    null: always. step: change of the weight an iteration. low, high: bounds of the weight.
    """

    weight: Annotated[float, Ge(0)] = 0.0
    target: Positive | None = None
    step: Positive = 5e-3
    low: Annotated[float, Ge(0)] = 0.0
    high: Positive = 1.0


@dataclass
class EntropyBonus(Term):
    """entropy: of tokens: weight of a bonus, or all its options."""

    entropy: Annotated[float, Ge(0)] | Entropy = 0.0

    of = "tokens"
    instead: ClassVar = {
        "entropy": "the noise of a step is not trained, nor is its entropy: leave it out"
    }

    def __post_init__(self) -> None:
        chosen = self.entropy
        self.options = chosen if isinstance(chosen, Entropy) else Entropy(weight=chosen)
        self.entropy = self.options
        # the weight in force, and the controller's state
        self.bonus = self.options.weight if self.options.target is None else 0.0
        self.controlled = self.options.weight

    def chosen(self) -> list[str]:
        return ["entropy"] if self.options != Entropy() else []

    def active(self) -> bool:
        return True  # the entropy is always measured

    def moves_all(self) -> bool:
        return bool(self.chosen())

    def add(self, loss: Tensor, at: Scored) -> Tensor:
        if isinstance(at.dist, Gaussian):
            return loss
        if self.bonus:
            return loss - self.bonus * measured(at)
        with torch.no_grad():
            measured(at)
        return loss

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        chosen = self.options
        entropy = metrics.get("entropy", float("nan"))
        if chosen.target is None or entropy != entropy:
            return
        low = entropy < chosen.target
        self.controlled = min(
            max(self.controlled + (chosen.step if low else -chosen.step), chosen.low), chosen.high
        )
        self.bonus = self.controlled if entropy <= chosen.target else 0.0
        metrics["entropy_weight"] = self.bonus

    def state_dict(self) -> dict[str, Any]:
        return {"bonus": self.bonus, "controlled": self.controlled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bonus = state["bonus"]
        self.controlled = state["controlled"]


def measured(at: Scored) -> Tensor:
    """Return the entropies [B, L], and log their mean."""
    entropy = torch.where(at.point.mask, at.dist.entropy(), 0.0)
    observe("entropy", entropy, at.point.sampled_mask())
    return entropy
