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

# floor of the standard deviation: an ODE step has no density and is masked, but must be finite
TINY = 1e-12
BLOCK = 128  # block size of the cumulative sum over the vocabulary
BELOW_ONE = 1 - 2**-52


class Dist(Protocol):
    """Scores the decisions of B rows. Every result is [B, L], L decisions a row."""

    def log_prob(self, decision: Tensor, /) -> Tensor:
        """Return the log-probs of decisions, or scores that are not a density."""

    def kl(self, reference: Self, /, by: Divergence = REVERSE) -> Tensor:
        """Return KL(self || reference), or another divergence of the two, over distributions of the
        same kind."""

    def entropy(self) -> Tensor:
        """Return the entropies."""


class Sendable(Protocol):
    """Mixin: compares with a reference in another process; every distribution of a policy has
    it."""

    def asks(self) -> list[Any]:
        """Return, as plain data, how the reference must be computed."""

    def shown(self, asks: list[Any], /) -> dict[str, Tensor]:
        """Return the tensors that ``kl`` needs of this one as a reference."""

    def reference(self, shown: dict[str, Tensor], /) -> Any:
        """Build a reference for ``kl`` from another process's ``shown``; KeyError or ValueError if
        it does not fit."""


@dataclass(frozen=True)
class Gaussian:
    """Holds an isotropic Gaussian over latents; ``std`` 0 makes the step deterministic (then its
    log-prob has no meaning).

    ``reduction`` "mean" divides log-prob, KL and entropy by the number of dimensions, as all
    published implementations do (hence their clip ranges of 1e-6 to 1e-3); "sum" gives the density
    itself. ``weight`` weights the mean, for example of a video and its sound.
    """

    mean: Tensor  # [B, *]
    std: Tensor  # [B, 1, ...], or [B, *] if a row has states at several times
    reduction: str = "mean"
    weight: Tensor | None = None  # of each dimension [*], 1 on average

    def row_std(self, purpose: str, remedy: str) -> Tensor:
        """Return the standard deviation of each row, [B, 1]. UserError if its states have several;
        the message says what the objective needs it for."""
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
            # divide before squaring: squares of tiny deviations underflow in half precision
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
        """Average or sum the dimensions' terms, x [B, *], to [B, 1]."""
        flat = x.flatten(1)
        if self.weight is not None:
            flat = flat * self.weight.flatten().to(flat)
        return flat.mean(1, keepdim=True) if self.reduction == "mean" else flat.sum(1, keepdim=True)


@dataclass(frozen=True)
class Score(Gaussian):
    """Scores a Gaussian by -(x - mean)^2, without its variance (Flow-CPS): neither a density nor a
    log-prob."""

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the scores, [B, 1]."""
        return self.reduce(-((x - self.mean) ** 2))


def check_shape(received: Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError if a tensor has the wrong shape."""
    if tuple(received.shape) != tuple(shape) or not received.is_floating_point():
        raise ValueError(
            f"{tuple(received.shape)} numbers of type {received.dtype}, where {tuple(shape)} fit"
        )


def as_gaussian(dist: Dist, purpose: str) -> Gaussian:
    """Return the Gaussian of the decisions at a point. Raises UserError if they have none; the
    message says what the objective needs it for."""
    if isinstance(dist, Gaussian):
        return dist
    raise UserError(
        f"this objective {purpose}: it is for flow and diffusion models, not for token models"
    )


def drawn(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return draws [*, n] long from the softmax of logits [*, V], by inversion at uniform [*, n] in
    (0, 1), and their log-probs.

    A draw is the first token whose cumulative probability is above the uniform number. Its block of
    the vocabulary is found first, from cumulative sums of blocks in float64, then the token in it:
    a float64 cumulative sum over a large vocabulary costs several times the softmax.
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


class OverVocabulary:
    """Base of the distributions over tokens that keep the logits [*, V] of the whole vocabulary."""

    logits: Tensor

    def placed(self, values: Tensor) -> Tensor:
        """Place values of the scored positions as [B, L]."""
        return values


@dataclass(frozen=True)
class Categorical(OverVocabulary):
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
        # masked before the difference: inf - inf would make the gradient NaN
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
    """Holds distributions sampled with top-k or top-p. Closed forms over the vocabulary use the
    untruncated ``logits``: they would be infinite where two supports differ."""

    sampling_logits: Tensor  # [B, L, V] of the sampling distribution, -inf outside the support

    def sample(self, uniform: Tensor) -> Tensor:
        return Categorical(self.sampling_logits).sample(uniform)

    def log_prob(self, ids: Tensor) -> Tensor:
        return Categorical(self.sampling_logits).log_prob(ids)

    def entropy(self) -> Tensor:
        return Categorical(self.sampling_logits).entropy()
