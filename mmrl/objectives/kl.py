"""How far a policy has gone from the reference: KL(policy || reference) and its estimators from the
sampled decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError

KLForm = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "exact", "flow_grpo"]
# verl's bounds: of the log-ratio, and of k3
FAR = 20.0
MOST = 10.0


@dataclass(frozen=True)
class KL:
    """Add the KL to the reference to the loss, or take it off the reward.

    weight: of the term. form: estimator from the sampled decision, with u = log ref - log p: k1 =
    -u, k2 = u^2 / 2, k3 = e^u - u - 1 (Schulman 2020), abs = |u|; a + has the value of its
    estimator and k2's gradient, which is that of the KL (verl); exact is the KL of the two
    distributions, over the vocabulary or of two Gaussians; flow_grpo is that of Gaussians times the
    step length, as Flow-GRPO publishes it; null: exact for steps, k3 for tokens. corrected: times
    the ratio to the sampling policy, which makes the gradient of k3 unbiased. bounded: verl's
    bounds on u (20) and k3 (10). where: "loss", or "reward": k1 of the sampled sequence is taken
    off its reward (RLOO, REINFORCE++), and the form is k1. start, over: the weight goes from start
    to weight in so many iterations, on a line (dynamic KL, as in OThink-MR1, whose schedule is its
    own).
    """

    weight: Annotated[float, Ge(0)] = 0.0
    form: KLForm | None = None
    corrected: bool = False
    bounded: bool = False
    where: Literal["loss", "reward"] = "loss"
    start: Annotated[float, Ge(0)] = 0.0
    over: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise UserError(f"kl: weight must not be negative, it is {self.weight}")

    def at(self, iteration: int) -> float:
        """The weight in force."""
        return (
            self.weight
            if iteration >= self.over
            else self.start + (self.weight - self.start) * iteration / self.over
        )


def estimate(logp: Tensor, ref: Tensor, form: KLForm, bounded: bool = False) -> Tensor:
    """[B, L] an estimator from the log-probs [B, L] of the sampled tokens."""
    if form in ("k1+", "k3+"):
        value = estimate(logp, ref, "k1" if form == "k1+" else "k3", bounded)
        slope = estimate(logp, ref, "k2", bounded)
        return slope - slope.detach() + value.detach()
    u = ref - logp
    if form == "k1":
        return -u
    if form == "abs":
        return u.abs()
    if form == "k2":
        return u.square() / 2
    u = u.clamp(-FAR, FAR) if bounded else u
    k3 = torch.expm1(u) - u
    return k3.clamp(-MOST, MOST) if bounded else k3
