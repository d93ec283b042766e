"""Warps token distributions: temperature, top-k, top-p (nucleus), suppressed ids, for sampling and
scoring alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Warp:
    """Maps logits to those of the distribution that is sampled from, in this order: suppression,
    temperature, top-k, top-p.

    ``temperature`` 0 is greedy: all on the (first) largest. ``top_k`` None and ``top_p`` 1 keep
    everything; ties with the last token kept are kept too by top-k. ``suppressed`` ids are never
    sampled and have log-prob -inf.

    A support computed again from logits which differ by rounding may lose the very token that was
    sampled at its edge, whose log-prob would be -inf. Hence the rule: in scoring the token that was
    chosen always belongs to the support (``keep``). Where it does so anyway, which is always the
    case without rounding, this changes nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    suppressed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (
            self.temperature < 0
            or not 0 < self.top_p <= 1
            or (self.top_k is not None and self.top_k < 1)
        ):
            raise ValueError(
                f"temperature must be >= 0, top_k >= 1 and top_p in (0, 1]; got "
                f"{self.temperature}, {self.top_k}, "
                f"{self.top_p}"
            )

    @property
    def truncates(self) -> bool:
        """Tell whether greedy choice, top-k or top-p takes tokens away."""
        return self.temperature == 0 or self.top_k is not None or self.top_p < 1

    def __call__(self, logits: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return logits [*, V], at least float32, -inf outside the support; ``keep`` [*] ids that
        stay in it."""
        x = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.suppressed:
            x = x + _banned(self.suppressed, x.shape[-1], x.dtype, x.device)
        if self.temperature not in (0, 1):
            x = x / self.temperature
        if not self.truncates:
            return x
        outside = self._outside(x.detach())
        if keep is not None:
            outside.scatter_(-1, keep[..., None], False)
        return x.masked_fill(outside, -torch.inf)

    def _outside(self, x: Tensor) -> Tensor:
        """Mark what top-k and top-p take away, [*, V] bool."""
        if self.temperature == 0:
            return torch.ones_like(x, dtype=torch.bool).scatter_(
                -1, x.argmax(-1, keepdim=True), False
            )
        outside = torch.zeros_like(x, dtype=torch.bool)
        if self.top_k is not None and self.top_k < x.shape[-1]:
            outside = x < x.topk(self.top_k, dim=-1).values[..., -1:]
        if self.top_p < 1:
            p, order = (
                x.masked_fill(outside, -torch.inf)
                .softmax(-1)
                .sort(dim=-1, descending=True, stable=True)
            )
            # without the token itself, so the one that crosses stays
            reached = p.cumsum(-1) - p >= self.top_p
            outside = outside | torch.zeros_like(outside).scatter_(-1, order, reached)
        return outside


@lru_cache(maxsize=8)
def _banned(ids: tuple[int, ...], vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [V], -inf at ``ids``, 0 elsewhere."""
    with torch.inference_mode(False):
        bias = torch.zeros(vocab, dtype=dtype)
        bias[list(ids)] = -torch.inf
        return bias.to(device)
