"""Warps token distributions: temperature, top-k, top-p (nucleus), suppressed ids, for sampling and
scoring alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

TINY = 1e-6  # nats; entropies below it count as this


@dataclass(frozen=True)
class Anneal:
    """Chooses a temperature that falls along an answer: exploratory annealed decoding (EAD).

    Yang et al. 2025, "Let it calm": max(1 + highest - exp(t / d), lowest) for decision t = 0, 1,
    .... highest: the factor at the start. lowest: the factor at the end. decay: d in the first
    iteration, in decisions. growth: by how many d grows in every iteration, since answers become
    longer. longest: the largest d.
    """

    highest: float = 1.2
    lowest: float = 0.1
    decay: float = 25000.0
    growth: float = 5.0
    longest: float = 40000.0

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.highest or self.decay <= 0 or self.growth < 0:
            raise ValueError(
                "anneal: lowest must be above 0 and at most highest, decay above 0 and growth at "
                f"least 0; got {self}"
            )

    def temperatures(self, steps: int, iteration: int = 0) -> tuple[float, ...]:
        """List the temperatures of ``steps`` decisions in an iteration (from 0)."""
        d = max(self.decay, min(self.decay + self.growth * iteration, self.longest))
        # exp(t / d) beyond 700 is no float, and the lowest temperature long before
        falls = (math.exp(min(t / d, 700.0)) for t in range(steps))
        return tuple(max(1 + self.highest - fall, self.lowest) for fall in falls)


@dataclass(frozen=True)
class EntropyScale:
    """Places an entropy among those of many decisions, from -1 (lowest) over 0 (median) to 1."""

    median: float  # of log entropies
    std: float
    highest: float  # the largest (log H - median) / std there was, above 0
    lowest: float  # the smallest, below 0

    def __call__(self, entropy: Tensor) -> Tensor:
        """Return the place in [-1, 1] of every entropy, nats."""
        h = (entropy.clamp_min(TINY).log() - self.median) / (self.std + TINY)
        return torch.where(h > 0, h / self.highest, -h / self.lowest).clamp(-1, 1)


@dataclass(frozen=True)
class Warp:
    """Maps logits to those of the distribution that is sampled from, in this order: suppression,
    temperature, top-k, top-p.

    ``schedule`` multiplies the temperature at place 0, 1, ... of an answer (its last value goes
    on); ``adaptive`` multiplies it by 1 + adaptive * h, h the place of the entropy on ``scale``
    (HAPO). A temperature that depends on the logits has no gradient.

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
    schedule: tuple[float, ...] = ()
    adaptive: float = 0.0
    scale: EntropyScale | None = None

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

    @property
    def untruncated(self) -> Warp:
        """Return the same temperature without truncation; 1 for greedy choice."""
        return replace(self, temperature=self.temperature or 1.0, top_k=None, top_p=1.0)

    def __call__(
        self, logits: Tensor, keep: Tensor | None = None, place: Tensor | int | None = None
    ) -> Tensor:
        """Return logits [*, V], at least float32, -inf outside the support; ``keep`` [*] ids that
        stay in it; ``place`` [*] in the answer, for a schedule."""
        x = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.suppressed:
            x = x + _banned(self.suppressed, x.shape[-1], x.dtype, x.device)
        if self.temperature not in (0, 1):
            x = x / self.temperature
        if self.schedule and self.temperature:
            x = x / self._scheduled(place, x)
        if self.adaptive and self.scale is not None and self.temperature:
            x = x / (1 + self.adaptive * self.scale(_entropy(x.detach())))[..., None]
        if not self.truncates:
            return x
        outside = self._outside(x.detach())
        if keep is not None:
            outside.scatter_(-1, keep[..., None], False)
        return x.masked_fill(outside, -torch.inf)

    def _scheduled(self, place: Tensor | int | None, x: Tensor) -> Tensor | float:
        if place is None:
            raise ValueError("a schedule of temperatures needs the places of the decisions")
        if isinstance(place, int):
            return self.schedule[min(place, len(self.schedule) - 1)]
        table = _table(self.schedule, x.dtype, x.device)
        return table[place.clamp_max(len(table) - 1)][..., None]

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


def _entropy(x: Tensor) -> Tensor:
    p = x.log_softmax(-1)
    return -(p.exp() * p.masked_fill(p.isneginf(), 0)).sum(-1)


@lru_cache(maxsize=8)
def _table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype).to(device)


@lru_cache(maxsize=8)
def _banned(ids: tuple[int, ...], vocab: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [V], -inf at ``ids``, 0 elsewhere."""
    with torch.inference_mode(False):
        bias = torch.zeros(vocab, dtype=dtype)
        bias[list(ids)] = -torch.inf
        return bias.to(device)
