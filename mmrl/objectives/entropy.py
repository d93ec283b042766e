"""Chooses the entropy bonus of models that write tokens, whose weight may adapt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

Positive = Annotated[float, Gt(0)]


@dataclass(frozen=True)
class Entropy:
    """Chooses an entropy bonus: the loss minus weight times the entropy of the token's
    distribution.

    With ``target`` (nats a token) the weight adapts (He et al. 2025, Skywork-OR1, section 4): after
    every iteration it rises by ``step`` if the mean entropy was below the target and falls by it
    otherwise, within [low, high]; and it is 0 for as long as the entropy is above the target.
    """

    weight: Annotated[float, Ge(0)] = 0.0
    target: Positive | None = None
    step: Positive = 5e-3
    low: Annotated[float, Ge(0)] = 0.0
    high: Positive = 1.0
