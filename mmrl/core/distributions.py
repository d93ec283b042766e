"""Defines the distributions of a decision. Sampling and scoring share one, so they cannot
disagree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from mmrl.core.divergences import REVERSE, Divergence
from mmrl.core.errors import UserError

# floor of a standard deviation of zero: an ODE step has no density and is masked, but must stay
# finite
TINY = 1e-12
BLOCK = 128  # tokens of a vocabulary that are summed before the running sum over blocks
BELOW_ONE = 1 - 2**-52


class Dist(Protocol):
    """Scores the decisions of B rows. Every result is [B, L], L decisions a row."""

    def log_prob(self, decision: Tensor, /) -> Tensor:
        """Return the log-probs of decisions, which may be scores that are no density."""

    def kl(self, reference: Self, /, by: Divergence = REVERSE) -> Tensor:
        """Return KL(self || reference), or another divergence of the two, over distributions of the
        same kind."""

    def entropy(self) -> Tensor:
        """Return the entropies."""


class Sendable(Protocol):
    """Compares with a reference in another process; every distribution of a policy can."""

    def asks(self) -> list[Any]:
        """Say, in plain data, how this one wants a reference to be computed."""

    def shown(self, asks: list[Any], /) -> dict[str, Tensor]:
        """Return what another one's ``kl`` reads of this one as a reference."""

    def reference(self, shown: dict[str, Tensor], /) -> Any:
        """Make a reference for ``kl`` of what ``shown`` gave elsewhere; KeyError or ValueError
        where it does not fit."""


@dataclass(frozen=True)
class Gaussian:
    """Holds an isotropic Gaussian over latents; ``std`` 0 makes the step deterministic (then its
    log-prob has no meaning).

    ``reduction`` "mean" divides log-prob, KL and entropy by the number of dimensions, as every
    published implementation does (their clip ranges of 1e-6 to 1e-3 come from it); "sum" gives the
    density itself. ``weight`` makes the mean a weighted one, such as of a video and its sound.
    """

    mean: Tensor  # [B, *]
    std: Tensor  # [B, 1, ...], or [B, *] where states of a row have times of their own
    reduction: str = "mean"
    weight: Tensor | None = None  # of each dimension [*], 1 on average

    def row_std(self, purpose: str, remedy: str) -> Tensor:
        """Return the standard deviation of each row, [B, 1]. UserError where its states have
        several, with what the objective wants it for and what to do."""
        std = self.std.flatten(1)
        if std.shape[1] > 1:
            raise UserError(
                f"this objective {purpose}, of which a video and its sound at times of their own "
                f"have two; {remedy}"
            )
        return std

    def sample(self, noise: Tensor) -> Tensor:
        """Return a sample, [B, *], from standard normal noise [B, *]."""
        return self.mean + self.std * noise

    def repeat(self, n: int) -> Gaussian:
        """Repeat every row ``n`` times."""
        return replace(
            self, mean=self.mean.repeat_interleave(n, 0), std=self.std.repeat_interleave(n, 0)
        )

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-probs, [B, 1]."""
        std = self.std.clamp_min(TINY)
        return self.reduce(
            -0.5 * ((x - self.mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
        )

    def kl(self, reference: Gaussian, by: Divergence = REVERSE) -> Tensor:
        """Return the exact KL(self || other), [B, 1]; equal standard deviations cancel exactly."""
        p = self.std.clamp_min(TINY)
        q = reference.std.clamp_min(TINY)
        if by.kind == "reverse":
            # divided before it is squared: squares of tiny deviations vanish in half precision
            spread = torch.where(
                p == q, torch.zeros_like(p), (q / p).log() + 0.5 * ((p / q) ** 2 - 1)
            )
            return self.reduce(spread + 0.5 * ((self.mean - reference.mean) / q) ** 2)
        return self.reduce(by.of_gaussians((self.mean - reference.mean) ** 2, p, q))

    def entropy(self) -> Tensor:
        """Return the entropies, [B, 1]."""
        each = self.std.clamp_min(TINY).log() + 0.5 * math.log(2 * math.pi * math.e)
        return self.reduce(each.expand_as(self.mean))

    def asks(self) -> list[Any]:
        return []

    def shown(self, asks: list[Any]) -> dict[str, Tensor]:
        return {"mean": self.mean, "std": self.std}

    def reference(self, shown: dict[str, Tensor]) -> Self:
        check_shape(shown["mean"], self.mean.shape)
        check_shape(shown["std"], self.std.shape)
        return replace(self, mean=shown["mean"], std=shown["std"])

    def reduce(self, x: Tensor) -> Tensor:
        """Average or sum up what each dimension adds, x [B, *], to [B, 1]."""
        flat = x.flatten(1)
        if self.weight is not None:
            flat = flat * self.weight.flatten().to(flat)
        return flat.mean(1, keepdim=True) if self.reduction == "mean" else flat.sum(1, keepdim=True)


@dataclass(frozen=True)
class Score(Gaussian):
    """Scores a Gaussian by -(x - mean)^2, without its variance (Flow-CPS): not a density, and not a
    log-prob."""

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the scores, [B, 1]."""
        return self.reduce(-((x - self.mean) ** 2))


