"""Defines divergences between two distributions of one decision, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Lt
from torch import Tensor


@dataclass(frozen=True)
class Divergence:
    """Divergence of the policy's distribution p from a teacher's q.

    kind: reverse is KL(p || q), forward is KL(q || p). jensen_shannon is mix KL(q || m) + (1 - mix)
    KL(p || m) with m = mix q + (1 - mix) p (generalised, Agarwal et al. 2024, "On-policy
    distillation of language models", eq. 1); of Gaussians, which have no closed form of it, m is
    the normalised p^(1 - mix) q^mix (Nielsen 2019, "On a generalization of the Jensen-Shannon
    divergence", the geometric one).
    """

    kind: Literal["reverse", "forward", "jensen_shannon"] = "reverse"
    mix: Annotated[float, Gt(0), Lt(1)] = 0.5

    def of_logprobs(self, p: Tensor, q: Tensor) -> Tensor:
        """Compute it [*] from the log-probs [*, V] of all tokens; a token that is impossible in
        both counts 0."""
        never = p.isneginf() & q.isneginf()
        # masked before any difference: inf - inf would make the gradient NaN
        p, q = p.masked_fill(never, 0.0), q.masked_fill(never, 0.0)
        p_share, q_share = (x.exp().masked_fill(never, 0.0) for x in (p, q))
        if self.kind == "reverse":
            return _expected(p_share, p - q)
        if self.kind == "forward":
            return _expected(q_share, q - p)
        kind = torch.promote_types(p.dtype, torch.float32)
        share = p.new_tensor(self.mix, dtype=kind)
        between = torch.logaddexp(q + share.log(), p + torch.log1p(-share))
        mixed = _expected(q_share, q - between), _expected(p_share, p - between)
        return self.mix * mixed[0] + (1 - self.mix) * mixed[1]

    def of_gaussians(self, distance: Tensor, p: Tensor, q: Tensor) -> Tensor:
        """Compute it for every dimension, from the squared distance of the means and the two
        standard deviations, all positive."""
        if self.kind == "reverse":
            return _gaussian(distance, p, q)
        if self.kind == "forward":
            return _gaussian(distance, q, p)
        # a geometric mean has the weighted sum of precisions, and the precision-weighted mean
        weight_p, weight_q = (1 - self.mix) / p**2, self.mix / q**2
        std = (weight_p + weight_q).rsqrt()
        toward_q = weight_q * std**2  # position of the mean between p's and q's
        from_p = _gaussian(distance * toward_q**2, p, std)
        from_q = _gaussian(distance * (1 - toward_q) ** 2, q, std)
        return self.mix * from_q + (1 - self.mix) * from_p


REVERSE = Divergence()


def _expected(share: Tensor, difference: Tensor) -> Tensor:
    """Sum over the vocabulary; a token of probability 0 counts 0."""
    return (share * difference.masked_fill(share == 0, 0.0)).sum(-1)


def _gaussian(distance: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Compute KL(N(a, p) || N(b, q)) from (a - b)^2; equal deviations cancel exactly."""
    spread = torch.where(p == q, torch.zeros_like(p), (q / p).log() + 0.5 * ((p / q) ** 2 - 1))
    return spread + 0.5 * distance / q**2
