"""Computes log-probs and entropies over large vocabularies, in chunks of positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmrl.core.distributions import Categorical
from mmrl.core.divergences import REVERSE, Divergence
from mmrl.core.weights import Weights
from samplers.batching import chunks
from samplers.warp import Warp

Head = Callable[[Tensor], Tensor]  # hidden states [n, H] -> logits [n, V]
# scores tokens [n] at hidden states [n, H] and places [n]: log-probs and entropies, [n] or [0]
ScoreChunk = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
BYTES = 2**26  # of float32 logits that are alive at once


class Scored(NamedTuple):
    """Holds the scores of N decisions."""

    logprob: Tensor  # [N]
    entropy: Tensor | None  # [N]


class Scorer(Protocol):
    """Defines what a distribution over tokens needs from its policy."""

    warp: Warp
    entropies: bool  # computed in every scoring pass once one was requested

    @property
    def weights(self) -> Weights: ...

    def active(self) -> Callable[..., Any]:
        """Return the net, called with the name of a pass and its arguments."""


def score(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    warp: Warp,
    vocab: int,
    entropy: bool,
    place: Tensor | None = None,
    compiled: ScoreChunk | None = None,
) -> Scored:
    """Compute log-probs of ``targets`` [N] at ``hidden`` [N, H], at least float32, in chunks.
    ``place`` [N]: of each in its answer, where the warp has a schedule. ``compiled`` scores a chunk
    by the same head and warp.

    More than one chunk is recomputed in the backward pass, so that logits of one chunk only are
    ever kept: memory does not grow with the number of decisions times the vocabulary.
    """
    size = max(1, BYTES // (4 * vocab))

    places = place_of(hidden, place)

    def score_chunk(h: Tensor, ids: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return scored(warp(head(h), keep=ids, place=at), ids, entropy)

    score_part = compiled or score_chunk
    if len(hidden) <= size:
        parts = [score_part(hidden, targets, places)]
    else:
        parts = [
            _again(score_part, hidden[part], targets[part], places[part])
            for part in chunks(len(hidden), size)
        ]
    logprob, spread = (torch.cat(part) for part in zip(*parts, strict=True))
    return Scored(logprob, spread if entropy else None)


def scored(warped: Tensor, ids: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
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
    the uniform distribution. Impossible tokens (-inf) are left out of both.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    possible = ~x.isneginf()
    count = possible.sum(-1)
    return x.logsumexp(-1) - x.masked_fill(~possible, 0).sum(-1) / count - count.to(x.dtype).log()


def recorded(names: Sequence[str], logits: Tensor, warped: Tensor) -> Tensor:
    """Measure each distribution that tokens are drawn from, [*, R], R = len(names): its "entropy"
    after all warping, or the "self_certainty" of the model's own logits [*, V]."""
    values = {
        "entropy": lambda: Categorical(warped).entropy(),
        "self_certainty": lambda: certainty(logits),
    }
    if not names:
        return warped.new_zeros(*warped.shape[:-1], 0)
    return torch.stack([values[name]() for name in names], -1)


def group_divergence(
    logits: Callable[[slice], Tensor], where: Tensor, vocab: int, warp: Warp | None = None
) -> Tensor:
    """Compute the mean over a group's G rows of KL(p_i || mean of the p_j) at each of L places,
    [L], nats.

    ``logits`` makes those [G, n, V] of a slice of places; a row is uniform where ``where`` [G, L]
    is False (it has ended).
    """
    spreads = []
    uniform = -math.log(vocab)
    for part in chunks(where.shape[1], max(1, BYTES // (8 * vocab * len(where)))):
        x = logits(part)
        if warp is not None:
            place = torch.arange(part.start, part.start + x.shape[1], device=x.device)
            x = warp(x, place=place.expand(x.shape[:2]))
        p = torch.where(where[:, part, None], x.double().log_softmax(-1), uniform)
        mean = p.exp().mean(0)
        each = (p.exp() * p.masked_fill(p.isneginf(), 0)).sum(-1).mean(0)
        spreads.append(each - torch.xlogy(mean, mean).sum(-1))
    return torch.cat(spreads)


def full(hidden: Tensor, head: Head, warp: Warp, vocab: int, place: Tensor | None = None) -> Tensor:
    """Compute log-probs of all tokens [N, V], for an exact KL; unlike ``score`` this holds them all
    in memory."""
    places = place_of(hidden, place)
    parts = _parts(hidden, vocab)
    return torch.cat(
        [warp(head(hidden[part]), place=places[part]).log_softmax(-1) for part in parts]
    )


def kl(
    hidden: Tensor,
    reference: Tensor,
    head: Head,
    warp: Warp,
    by: Divergence = REVERSE,
    place: Tensor | None = None,
) -> Tensor:
    """Compute KL(self || reference) [N], or another divergence, at ``hidden`` [N, H], for the
    reference's log-probs of all tokens [N, V].

    Models with the same tokenizer may have embedding tables of different length, since large ones
    are padded to a round number: both distributions are then restricted to the shared tokens.
    """

    places = place_of(hidden, place)

    def kl_chunk(h: Tensor, q: Tensor, at: Tensor) -> Tensor:
        logits = warp(head(h), place=at)
        common = min(logits.shape[-1], q.shape[-1])
        p = logits[..., :common].log_softmax(-1)
        if q.shape[-1] > common:
            q = q[..., :common].log_softmax(-1)
        if by.kind != "reverse":
            return by.of_logprobs(p, q)
        never = p.isneginf() | q.isneginf()  # the same suppressed tokens in both
        return (p.exp() * (p.masked_fill(never, 0) - q.masked_fill(never, 0))).sum(-1)

    parts = _parts(hidden, reference.shape[-1])
    return torch.cat(
        [_again(kl_chunk, hidden[part], reference[part], places[part]) for part in parts]
    )


def _parts(hidden: Tensor, vocab: int) -> list[slice]:
    """Split N decisions into chunks whose logits fit; one empty chunk if N is 0, since with sharded
    weights all processes call the head."""
    return [*chunks(len(hidden), max(1, BYTES // (4 * vocab)))] or [slice(0, 0)]


def place_of(hidden: Tensor, place: Tensor | None) -> Tensor:
    """Return the places [N] in their answers of decisions at hidden states [N, H]; 0 where none are
    known; only warps with a schedule use them."""
    if place is not None:
        return place
    return torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)


def _again(fn: Callable[..., Any], *arguments: Tensor) -> Any:
    """Call ``fn(*arguments)`` with gradient checkpointing."""
    return (
        checkpoint(fn, *arguments, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else fn(*arguments)
    )
