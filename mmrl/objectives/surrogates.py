"""Surrogates: the loss of the ratio rho = exp(logp - old) and the advantage A,
one a paper.

Each is ``(logp, old, advantage, mask) -> [B, L]`` for log-probs and mask [B, L] and an advantage
[B, 1] or [B, L]. Surrogates of whole sequences average over ``mask``, which must hold all decisions
of a row: causal models, one pass a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

import torch
from annotated_types import Gt, Le
from torch import Tensor

from mmrl.core.contract import called, returned
from mmrl.core.errors import UserError
from mmrl.core.registry import SURROGATES, bound_options, options, unbound
from mmrl.core.types import Surrogate

WIDEST = 1e30  # of a clip: what lies beyond it no ratio of 32 bits could say
Width = Annotated[float, Gt(0), Le(WIDEST)]
# log-ratios are kept within +-FAR before they are exponentiated, as the published codes do
FAR = 20.0
Decorated = TypeVar("Decorated", bound=Callable[..., Tensor])
WHOLE_ROWS: set[Callable[..., Tensor]] = set()  # surrogates that see all decisions of a row


def sequence(surrogate: Decorated) -> Decorated:
    """Decorator: this surrogate needs all decisions of a row in one pass."""
    WHOLE_ROWS.add(surrogate)
    return surrogate


def sees_whole_rows(surrogate: Surrogate) -> bool:
    return unbound(surrogate) in WHOLE_ROWS


def row_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return [B, 1]: sum of x [B, L] over the row's own decisions."""
    return torch.where(mask, x, 0.0).sum(1, keepdim=True)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return [B, 1]: mean of x [B, L] over the row's own decisions; 0 for a row without any."""
    return row_sum(x, mask) / mask.sum(1, keepdim=True).clamp_min(1)


def summed(surrogate: Surrogate, logp: Tensor, old: Tensor, credit: Tensor, mask: Tensor) -> Tensor:
    """Return [B, L]: the surrogate of an advantage [B, 1 or L], or the sum of its losses over the
    parts of one, [B, 1 or L, N]."""
    parts = (credit,) if credit.ndim == 2 else credit.unbind(-1)
    by = f"the surrogate {called(surrogate)}"
    losses = [
        returned(surrogate(logp, old, part, mask), by, B_L=tuple(logp.shape)) for part in parts
    ]
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum(0)


def both_sides(clip_range: float | tuple[float, float]) -> tuple[float, float]:
    """(low, high) of a range that is written as one number or as two."""
    low, high = clip_range if isinstance(clip_range, (tuple, list)) else (clip_range, clip_range)
    if max(low, high) > WIDEST:
        raise UserError(f"clip_range: at most {WIDEST:g}, not {max(low, high):g}")
    return low, high


def outside(ratio: Tensor, low: float, high: float) -> Tensor:
    """Say which ratios lie outside [1 - low, 1 + high], bool."""
    return (ratio > 1 + high) | (ratio < 1 - low)


def clip(ratio: Tensor, advantage: Tensor, low: float, high: float | None) -> Tensor:
    """max(-A rho, -A clip(rho, 1 - low, 1 + high)) (Schulman et al. 2017, eq. 7)."""
    high = low if high is None else high
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


@SURROGATES.register("ppo")
def ppo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: Width = 0.2,
    clip_high: Width | None = None,
    dual_clip: Width | None = None,
    delta: Width | None = None,
) -> Tensor:
    """Clip the ratio: GRPO, Dr. GRPO; with clip_high != clip_low DAPO (Yu et al. 2025, eq. 10).

    dual_clip: where A < 0 the loss is at most -dual A (dual clip, Ye et al. 2020, eq. 5; verl).
    delta: the rho that is not clipped is at most delta (two-sided clip; TRL). The two are the same
    if they are at least 1 + high.

    clip_low, clip_high: the ratio stays within [1 - clip_low, 1 + clip_high]; null: as clip_low.
    """
    ratio = (logp - old).exp()
    loss = clip(ratio, advantage, clip_low, clip_high)
    if delta is not None:
        held = ratio.clamp(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high))
        loss = torch.maximum(-advantage * ratio.clamp(max=delta), -advantage * held)
    return (
        loss
        if dual_clip is None
        else torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
    )


