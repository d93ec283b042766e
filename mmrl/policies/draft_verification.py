"""Verifies earlier answers under the current weights and keeps the accepted prefixes: speculative
rollouts (SPEC-RL)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core.distributions import Categorical
from mmrl.core.errors import UserError
from mmrl.core.sharding import sharded
from mmrl.core.types import Fields, Rollout, TokenOrder
from mmrl.policies.base import Drafts
from samplers.batching import chunks
from samplers.noise import Rng

FREE = -1  # a token that is still to be drawn
SHARDED = (
    "train.stages.speculative: how many passes an answer needs depends on its draft, and processes "
    "that share their weights must make them together: leave it out"
)


@dataclass(frozen=True, kw_only=True)
class Forced(Fields):
    """Holds the accepted prefix of each row."""

    ids: Tensor  # [B, T] long, FREE from the first token that is to be drawn
    logprob: Tensor  # [B, T] of the kept tokens under the current weights, 0 elsewhere

    def length(self) -> Tensor:
        """Return how many tokens every row keeps, [B] long."""
        return (self.ids != FREE).sum(1)


def drafted(drafts: Drafts, group: Tensor, row: Tensor, cond: Any) -> Rollout:
    """Make a rollout whose samples are the drafts, to be scored."""
    order = torch.arange(drafts.ids.shape[1], device=row.device).expand_as(drafts.ids)
    return Rollout(
        group=group,
        cond=cond,
        row_id=row,
        sample=drafts.ids,
        logprob=drafts.logprob,
        mask=drafts.mask,
        trajectory=TokenOrder(commit_step=order),
    )


@torch.no_grad()
def verified(policy: Any, rows: Rollout, drafts: Drafts, rng: Rng, size: int) -> Forced:
    """Keep the tokens of drafts up to the first that is rejected, of a policy that makes logits of
    all places.

    A token x that q sampled is kept with probability min(1, lenience p(x) / q(x)). Where ``full``
    is known the rejected one is replaced by a draw from max(0, p - q), so that with lenience 1
    every token is one of p (Leviathan et al. 2023); else what follows is sampled from p, as SPEC-RL
    publishes it. ``rows``: a rollout whose samples are the drafts.
    """
    if sharded(policy.net):
        raise UserError(SHARDED)
    parts = [
        _verified(policy, rows[part], _part(drafts, part), rng) for part in chunks(len(rows), size)
    ]
    forced = Forced.cat([each for each, _ in parts])
    counts = torch.cat([count for _, count in parts])
    drafts.accepted.append(torch.stack([counts, drafts.mask.sum(1)], 1).cpu())
    return forced


def resized(drafts: Drafts, length: int) -> Drafts:
    """Cut or pad drafts to that many tokens."""
    if drafts.ids.shape[1] >= length:
        return drafts.map(lambda x: x[:, :length] if x.ndim > 1 else x)

    def pad(x: Tensor) -> Tensor:
        room = x.new_zeros(len(x), length - x.shape[1], *x.shape[2:]) if x.ndim > 1 else x
        return x if x.ndim == 1 else torch.cat([x, room], 1)

    return drafts.map(pad)


@torch.no_grad()
def all_logprobs(policy: Any, rollout: Rollout, size: int) -> Tensor:
    """Return the log-probs [B, T, V] of all tokens at every place under the current weights, in
    passes of ``size`` rows; 0 where there is no decision."""
    parts = []
    for part in chunks(len(rollout), size):
        (point,) = policy.path(rollout[part])
        dist = policy.dist(point)
        if isinstance(dist, Categorical):
            parts.append(dist.logits.log_softmax(-1))
            continue
        places = (dist.where.nonzero()[:, 1],) if dist.warp.schedule else ()
        each = policy.active()("full", dist.hidden, dist.warp, *places)
        table = each.new_zeros(*dist.where.shape, each.shape[-1])
        table[dist.where] = each
        parts.append(table)
    return torch.cat(parts)


def _part(drafts: Drafts, part: slice) -> Drafts:
    return drafts.map(lambda tensor: tensor[part])


def _verified(policy: Any, rows: Rollout, drafts: Drafts, rng: Rng) -> tuple[Forced, Tensor]:
    (point,) = policy.path(rows)
    dist = policy.dist(point)
    logp = dist.log_prob(point.target)

    def all_tokens(chosen: Tensor, at: Tensor) -> Tensor:
        logprobs: Tensor = dist.logits[chosen, at].log_softmax(-1)
        return logprobs

    return accepted(logp, drafts, rows.row_id, rng, all_tokens)


def accepted(
    logp: Tensor,
    drafts: Drafts,
    names: Tensor,
    rng: Rng,
    all_tokens: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Forced, Tensor]:
    """Accept prefixes of drafts whose tokens have the log-probs ``logp`` [B, T] now, and return
    their lengths [B]. ``all_tokens`` returns the log-probs [n, V] of all tokens of rows at
    places."""
    length = drafts.ids.shape[1]
    u = rng.fold("verify").uniform(names, (length,)).to(logp)
    gap = logp - drafts.logprob.to(logp) + drafts.lenience.to(logp).log()[:, None]
    passed = drafts.mask & (u.log() <= gap)
    count = passed.long().cumprod(1).sum(1)
    place = torch.arange(length, device=count.device)
    kept_tokens = place < count[:, None]
    ids = torch.where(kept_tokens, drafts.ids, FREE)
    logprob = torch.where(kept_tokens, logp, 0.0)
    rejected = (count < drafts.mask.sum(1)).nonzero()[:, 0]
    if drafts.full is not None and len(rejected):
        at = count[rejected]
        p = all_tokens(rejected, at).double().exp()
        q = drafts.full[rejected, at].to(p).exp()
        left = (p - q).clamp_min(0)
        left = torch.where(left.sum(-1, keepdim=True) > 0, left, p)
        draw = rng.fold("residual").uniform(names[rejected], (1,))[:, 0]
        token = Categorical(left.log()).sample(draw)
        ids[rejected, at] = token
        logprob[rejected, at] = p.gather(-1, token[:, None])[:, 0].log().to(logprob)
    return Forced(ids=ids, logprob=logprob), count
