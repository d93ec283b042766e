"""Chooses which hidden tokens become final in a pass of masked diffusion: schedules, and the two
ways to choose positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cosine(steps: int) -> Tensor:
    """Return the share of tokens still hidden before pass t and after the last, [T + 1]: cos(pi t /
    2T) (Chang et al. 2022)."""
    return torch.cos(torch.arange(steps + 1) / steps * math.pi / 2).clamp_min(0) * (
        torch.arange(steps + 1) < steps
    )


def linear(steps: int) -> Tensor:
    """Return the share of tokens still hidden before pass t and after the last, [T + 1]: 1 - t /
    T."""
    return 1 - torch.arange(steps + 1) / steps


def emerge(uniform: Tensor, hidden: Tensor, rates: Tensor, step: int) -> Tensor:
    """Choose the tokens revealed in pass ``step``, [B, L] bool: each hidden one independently with
    probability 1 - k' / k.

    The ancestral sampler of absorbing diffusion (Sahoo et al. 2024, eq. 7): ``rates`` [T + 1] are
    k, uniform [B, L] lies in (0, 1). What is chosen does not depend on the model.
    """
    stay = rates[step + 1].double() / rates[step].double()
    return hidden & (uniform >= stay)


def left_hidden(length: int, rates: Tensor) -> list[int]:
    """Count the tokens hidden before each pass, [T + 1]: floor(length k), at least 1 and one fewer
    than before; 0 at the end."""
    left = [length]
    for rate in rates[1:-1]:
        left.append(max(1, min(left[-1] - 1, int((length * rate).floor()))))
    return [*left, 0]


def gumbel(uniform: Tensor) -> Tensor:
    """Turn uniform numbers in (0, 1) into standard Gumbel noise."""
    return -(-uniform.log()).log()


def ranked(
    confidence: Tensor, uniform: Tensor, temperature: float, hidden: Tensor, count: int
) -> Tensor:
    """Rank the hidden tokens, [B, L] long: 0 .. count - 1 for the chosen ones, L for other hidden
    ones and L + 1 for visible ones.

    Chosen are the ``count`` largest of ``confidence`` + temperature * Gumbel [B, L] at the hidden
    positions (MaskGIT).
    """
    length = hidden.shape[1]
    noisy = (confidence.double() + temperature * gumbel(uniform.double())).masked_fill(
        ~hidden, -torch.inf
    )
    place = noisy.argsort(dim=1, descending=True, stable=True).argsort(1)
    return torch.where(place < count, place, length).masked_fill(~hidden, length + 1)


def evenly(length: int, steps: int) -> list[int]:
    """Count the tokens that each pass keeps at least, [T]: as many in every pass, one more in the
    first ones where that does not come out even."""
    return [length // steps + (step < length % steps) for step in range(steps)]


def sure(confidence: Tensor, hidden: Tensor, threshold: float, least: int) -> Tensor:
    """Choose the hidden tokens that are kept, [B, L] bool: those whose ``confidence`` [B, L] is
    above the threshold, and at least the ``least`` largest (LLaDA2's rule)."""
    ranking = confidence.masked_fill(~hidden, -torch.inf)
    place = ranking.argsort(dim=1, descending=True, stable=True).argsort(1)
    chosen: Tensor = hidden & ((confidence > threshold) | (place < least))
    return chosen


def plackett_luce(log_weight: Tensor, rank: Tensor) -> Tensor:
    """Return the log-probability [B, L] that the token of rank r came r-th: its log-weight minus
    the log-sum of all that were left (Plackett 1975); 0 for tokens without a rank. Ranks as
    ``ranked`` returns them; visible tokens take no part."""
    length = rank.shape[1]
    never = torch.finfo(log_weight.dtype).min / 4
    order = rank.argsort(dim=1, stable=True)
    sorted_weight = log_weight.masked_fill(rank > length, never).gather(1, order)
    rest = sorted_weight.flip(1).logcumsumexp(1).flip(1)  # [B, L] of this one and all behind it
    term = torch.zeros_like(log_weight).scatter(1, order, sorted_weight - rest)
    return torch.where(rank < length, term, 0.0)