@SURROGATES.register("gspo")
@sequence
def gspo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: Width = 3e-4,
    clip_high: Width | None = 4e-4,
) -> Tensor:
    """Clip one ratio a sequence, the geometric mean of its tokens' (GSPO, Zheng et al. 2025).

    Equations 5 and 7.

    clip_low, clip_high: the ratio stays within [1 - clip_low, 1 + clip_high].
    """
    ratio = row_mean(logp - old, mask).exp()
    return clip(ratio, advantage, clip_low, clip_high).expand_as(logp)


@SURROGATES.register("gspo_token")
@sequence
def gspo_token(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: Width = 3e-4,
    clip_high: Width | None = 4e-4,
) -> Tensor:
    """Give each token its own gradient at the sequence's ratio (GSPO-token, Zheng et al. 2025).

    Equation 14.

    Equals gspo, gradient included, where the advantage is one number a row and rows count alike.

    clip_low, clip_high: the ratio stays within [1 - clip_low, 1 + clip_high].
    """
    whole = row_mean(logp - old, mask).detach()
    return clip(
        (whole + logp - logp.detach()).clamp(max=10.0).exp(), advantage, clip_low, clip_high
    )


@SURROGATES.register("luspo")
@sequence
def luspo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: Width = 3e-4,
    clip_high: Width | None = 4e-4,
) -> Tensor:
    """Multiply GSPO's loss by the answer's length, so that long ones are not discounted (LUSPO).

    clip_low, clip_high: the ratio stays within [1 - clip_low, 1 + clip_high].
    """
    return gspo(logp, old, advantage, mask, clip_low=clip_low, clip_high=clip_high) * mask.sum(
        1, keepdim=True
    )


@SURROGATES.register("gmpo")
@sequence
def gmpo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: Width = 0.4,
    clip_high: Width | None = 0.4,
) -> Tensor:
    """Take the geometric mean of token ratios, clipped on the side A pushes to (GMPO, Zhao et al.
    2025).

    A row with one advantage per token is clipped by the sign of their mean.

    clip_low, clip_high: log-ratios of tokens stay within [-clip_low, clip_high].
    """
    advantage = row_mean(advantage.expand_as(logp), mask)
    gap = logp - old
    held = gap.clamp(-clip_low, clip_low if clip_high is None else clip_high)
    gap = torch.where(advantage > 0, torch.minimum(gap, held), torch.maximum(gap, held))
    return (-advantage * row_mean(gap, mask).exp()).expand_as(logp)


@SURROGATES.register("rloo")
@sequence
def rloo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: Width = 0.2,
    clip_high: Width | None = None,
) -> Tensor:
    """Clip the ratio of the sequence as one action, the product of the tokens' (Ahmadian et al.
    2024).

    clip_low, clip_high: the ratio stays within [1 - clip_low, 1 + clip_high]; null: as clip_low.
    """
    return clip(
        row_sum(logp - old, mask).clamp(-FAR, FAR).exp(), advantage, clip_low, clip_high
    ).expand_as(logp)


@SURROGATES.register("cispo")
def cispo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: Width | None = None,
    clip_high: Width | None = None,
    cap: Width | None = None,
) -> Tensor:
    """Take -sg(clipped rho) A log p: no token loses its gradient (CISPO, MiniMax 2025, eq. 4 and
    5).

    Two published forms: verl's clips to [1 - low, 1 + high]; TRL's has ``cap``, the largest rho
    itself (5.0, say), and no lower bound. With nothing given, cap is 5.

    clip_low: rho is at least 1 - clip_low. clip_high: rho is at most 1 + clip_high. cap: largest
    rho, instead.
    """
    ratio = (logp - old).detach().exp()
    if clip_low is None and clip_high is None and cap is None:
        cap = 5.0
    least = 0.0 if clip_low is None else 1 - clip_low
    most = min(
        [
            torch.inf,
            *([1 + clip_high] if clip_high is not None else []),
            *([cap] if cap is not None else []),
        ]
    )
    return -ratio.clamp(least, most) * advantage * logp


