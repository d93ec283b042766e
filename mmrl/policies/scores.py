"""Computes log-probs and entropies over large vocabularies, a chunk of positions at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmrl.core.weights import Weights
from samplers.batching import chunks
from samplers.warp import Warp

Head = Callable[[Tensor], Tensor]  # hidden states [n, H] -> logits [n, V]
BYTES = 2**26  # of float32 logits that are alive at once


class Scored(NamedTuple):
    """Holds the scores of N decisions."""

    logprob: Tensor  # [N]
    entropy: Tensor | None  # [N]


class Scorer(Protocol):
    """Says what a distribution over tokens needs of the policy that made it."""

    warp: Warp
    entropies: bool  # computed in every scoring pass once one was requested

    @property
    def weights(self) -> Weights: ...

    def active(self) -> Callable[..., Any]:
        """Return the net, called with the name of a pass and what it takes."""


def score(
    hidden: Tensor, targets: Tensor, head: Head, warp: Warp, vocab: int, entropy: bool
) -> Scored:
    """Compute log-probs of ``targets`` [N] at ``hidden`` [N, H], at least float32, in chunks.

    More than one chunk is recomputed in the backward pass, so that logits of one chunk only are
    ever kept: memory does not grow with the number of decisions times the vocabulary.
    """
    size = max(1, BYTES // (4 * vocab))

    def score_chunk(h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return _scored(warp(head(h), keep=ids), ids, entropy)

    if len(hidden) <= size:
        scored = [score_chunk(hidden, targets)]
    else:
        scored = [
            _again(score_chunk, hidden[part], targets[part]) for part in chunks(len(hidden), size)
        ]
    logprob, spread = (torch.cat(parts) for parts in zip(*scored, strict=True))
    return Scored(logprob, spread if entropy else None)


def _scored(warped: Tensor, ids: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """Score warped logits [n, V], [n] each; without ``entropy`` the second is empty."""
    total = warped.logsumexp(-1)
    logprob = warped.gather(-1, ids[:, None])[:, 0] - total
    if not entropy:
        return logprob, logprob.new_zeros(0)
    finite = warped.masked_fill(warped.isneginf(), 0)
    return logprob, total - ((warped - total[:, None]).exp() * finite).sum(-1)


def certainty(logits: Tensor) -> Tensor:
    """Compute KL(uniform || p) [*] in nats, p the softmax of logits [*, V]: log-sum-exp less their
    mean, less log V.

    Self-certainty (Kang et al. 2025, arXiv:2502.18581), before any temperature or truncation; 0 for
    the uniform distribution.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return x.logsumexp(-1) - x.mean(-1) - math.log(x.shape[-1])


def entropy_of(logits: Tensor) -> Tensor:
    """Compute the entropy [*] in nats of the softmax of logits [*, V]."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return -(x.exp() * x.masked_fill(x.isneginf(), 0.0)).sum(-1)


def full(hidden: Tensor, head: Head, warp: Warp, vocab: int) -> Tensor:
    """Compute log-probs of all tokens [N, V], for an exact KL; unlike ``score`` this holds them all
    in memory."""
    parts = chunks(len(hidden), max(1, BYTES // (4 * vocab)))
    return torch.cat([warp(head(hidden[part])).log_softmax(-1) for part in parts])


def kl(hidden: Tensor, reference: Tensor, head: Head, warp: Warp) -> Tensor:
    """Compute KL(self || reference) [N] at ``hidden`` [N, H], for the reference's log-probs of all
    tokens [N, V]."""

    def kl_chunk(h: Tensor, q: Tensor) -> Tensor:
        p = warp(head(h)).log_softmax(-1)
        never = p.isneginf() | q.isneginf()  # the same tokens, those suppressed
        return (p.exp() * (p.masked_fill(never, 0) - q.masked_fill(never, 0))).sum(-1)

    parts = chunks(len(hidden), max(1, BYTES // (4 * reference.shape[-1])))
    return torch.cat([_again(kl_chunk, hidden[part], reference[part]) for part in parts])


def _again(fn: Callable[..., Any], *arguments: Tensor) -> Any:
    """Call ``fn(*arguments)`` so that it is computed again in the backward pass rather than
    kept."""
    return (
        checkpoint(fn, *arguments, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else fn(*arguments)
    )
