"""Samples images that share a prefix: their first blocks are drawn once for several rows, which
then continue separately."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmrl.core.host import sent
from mmrl.core.types import Rollout, TokenOrder
from mmrl.policies.image_tokens.network import Inputs, spans
from samplers.noise import Rng

if TYPE_CHECKING:
    from mmrl.policies.image_tokens.policy import ImageTokenPolicy


@torch.no_grad()
def grow(
    policy: ImageTokenPolicy,
    cond: list[Inputs],
    group: Tensor,
    row: Tensor,
    rng: Rng,
    at: int,
    images: int,
) -> Rollout:
    """Sample the rows of ``group`` [B], where ``images`` adjacent rows share their first ``at``
    blocks.

    The shared blocks are those the first row would have alone. ``branch`` names the edges by rows;
    a shared decision is in the mask of the first row.
    """
    leads = row[torch.arange(len(row), device=row.device) // images * images]
    tokens, logprob, values = _drawn(policy, cond, group, row, rng, at, images)
    order = policy.blocks_of(tokens)
    branch = torch.where(order < at, leads[:, None], row[:, None])
    rollout = Rollout(
        group=group,
        cond=cond,
        row_id=row,
        sample=tokens,
        logprob=logprob,
        trajectory=TokenOrder(commit_step=order.expand_as(tokens)),
        mask=policy.decided(tokens) & (branch == row[:, None]),
        edge_id=branch,
    )
    return policy.with_recorded(rollout, values)


def _drawn(
    policy: ImageTokenPolicy,
    cond: list[Inputs],
    group: Tensor,
    row: Tensor,
    rng: Rng,
    at: int,
    images: int,
) -> tuple[Tensor, ...]:
    """Draw the tokens, their log-probs and the values that advantages need, [B, L] each."""
    net = policy.net
    first = torch.arange(0, len(row), images, device=row.device)
    of = torch.arange(len(first), device=row.device).repeat_interleave(images)[: len(row)]
    hidden, state = policy.read(cond, group[first])
    uniform = rng.uniform(row, (sum(net.turns),))
    scale = sent(policy.scales(policy.guidance_scale), row.device)
    ids: list[Tensor] = []
    scores: list[Tensor] = []
    values: list[Tensor] = []
    for k, block in enumerate(spans(net.turns)):
        if k:
            hidden = net("step", ids[-1], state)
        if k == at:
            guided = policy.guidance_scale != 1
            every = torch.cat([of, of + len(first)]) if guided else of
            hidden = hidden[every]
            ids, scores, values = ([step[of] for step in x] for x in (ids, scores, values))
            net("fork", state, every)
        policy.report.forwards += len(hidden)
        draw = uniform[first] if k < at else uniform
        token, score, value = policy.draw_block(hidden, scale[block], draw[:, block], block)
        ids.append(token)
        scores.append(score)
        values.append(value)
    return torch.cat(ids, 1), torch.cat(scores, 1), torch.cat(values, 1)