@SURROGATES.register("sapo")
def sapo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    positive: Width = 1.0,
    negative: Width = 1.05,
) -> Tensor:
    """Gate softly: -A (4 / tau) sigmoid(tau (rho - 1)), tau by the sign of A (SAPO, Gao et al.
    2025).

    positive, negative: tau for A > 0 and for A < 0.
    """
    tau = torch.where(advantage > 0, positive, negative)
    return -advantage * (4 / tau) * (tau * ((logp - old).clamp(-FAR, FAR).exp() - 1)).sigmoid()


@SURROGATES.register("spo")
def spo(
    logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, *, width: Width = 0.2
) -> Tensor:
    """Pull the ratio back by a parabola, not a clip: -A rho + |A| (rho - 1)^2 / (2 width) (SPO).

    Xie et al. 2024, "Simple policy optimization". The gradient of a decision ends where its ratio
    has moved by ``width`` the way A pushes, and turns round beyond.

    width: distance of the ratio from 1 at which the gradient ends.
    """
    ratio = (logp - old).clamp(-FAR, FAR).exp()
    return -advantage * ratio + advantage.abs() * (ratio - 1).square() / (2 * width)


@SURROGATES.register("vespo")
@sequence
def vespo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> Tensor:
    """Take -sg(e^l w^k e^(-l w)) A log p, w the sequence's ratio, (k, l) by the sign of A
    (VESPO).

    positive, negative: (k, l) for A > 0 and for A < 0.
    """
    gap = row_sum((logp - old).detach().clamp(-FAR, FAR), mask).clamp(
        torch.tensor(1e-8).log().item(), FAR
    )
    k, rate = (torch.where(advantage >= 0, positive[i], negative[i]) for i in (0, 1))
    return -(rate + k * gap - rate * gap.exp()).exp() * advantage * logp


@SURROGATES.register("reinforce")
def reinforce(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Take -A log p, no ratio and no clip (REINFORCE, Williams 1992; GPG with the advantage
    gpg)."""
    return -advantage * logp


def clipped(surrogate: Surrogate, clip_range: float | tuple[float, float]) -> Surrogate:
    """Return the surrogate with this clip range. Raises UserError if it already has one, or takes
    none."""
    sides = dict(zip(("clip_low", "clip_high"), both_sides(clip_range), strict=True))
    if min(sides.values()) <= 0:
        raise UserError(f"clip_range must be greater than 0, it is {clip_range}")
    plain = unbound(surrogate)
    if not set(sides) <= set(options(plain)):
        raise UserError(f"the surrogate {plain.__name__} clips no ratio: leave out clip_range")
    if set(sides) & set(bound_options(surrogate)):
        raise UserError(
            f"clip_range and clip_low, clip_high of the surrogate {plain.__name__} are the same: "
            "keep one of them"
        )
    return partial(surrogate, **sides)


def bounds_of(surrogate: Surrogate) -> tuple[float, float]:
    """(low, high): how far a surrogate lets the ratio leave 1; infinite if it sets no bound."""
    plain = unbound(surrogate)
    chosen = {name: p.default for name, p in options(plain).items()}
    chosen |= bound_options(surrogate)
    low, high = chosen.get("clip_low"), chosen.get("clip_high")
    low = torch.inf if low is None else low
    return low, low if high is None else high


def without_slope(
    surrogate: Surrogate, logp: Tensor, old: Tensor, credit: Tensor, mask: Tensor
) -> Tensor:
    """Return [B, L] bool: decisions that are clipped, whose loss does not change with their
    log-prob although A, or a part of it, is not 0."""
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        loss = row_sum(summed(surrogate, leaf, old.detach(), credit, mask), mask)
        (slope,) = torch.autograd.grad(loss.sum(), leaf)
    moves = (credit != 0).flatten(2).any(2) if credit.ndim > 2 else credit != 0
    return (slope == 0) & moves.expand_as(logp)
