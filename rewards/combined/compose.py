"""Combines rewards: gated, ensembled, constrained, bounded, noise-corrected.

The parts are written in the configuration as rewards are, a name or ``{name: {options}}``: ``gate:
{main: ocr, extra: {aesthetic: {scale: 0.1}}, above: 0.5}``. If a part is NaN, so is the whole.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt, Reward
from rewards.card import card
from rewards.combined.members import merged, scores_of

Part = Annotated[Reward, REWARDS]
Rate = Annotated[float, Ge(0), Lt(1)]


@REWARDS.register("gate")
@card(
    source="G-RA, Stabilizing Long-term Multi-turn RL with Gated Rewards",
    scaling="main + weight extra",
)
class Gate:
    """Add an extra reward only if the main one reaches a threshold (gated reward).

    Gated reward accumulation: R = main + weight * extra * 1[main >= above]. The extra reward cannot
    be earned instead of the main one.
    """

    def __init__(self, main: Part, extra: Part, above: float, weight: float = 1.0):
        self.main = main
        self.extra = extra
        self.above = above
        self.weight = weight
        self.card = merged([main, extra])

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        """Return [B], or [B, K] if one of the two is of steps."""
        main, extra = scores_of([self.main, self.extra], media, prompts)
        return torch.where(main >= self.above, main + self.weight * extra, main)


@REWARDS.register("ensemble")
@card(
    source="[Coste et al. 2023](https://arxiv.org/abs/2310.02743)",
    scaling="that of its parts, which must be alike",
)
class Ensemble:
    """Combine several judges: the worst, the mean minus their disagreement, a product.

    Reward model ensembles (Coste et al. 2023): worst-case optimisation, min_i r_i, and
    uncertainty-weighted optimisation, mean_i r_i - penalty * mean_i (r_i - mean)^2. Bring the parts
    to one scale first. Also, for parts that judge different things: ``best``, max_i r_i;
    ``product``, prod_i r_i, where one 0 makes the whole 0; ``geometric``, the n-th root of the
    product, which needs non-negative parts. ``variance``, mean_i (r_i - mean)^2 alone, is the
    factor of a sample's KL in uncertainty-aware RLHF (Banerjee and Gopalan 2024): with weight 0,
    named in ``kl: {where: reward, uncertainty: ...}``.
    """

    def __init__(
        self,
        of: list[Part],
        how: Literal[
            "worst", "uncertainty", "mean", "variance", "best", "product", "geometric"
        ] = "worst",
        penalty: Annotated[float, Ge(0)] = 1.0,
    ):
        if len(of) < 2:
            raise UserError(f"an ensemble needs at least two rewards in `of`, got {len(of)}")
        self.of = list(of)
        self.how = how
        self.penalty = penalty
        self.card = merged(self.of)

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        each = torch.stack(torch.broadcast_tensors(*scores_of(self.of, media, prompts)))  # [n, B]
        if self.how == "worst":
            return each.amin(0)  # NaN if a part is
        if self.how == "best":
            return each.amax(0)
        if self.how == "product":
            return each.prod(0)
        if self.how == "geometric":
            if (each < 0).any():
                raise UserError(
                    "ensemble: the geometric mean needs parts of 0 and more; use how: product, "
                    "or bound the part from below (bounded: {low: 0})"
                )
            return each.double().log().mean(0).exp().float()
        if self.how == "mean":
            return each.mean(0)
        spread = each.var(0, correction=0)
        return spread if self.how == "variance" else each.mean(0) - self.penalty * spread


@REWARDS.register("constrain")
@card(
    source="[CGPO](https://arxiv.org/abs/2409.20370)",
    scaling="that of main; `otherwise` where a judge objects",
)
class Constrain:
    """Pay a main reward only where every judge is satisfied: constraints, not trade-offs.

    The constraints of CGPO's mixture of judges (Xu et al. 2024): R = main if all hold, else
    ``otherwise``, which should be at most the minimum of the main reward. A constraint holds if its
    judge gives at least its number in ``at_least`` (one number for all judges, or one each). CGPO's
    calibration of the main reward, sigmoid(main - main of a baseline answer to the prompt), is
    ``main: {calibrated: {of: ...}}``.
    """

    def __init__(
        self,
        main: Part,
        judges: list[Part],
        at_least: float | list[float] = 0.5,
        otherwise: float = 0.0,
    ):
        limits = list(at_least) if isinstance(at_least, (list, tuple)) else [at_least] * len(judges)
        if not judges or len(limits) != len(judges):
            raise UserError(
                f"constrain has {len(judges)} judges and {len(limits)} numbers in "
                f"at_least: one each"
            )
        self.main = main
        self.judges = list(judges)
        self.limits = limits
        self.otherwise = otherwise
        self.card = merged([main, *judges])

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        scores = scores_of([self.main, *self.judges], media, prompts)
        parts: tuple[Tensor, ...] = torch.broadcast_tensors(*scores)
        main, *verdicts = parts
        holds = torch.ones_like(main, dtype=torch.bool)
        for verdict, limit in zip(verdicts, self.limits, strict=True):
            holds &= verdict >= limit
        unknown = torch.stack([main, *verdicts]).isnan().any(0)
        return main.where(holds, self.otherwise).masked_fill(unknown, torch.nan)


@REWARDS.register("bounded")
@card(
    scaling="that of its part, within the bounds",
    source="[Gao et al. 2024](https://arxiv.org/abs/2410.15115)",
)
class Bounded:
    """Clip a reward; step rewards also as differences, so that repeating a step earns nothing.

    Clip and Delta (Gao et al. 2024, "On designing effective RL reward at training time"): Clip is
    ``high: 0`` with ``shift: -eta``, min(r - eta, 0). Delta gives step k its gain over step k + 1,
    r_k - r_(k+1); the second to last keeps its reward and the last has 0, so that the return from
    any step is that step's reward. Only steps with a reward count; NaN between them stays NaN.
    """

    def __init__(
        self,
        of: Part,
        low: float | None = None,
        high: float | None = None,
        shift: float = 0.0,
        delta: bool = False,
    ):
        if low is None and high is None and not delta:
            raise UserError("bounded needs low, high or delta")
        if low is not None and high is not None and low >= high:
            raise UserError(f"bounded: low {low:g} is not below high {high:g}")
        self.of = of
        self.low = low
        self.high = high
        self.shift = shift
        self.delta = delta
        self.card = merged([of])
        if delta and self.card.of != "step":
            raise UserError(
                "bounded: delta compares the steps of one sample, and this reward is not of steps"
            )

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        (values,) = scores_of([self.of], media, prompts)
        values = values + self.shift
        if self.low is not None or self.high is not None:
            values = values.clamp(self.low, self.high)  # NaN stays NaN
        return (
            torch.stack([_gains(row) for row in values]) if self.delta and len(values) else values
        )


def _gains(row: Tensor) -> Tensor:
    """Return the gain of every step [K] with a reward over the next one; the last has 0."""
    steps = row[~row.isnan()]
    gained = torch.zeros_like(steps)
    gained[:-2] = steps[:-2] - steps[1:-1]
    gained[-2:-1] = steps[-2:-1]
    return row.masked_scatter(~row.isnan(), gained)


@REWARDS.register("noisy")
@card(
    source="[Cai et al. 2025](https://arxiv.org/abs/2510.00915)",
    scaling="0/1 becomes unbiased numbers outside 0..1",
)
class Noisy:
    """Correct a 0/1 verifier of known error rates: the expected gradient is that of true rewards.

    Backward: (r - fp) / (1 - fp - fn), whose expectation is the true reward; advantages that divide
    by the group's std are unchanged by it, sums of several rewards and advantages without a std are
    not. Forward: replaces the advantage by fn for a 1 and fn - 1 for a 0, which needs only the
    false-negative rate and has expectation (1 - fp - fn) (truth - 1). It is r minus a constant, so
    any advantage that subtracts a mean removes the correction: use it with ``advantage:
    reinforce``, which does not.

    Args:
        of: a reward of 0 and 1.
        false_positive: how often a wrong answer is accepted.
        false_negative: how often a right one is rejected.
        how: backward or forward.
    """

    def __init__(
        self,
        of: Part,
        false_positive: Rate = 0.0,
        false_negative: Rate = 0.0,
        how: Literal["backward", "forward"] = "backward",
    ):
        if false_positive + false_negative >= 1:
            raise UserError(
                "noisy: the two error rates add up to 1 or more: such a verifier says nothing"
            )
        self.of = of
        self.fp = false_positive
        self.fn = false_negative
        self.how = how
        self.card = merged([of])

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        (values,) = scores_of([self.of], media, prompts)
        if not ((values == 0) | (values == 1) | values.isnan()).all():
            raise UserError(
                f"noisy corrects rewards of 0 and 1, got {values.flatten()[:4].tolist()} ..."
            )
        return (
            (values - self.fp) / (1 - self.fp - self.fn)
            if self.how == "backward"
            else values - 1 + self.fn
        )
