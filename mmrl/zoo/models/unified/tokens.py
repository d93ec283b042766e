"""One distribution for objectives over token sequences whose parts come from different heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core.divergences import REVERSE, Divergence
from mmrl.core.types import Point
from mmrl.core.weights import Weights
from mmrl.policies.base import Policy
from mmrl.policies.scores import Scored
from mmrl.policies.tokens import AnswerTokens, ToldTokens
from samplers.warp import Warp


class Head:
    """Describes one head of a policy: how it is warped, and how its passes are called (``prefix``
    of the net's methods)."""

    def __init__(self, policy: Policy, prefix: str, warp: Warp):
        self.policy = policy
        self.prefix = prefix
        self.warp = warp
        self.entropies = False

    @property
    def weights(self) -> Weights:
        return self.policy.weights

    def active(self) -> Callable[..., Any]:
        net = self.policy.active()
        return lambda work, *given: net(self.prefix + work, *given)

    def tokens(self, point: Point, where: Tensor, scored: tuple[Tensor, Scored]) -> AnswerTokens:
        """Make the distribution at the decisions ``where`` [B, L], from what the net's ``score``
        returned for them."""
        return AnswerTokens(self, point, where, *scored)


class SegmentTokens:
    """Joins independent categorical draws at L positions of B rows, each position of one of the
    heads; [B, L]."""

    def __init__(self, parts: Sequence[AnswerTokens]):
        self.parts = parts

    def log_prob(self, ids: Tensor) -> Tensor:
        return sum((part.log_prob(ids) for part in self.parts), torch.zeros(()))

    def entropy(self) -> Tensor:
        return sum((part.entropy() for part in self.parts), torch.zeros(()))

    def kl(self, reference: SegmentTokens | ToldSegments, by: Divergence = REVERSE) -> Tensor:
        """Compute the exact KL over each head's whole vocabulary, at the temperature of
        sampling."""
        pairs = zip(self.parts, reference.parts, strict=True)
        # a head without decisions in these rows is asked too, as processes that share weights ask
        divergences = [part.kl(two, by) for part, two in pairs if two]
        return sum(divergences, torch.zeros(()))

    def asks(self) -> list[Any]:
        return [ask for part in self.parts for ask in part.asks()]

    def shown(self, asks: list[Any]) -> dict[str, Tensor]:
        return {
            f"{i}.{name}": value
            for i, (part, ask) in enumerate(zip(self.parts, asks, strict=True))
            if len(part.hidden)
            for name, value in part.shown([ask]).items()
        }

    def reference(self, shown: dict[str, Tensor]) -> ToldSegments:
        return ToldSegments(
            [
                part.reference({"logprobs": shown[f"{i}.logprobs"]}) if len(part.hidden) else None
                for i, part in enumerate(self.parts)
            ]
        )


@dataclass(frozen=True)
class ToldSegments:
    """Holds a remote model's distributions of the tokens of each head; None: it has none."""

    parts: Sequence[ToldTokens | None]
