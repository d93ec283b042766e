"""Starts images with the accepted prefix of drafts (SPEC-RL): one pass reads the whole drafts, and
every row is sampled from the first block with a rejected token on, reusing that pass's KV cache."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mmrl.core.host import sent
from mmrl.core.types import Rollout, TokenOrder
from mmrl.policies.base import Drafts, LogprobGuidance, Report
from mmrl.policies.draft_verification import Forced, accepted
from mmrl.policies.image_tokens.network import Inputs, beside, spans, stacked
from mmrl.policies.scores import BYTES, recorded
from samplers.batching import chunks
from samplers.noise import Rng
from samplers.warp import Warp


class DrawsBlocks(Protocol):
    """Defines what a policy of image tokens provides."""

    net: Any
    warp: Warp
    guidance_scale: float
    logprob_guidance: LogprobGuidance

    @property
    def report(self) -> Report: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def quantities(self) -> tuple[str, ...]:
        """Return the recorded quantities of every decision."""

    def collate(self, cond: list[Inputs]) -> Inputs: ...

    def empty(self, inputs: Inputs) -> Inputs: ...

    def scales(self, guidance: float) -> Tensor: ...

    def blocks_of(self, ids: Tensor) -> Tensor: ...

    def decided(self, ids: Tensor) -> Tensor: ...

    def with_recorded(self, rollout: Rollout, values: Tensor) -> Rollout: ...

    def draw_block(self, *arguments: Any, **options: Any) -> Any: ...


class Reading:
    """Holds drafts [B, T] that have been read in one pass; with guidance each row is followed by
    its unconditional one."""

    def __init__(self, policy: DrawsBlocks, cond: list[Inputs], group: Tensor, ids: Tensor):
        unique, rows = group.unique(return_inverse=True)
        inputs = policy.collate([cond[i] for i in unique.tolist()])
        self.guided = policy.guidance_scale != 1
        self.policy = policy
        if self.guided:
            inputs = stacked(inputs, policy.empty(inputs))
            rows = torch.stack([rows, rows + len(unique)], 1).flatten()
        first, self.state = policy.net("begin", inputs, rows)
        later = policy.net("extend", self.each(ids), self.state)
        self.hidden = torch.cat([first, later], 1)  # [B, T, H], with guidance [2B, T, H]
        self.scale = sent(policy.scales(policy.guidance_scale), group.device)

    def each(self, ids: Tensor) -> Tensor:
        """Repeat per-row values for the rows of the network."""
        return ids.repeat_interleave(2, 0) if self.guided else ids

    def rows(self, index: Tensor) -> Tensor:
        """Return the network rows of these rows."""
        return torch.stack([2 * index, 2 * index + 1], 1).flatten() if self.guided else index

    def features(self, scored: bool) -> Tensor:
        """Return the features [B, T, *] that tokens are drawn from, or that are ``scored``."""
        if not self.guided:
            return self.hidden
        cond = self.hidden[0::2]
        if scored and self.policy.logprob_guidance == "conditional":
            return cond
        return beside(cond, self.hidden[1::2], self.scale)

    def verify(self, drafts: Drafts, row: Tensor, rng: Rng) -> tuple[Forced, Tensor]:
        """Keep the tokens of every draft up to the first that is rejected, and count them, [B]."""
        policy = self.policy
        features = self.features(scored=True)
        at, place = drafts.mask.nonzero(as_tuple=True)
        scored = policy.net(
            "rescore", features[at, place], drafts.ids[at, place], policy.warp, False, place
        )
        logp = scored.logprob.new_zeros(drafts.ids.shape)
        logp[at, place] = scored.logprob

        def all_tokens(rows: Tensor, places: Tensor) -> Tensor:
            logprobs: Tensor = policy.net("full", features[rows, places], policy.warp, places)
            return logprobs

        return accepted(logp, drafts, row, rng, all_tokens)

    def values(self, kept_mask: Tensor) -> Tensor:
        """Return the quantities [N, R] of the N tokens that ``kept_mask`` [B, T] holds."""
        policy = self.policy
        features = self.features(scored=False)
        at, place = kept_mask.nonzero(as_tuple=True)
        size = max(1, BYTES // (4 * policy.net.vocab))
        parts = []
        for part in chunks(len(at), size):
            logits = policy.net("logits", features[at[part], place[part]])
            parts.append(
                recorded(policy.quantities, logits, policy.warp(logits, place=place[part]))
            )
        return torch.cat(parts)


class Drawn(NamedTuple):
    """Holds the tokens of B rows, with their recorded quantities."""

    ids: Tensor  # [B, T] long
    logprob: Tensor  # [B, T]
    values: Tensor  # [B, T, R]

    def taken(self, rows: Tensor) -> Drawn:
        return Drawn(*(column[rows] for column in self))

    def put(self, block: slice, columns: tuple[Tensor, Tensor, Tensor]) -> None:
        """Set the tokens of a block in the first rows."""
        for whole, column in zip(self, columns, strict=True):
            whole[: len(column), block] = column.to(whole)


@torch.no_grad()
def speculate(
    policy: DrawsBlocks,
    cond: list[Inputs],
    group: Tensor,
    row: Tensor,
    rng: Rng,
    drafts: Drafts,
    size: int,
) -> tuple[Rollout, Tensor]:
    """Sample the rows of ``group`` [B], ``size`` at a time, after the accepted prefixes of drafts;
    also count accepted tokens, [B]."""
    parts = []
    for part in chunks(len(row), size):
        few = drafts.map(partial(_rows, part=part))
        parts.append(_speculated(policy, cond, group[part], row[part], rng, few))
    return Rollout.cat([rollout for rollout, _ in parts]), torch.cat([count for _, count in parts])


def _rows(x: Tensor, part: slice) -> Tensor:
    return x[part]


def _speculated(
    policy: DrawsBlocks,
    cond: list[Inputs],
    group: Tensor,
    row: Tensor,
    rng: Rng,
    drafts: Drafts,
) -> tuple[Rollout, Tensor]:
    reading = Reading(policy, cond, group, drafts.ids)
    forced, count = reading.verify(drafts, row, rng)
    ids = drafts.ids.clone()
    kept_mask = torch.arange(ids.shape[1], device=ids.device) < count[:, None]
    logprob = torch.where(kept_mask, forced.logprob, 0.0).to(policy.dtype)
    values = logprob.new_zeros(*ids.shape, len(policy.quantities))
    if policy.quantities and kept_mask.any():
        values[kept_mask] = reading.values(kept_mask).to(values)
    drawn = Drawn(ids, logprob, values)
    passed = _continued(reading, forced.ids, count, rng.uniform(row, (ids.shape[1],)), drawn)
    policy.report.forwards += len(reading.hidden) + passed
    order = policy.blocks_of(ids).expand_as(ids)
    rollout = Rollout(
        group=group,
        cond=cond,
        row_id=row,
        sample=ids,
        logprob=logprob,
        mask=policy.decided(ids),
        trajectory=TokenOrder(commit_step=order),
    )
    return policy.with_recorded(rollout, values), count


def _continued(
    reading: Reading, forced: Tensor, count: Tensor, uniform: Tensor, drawn: Drawn
) -> int:
    """Sample every row from the first block that is not fully accepted; return how many rows went
    through the network. Rows join in the order of these blocks, all in lockstep."""
    policy = reading.policy
    net = policy.net
    blocks = list(spans(net.turns))
    order, starts = _unfinished(count, [block.stop for block in blocks])
    if not starts:
        return 0
    if net.fixed:  # passes of one shape
        starts = [starts[0]] * len(starts)
    rows = reading.rows(order)
    part = drawn.taken(order)
    master = net("back", reading.state, rows, len(blocks) - 1, reading.each(part.ids))
    verified = reading.hidden[rows]
    wide = 1 + reading.guided
    active = passed = 0
    state = None
    for number, block in enumerate(blocks):
        joined = bisect_right(starts, number)
        hidden = verified[wide * active : wide * joined, block]
        if active:
            before = reading.each(part.ids[:active, blocks[number - 1]])
            hidden = torch.cat([net("step", before, state), hidden])
            passed += wide * active
        if joined > active:
            active = joined
            ids = reading.each(part.ids[:active])
            state = net("back", master, slice(0, wide * active), number, ids)
        if active:
            halves = torch.cat([hidden[0::2], hidden[1::2]]) if reading.guided else hidden
            noise = uniform[order[:active], block]
            known = forced[order[:active], block]
            scale = reading.scale[block]
            part.put(block, policy.draw_block(halves, scale, noise, block, known))
    for whole, column in zip(drawn, part, strict=True):
        whole[order] = column
    return passed


def _unfinished(count: Tensor, ends: list[int]) -> tuple[Tensor, list[int]]:
    """Order the rows that lack blocks by the first block that is not fully accepted; return their
    places and these blocks."""
    start = (count[:, None] >= torch.tensor(ends, device=count.device)).sum(1)
    order = start.argsort(stable=True)
    order = order[start[order] < len(ends)]
    return order, start[order].tolist()