def check_shape(received: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError where a tensor is not of the shape that it should be."""
    if tuple(received.shape) != tuple(shape) or not received.is_floating_point():
        raise ValueError(
            f"{tuple(received.shape)} numbers of type {received.dtype}, where {tuple(shape)} fit"
        )


def as_gaussian(dist: Dist, purpose: str) -> Gaussian:
    """Return the Gaussian that the decisions at a point have. Raises UserError if they have none,
    with what the objective wants it for."""
    if isinstance(dist, Gaussian):
        return dist
    raise UserError(
        f"this objective {purpose}: it is for flow and diffusion models, not for token models"
    )


def drawn(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return draws [*, n] long from the softmax of logits [*, V], by inversion at uniform [*, n] in
    (0, 1), and their log-probs.

    A draw is the first token whose cumulative probability is above the uniform number. First its
    block of the vocabulary is found, from cumulative sums of blocks in float64, then the token in
    it: one running sum over all of a large vocabulary in float64 costs several times the softmax.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    size = BLOCK if x.shape[-1] % BLOCK == 0 else x.shape[-1]
    top = x.amax(-1, keepdim=True)
    weight = (x - top).exp_().unflatten(-1, (-1, size))  # [*, V / size, size]
    sums = weight.sum(-1).cumsum(-1, dtype=torch.float64)
    want = uniform.to(sums) * sums[..., -1:]
    block = torch.searchsorted(sums, want.contiguous(), right=True)  # [*, n]
    high = sums.gather(-1, block)
    low = torch.where(block > 0, sums.gather(-1, (block - 1).clamp_min(0)), 0.0)
    inside = weight.gather(-2, block[..., None].expand(*block.shape, size)).cumsum(
        -1, dtype=torch.float64
    )
    share = ((want - low) / (high - low)).clamp_max(BELOW_ONE)[..., None] * inside[..., -1:]
    token = block * size + torch.searchsorted(inside, share, right=True)[..., 0]
    return token, x.gather(-1, token) - top - sums[..., -1:].log().to(x)


@dataclass(frozen=True)
class Categorical:
    """Holds independent distributions at L positions over a vocabulary of V; logits of -inf are
    impossible tokens."""

    logits: Tensor  # [B, L, V]

    def sample(self, uniform: Tensor) -> Tensor:
        """Draw [B, L] long, by inversion of the cumulative distribution at uniform [B, L]."""
        return drawn(self.logits, uniform[..., None])[0][..., 0]

    def log_prob(self, ids: Tensor) -> Tensor:
        """Return the log-probs [B, L] of token ids [B, L]."""
        return self._log_softmax().gather(-1, ids[..., None])[..., 0]

    def kl(self, reference: Categorical, by: Divergence = REVERSE) -> Tensor:
        """Return KL(self || other) over the whole vocabulary, [B, L]; an impossible token of self
        adds nothing."""
        p = self._log_softmax()
        q = reference._log_softmax()
        if by.kind != "reverse":
            return by.of_logprobs(p, q)
        # filled before the difference: inf - inf would poison the gradient
        impossible = p.isneginf()
        return (p.exp() * (p.masked_fill(impossible, 0) - q.masked_fill(impossible, 0))).sum(-1)

    def entropy(self) -> Tensor:
        """Return the entropies, [B, L]."""
        p = self._log_softmax()
        return -(p.exp() * p.masked_fill(p.isneginf(), 0)).sum(-1)

    def asks(self) -> list[Any]:
        return []

    def shown(self, asks: list[Any]) -> dict[str, Tensor]:
        return {"logits": self.logits}

    def reference(self, shown: dict[str, Tensor]) -> Categorical:
        check_shape(shown["logits"], self.logits.shape)
        return Categorical(shown["logits"])

    def _log_softmax(self) -> Tensor:
        at_least_float32 = torch.promote_types(self.logits.dtype, torch.float32)
        return self.logits.to(at_least_float32).log_softmax(-1)


@dataclass(frozen=True)
class Truncated(Categorical):
    """Holds distributions that are sampled with top-k or top-p. Closed forms over the vocabulary
    are of the whole ``logits``, without: where two supports differ they would be infinite."""

    sampling_logits: Tensor  # [B, L, V] of what is sampled, -inf outside the support

    def sample(self, uniform: Tensor) -> Tensor:
        return Categorical(self.sampling_logits).sample(uniform)

    def log_prob(self, ids: Tensor) -> Tensor:
        return Categorical(self.sampling_logits).log_prob(ids)

    def entropy(self) -> Tensor:
        return Categorical(self.sampling_logits).entropy()
