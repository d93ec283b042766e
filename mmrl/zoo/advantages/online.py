"""Adapts advantages while training: scales follow the rewards, weights follow the weakest."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from mmrl.advantages.group import group
from mmrl.advantages.groups import finished, measured
from mmrl.advantages.normalise import moments
from mmrl.core.distributed import all_sum
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Advantage, Rewards, Rollout

Inner = Annotated[Advantage, ADVANTAGES]


@ADVANTAGES.register("running")
class Running:
    """Scale each reward by its running mean and standard deviation, then apply another advantage.

    Brings rewards to a common scale before they are weighted and added, without comparing within
    groups. ``decay``: of the running mean and mean square (0: this iteration's only), corrected for
    their start at zero, over all processes; ``limit``: normalised rewards are clipped there. An
    iteration in which a reward failed for all samples leaves its moments as they are.

    base: the advantage after it. eps: added to the std.
    """

    def __init__(
        self,
        base: Inner = group,
        decay: Annotated[float, Ge(0), Lt(1)] = 0.9,
        limit: Annotated[float, Gt(0)] | None = None,
        eps: Annotated[float, Gt(0)] = 1e-6,
    ):
        self.base = base
        self.decay = decay
        self.limit = limit
        self.eps = eps
        self.sums: dict[str, list[float]] = {}  # name -> decayed mean, mean square, weight

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return the inner advantage, [B, 1] or [B, K]; advance the running moments."""
        double, _ = measured(rewards, rollout)
        scaled = {name: self._scaled(name, x) for name, x in double.items()}
        return as_given(self.base(Rewards(scaled, double.weights), rollout), rewards)

    def _scaled(self, name: str, x: Tensor) -> Tensor:
        if not somewhere(x.isfinite()):
            return x
        mean, variance = (float(y) for y in moments(x, x.isfinite()))
        old = self.sums.get(name, [0.0, 0.0, 0.0])
        new = [mean, variance + mean**2, 1.0]
        self.sums[name] = [
            self.decay * a + (1 - self.decay) * b for a, b in zip(old, new, strict=True)
        ]
        first, second, weight = self.sums[name]
        mean = first / weight
        square = second / weight
        scaled: Tensor = (x - mean) / (max(square - mean**2, 0.0) ** 0.5 + self.eps)
        return scaled if self.limit is None else scaled.clamp(-self.limit, self.limit)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = {name: list(values) for name, values in state["sums"].items()}


@ADVANTAGES.register("maxmin")
class MaxMin:
    """Train on the reward with the lowest current mean: max-min over rewards.

    MaxMin-RLHF (Chakraborty et al. 2024, arXiv:2402.08925, algorithm 1): every iteration optimises
    only the reward with the lowest mean over all samples. With ``rate``, weights change smoothly
    instead (multiplicative weights, w_i proportional to w_i exp(-rate mean_i)), a dynamic weighting
    of rewards. The rewards must be on one scale, such as 0..1; their configured weights multiply
    the means. ``base``: the advantage of the weighted sum. An iteration in which a reward failed
    for all samples trains nothing and leaves the weights as they are.

    rate: of the weights; null: the lowest alone.
    """

    def __init__(self, base: Inner = group, rate: Annotated[float, Gt(0)] | None = None):
        self.base = base
        self.rate = rate
        self.log: dict[str, float] = {}  # logarithms of the weights

    def __call__(self, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
        """Return the inner advantage, [B, 1] or [B, K]; advance the weights."""
        double, groups = measured(rewards, rollout)
        if not somewhere(groups.present):  # no reward has a value, so none is the lowest
            return as_given(
                self.base(torch.full_like(next(iter(double.values())), torch.nan), rollout), rewards
            )
        means = {
            name: double.weights[name] * float(moments(x, groups.present)[0])
            for name, x in double.items()
        }
        if self.rate is None:
            worst = min(means, key=means.__getitem__)
            shares = {name: float(name == worst) for name in means}
        else:
            self.log = {
                name: self.log.get(name, 0.0) - self.rate * mean for name, mean in means.items()
            }
            top = max(self.log.values())
            raw = {name: math.exp(value - top) for name, value in self.log.items()}
            shares = {name: value / sum(raw.values()) for name, value in raw.items()}
        weights = {name: share * double.weights[name] for name, share in shares.items()}
        total = Rewards(double, weights).total()
        advantage = self.base(
            Rewards({"maxmin": total.masked_fill(~groups.present, torch.nan)}), rollout
        )
        return as_given(advantage, rewards)

    def state_dict(self) -> dict[str, Any]:
        return {"log": self.log}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.log = dict(state["log"])


def as_given(advantage: Tensor, rewards: Rewards | Tensor) -> Tensor:
    """Return the advantage, [B, 1] or [B, K], unchanged but for the precision of the rewards."""
    return finished(advantage, rewards, ~advantage.isnan())


def somewhere(present: Tensor) -> bool:
    """Tell whether any row of any process is present; a collective call."""
    return bool(all_sum(present.sum()) > 0)
