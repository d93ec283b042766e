"""Scores a vision-language policy's own answers: with and without the question, and by a token
after the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmrl.core.decisions import behind, judged
from mmrl.core.errors import UserError
from mmrl.core.types import Rollout
from samplers.warp import Warp

if TYPE_CHECKING:
    from mmrl.policies.vlm.scoring import Passes


@torch.no_grad()
def question_gain(policy: Passes, rollout: Rollout, size: int) -> Tensor:
    """Compute log p(token | question) - log p(token | empty question) of all tokens [B, T], nats,
    of the whole distribution at temperature 1, in passes of ``size`` rows."""
    empty, _ = policy._encoded({"text": ""})
    plain = Warp(suppressed=policy.warp.suppressed)
    as_sampled = policy.warp == plain and rollout.provenance.sampler_logprob is None
    gains = []
    with _warped(policy, plain):
        for part, counts in policy.pass_sizes.chunks(len(rollout), size):
            rows = rollout[part]
            with_question = rows.logprob if as_sampled else policy._scored(rows).logprob
            alone = rows.replace(cond=[empty], group=torch.zeros_like(rows.group))
            gain = with_question - policy._scored(alone).logprob
            gains += [gain] if counts else []
    return torch.where(rollout.mask, torch.cat(gains), 0.0)


@torch.no_grad()
def last_logprob(policy: Passes, rollout: Rollout, size: int) -> Tensor:
    """Compute the log-prob [B] of the token ``self_score_id`` after every answer, nats."""
    scores = []
    for part, counts in policy.pass_sizes.chunks(len(rollout), size):
        (point,) = policy.path(rollout[part])
        longer = judged(point, policy.self_score_id or 0)
        logprob = policy.dist(longer).log_prob(longer.target)
        scores += [behind(point.mask, logprob)] if counts else []
    return torch.cat(scores).to(rollout.logprob)


def token_id(policy: Passes, text: str) -> int:
    """Look up the token by which the policy scores itself. UserError where it does not exist or is
    never sampled."""
    tokens = policy.inputs.tokens(text)
    ids = [token for token in tokens or () if token not in policy.inputs.stops]
    if len(ids) != 1:
        raise UserError(
            f"policy.vlm.self_score {text!r} must be one token that the model may write; it is "
            f"{len(ids)} tokens or one of those that are never sampled"
        )
    return ids[0]


@contextmanager
def _warped(policy: Passes, warp: Warp) -> Iterator[None]:
    before = policy.warp
    policy.warp = warp
    try:
        yield
    finally:
        policy.warp = before


def with_self_scores(policy: Passes, rollout: Rollout, size: int) -> Rollout:
    """Record what the options ``record_question_gain`` and ``self_score`` request."""
    order = rollout.tokens
    if policy.record_question_gain:
        order = order.replace(question_gain=question_gain(policy, rollout, size))
    if policy.self_score_id is not None:
        order = order.replace(last_logprob=last_logprob(policy, rollout, size))
    return rollout.replace(trajectory=order)
