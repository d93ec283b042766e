"""The objective of rows with a text and an image: that of text, with a separate entropy target for
each segment."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.registry import OBJECTIVES
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.objectives.terms import OF_TOKENS, EntropyBonus, Scored
from mmrl.objectives.terms.entropy import measured

Positive = Annotated[float, Gt(0)]


@dataclass(frozen=True)
class Steered:
    """Keeps the entropy at ``target`` nats a token (ReasonGen-R1, Zhang et al. 2025): the loss has
    alpha H, where alpha = sinh(psi), |alpha| <= ``most``, and psi follows H - target after every
    iteration: entropy above the target is penalised, below it rewarded. ``rule`` adam is the
    published one, Adam on psi at ``rate``; plain adds ``rate`` (H - target)."""

    target: Positive
    rate: Positive = 5e-5
    most: Positive = 5e-3
    rule: Literal["adam", "plain"] = "adam"


@dataclass
class Moments:
    """Holds Adam's running means of the gradient and its square, and the number of steps (Kingma
    and Ba 2015, with their constants)."""

    mean: float = 0.0
    square: float = 0.0
    steps: int = 0

    def step(self, gradient: float) -> float:
        """Take in a gradient; return the step at rate 1."""
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean = self.mean / (1 - 0.9**self.steps)
        square = self.square / (1 - 0.999**self.steps)
        return mean / (math.sqrt(square) + 1e-8)


@dataclass
class SteeredEntropy(EntropyBonus):
    """entropy: of all tokens: weight of a bonus, or all its options. steer_text, steer_image:
    entropy targets of the segments; None: no target."""

    steer_text: Steered | None = None
    steer_image: Steered | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = {"text": self.steer_text, "image": self.steer_image}
        self.steered = {kind: target for kind, target in chosen.items() if target is not None}
        if self.steered and (self.options.weight or self.options.target):
            raise UserError(
                "objective.unified: entropy is for all tokens; use it, or steer_text "
                "and steer_image"
            )
        self.psi = dict.fromkeys(self.steered, 0.0)
        self.moments = {kind: Moments() for kind in self.steered}

    def alpha(self, kind: str) -> float:
        """Return the weight in force."""
        target = self.steered[kind]
        return min(max(math.sinh(self.psi[kind]), -target.most), target.most)

    def add(self, loss: Tensor, at: Scored) -> Tensor:
        if self.bonus:
            return super().add(loss, at)
        point = at.point
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(map(self.alpha, self.steered))):
            entropy = measured(at)
        for number, kind in enumerate(("text", "image")):
            segment = (
                point.mask if point.modality is None else point.mask & (point.modality == number)
            )
            if point.modality is None and kind == "image":
                continue
            observe(f"entropy/{kind}", entropy.detach(), segment & point.sampled_mask())
            if kind in self.steered and self.alpha(kind):
                loss = loss + self.alpha(kind) * torch.where(segment, entropy, 0.0)
        return loss

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        super().adapt(iteration, metrics)
        for kind, steered in self.steered.items():
            entropy = metrics.get(f"entropy/{kind}", math.nan)
            if entropy == entropy:
                limit = math.asinh(steered.most)
                excess = entropy - steered.target
                change = self.moments[kind].step(excess) if steered.rule == "adam" else excess
                self.psi[kind] = min(max(self.psi[kind] + steered.rate * change, -limit), limit)
            metrics[f"entropy_weight/{kind}"] = self.alpha(kind)

    def state_dict(self) -> dict[str, Any]:
        moments = {kind: asdict(state) for kind, state in self.moments.items()}
        return super().state_dict() | {"psi": dict(self.psi), "psi_moments": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.psi = {kind: float(state["psi"].get(kind, 0.0)) for kind in self.steered}
        moments = state.get("psi_moments", {})
        self.moments = {kind: Moments(**moments.get(kind, {})) for kind in self.steered}


@OBJECTIVES.register("unified")
class Unified(PolicyGradient):
    """Policy gradient over text and image tokens, with separate entropy targets (T2I-R1).

    Without kinds of decisions all count as text.
    """

    requires = replace(PolicyGradient.requires, decisions="categorical", proportional=False)
    term_types = (*(term for term in OF_TOKENS if term is not EntropyBonus), SteeredEntropy)
