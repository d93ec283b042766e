"""Starts answers with the accepted prefix of drafts (SPEC-RL): one pass reads a whole draft, and
sampling continues after the last accepted token, reusing that pass's KV cache."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmrl.policies.base import Drafts
from mmrl.policies.draft_verification import Forced, accepted
from mmrl.policies.scores import BYTES, recorded
from mmrl.policies.vlm import caches
from mmrl.policies.vlm.caches import KV
from mmrl.policies.vlm.generate import Answers, Task, generate
from mmrl.policies.vlm.prefixes import Prefix
from mmrl.policies.vlm.trees import Source, gathered
from samplers.batching import chunks


class Reading:
    """Holds drafts [B, T] that have been read in one pass after their prompts."""

    def __init__(self, task: Task, drafts: Drafts):
        prefix = task.prefix
        self.task = task
        self.drafts = drafts
        length = int((drafts.mask * torch.arange(1, drafts.mask.shape[1] + 1).to(task.rows)).max())
        to_read = drafts.ids[:, : min(length, task.ending.tokens - 1)]
        cache = caches.growing(prefix.key_values, task.rows)
        self.mask = prefix.mask[task.rows]
        self.following = prefix.following[task.rows]
        self.hidden = prefix.hidden[task.rows][:, None]  # [B, L + 1, H] after L tokens
        if to_read.shape[1]:
            later = task.net("step", to_read, self.following, self.mask, cache)
            self.hidden = torch.cat([self.hidden, later], 1)
        self.key_values: list[KV] = caches.key_values(cache)
        self.row, self.place = drafts.mask.nonzero(as_tuple=True)  # of all tokens of drafts

    def verify(self) -> tuple[Forced, Tensor]:
        """Keep the tokens of every draft up to the first that is rejected, and count them, [B]."""
        task = self.task
        ids = self.drafts.ids[self.row, self.place]
        hidden = self.hidden[self.row, self.place]
        at = self.place if task.warp.schedule else None
        logp = self.drafts.logprob.new_zeros(self.drafts.ids.shape, dtype=torch.float32)
        if len(ids):
            scored = task.net("rescore", hidden, ids, task.warp, False, at)
            logp = logp.to(scored.logprob)
            logp[self.row, self.place] = scored.logprob
        return accepted(logp, self.drafts, task.names, task.rng, self._everything)

    def values(self, kept_mask: Tensor) -> Tensor:
        """Return the quantities [N, R] of the N tokens that ``kept_mask`` [B, T] holds."""
        task = self.task
        row, place = kept_mask.nonzero(as_tuple=True)
        size = max(1, BYTES // (4 * task.net.head.vocabulary))
        parts = []
        for part in chunks(len(row), size):
            logits = task.net("logits", self.hidden[row[part], place[part]])
            warped = task.warp(logits, place=place[part]).log_softmax(-1)
            parts.append(recorded(task.ending.quantities, logits, warped))
        return torch.cat(parts)

    def begun(self, rows: Tensor, start: Tensor) -> Prefix:
        """Return the first ``start`` [N] tokens of ``rows`` [N], with their prompts, as prompts
        already read."""
        width = self.mask.shape[1]
        ends = (width + start).tolist()
        origins = [(0, row) for row in rows.tolist()]
        key_values, mask = gathered([Source(self.key_values, self.mask)], origins, ends)
        return Prefix(self.hidden[rows, start], mask, self.following[rows] + start, key_values)

    def _everything(self, rows: Tensor, places: Tensor) -> Tensor:
        at = places if self.task.warp.schedule else None
        full: Tensor = self.task.net("full", self.hidden[rows, places], self.task.warp, at)
        return full


@torch.no_grad()
def speculate(task: Task, drafts: Drafts) -> Answers:
    """Answer the prompts of the task from the accepted prefixes of ``drafts``. Fully accepted
    answers are not sampled further; where stop strings may end them, their last token is drawn
    again, as it is."""
    ending = task.ending
    reading = Reading(task, drafts)
    forced, count = reading.verify()
    last = drafts.ids.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
    ended = torch.isin(last, torch.tensor(ending.stops, device=last.device)) & (count > 0)
    finished = ended | (count == ending.tokens)
    start = count
    if ending.strings:
        start = torch.where(count == drafts.mask.sum(1), (count - 1).clamp_min(0), count)
        finished = torch.zeros_like(finished)
    done = task.blank()
    done.num_accepted = count
    kept_mask = torch.arange(ending.tokens, device=start.device) < start[:, None]
    done.ids = torch.where(kept_mask, drafts.ids, done.ids)
    done.mask = kept_mask
    done.logprob = torch.where(kept_mask, forced.logprob.to(done.logprob), 0.0)
    if ending.quantities and kept_mask.any():
        done.values[kept_mask] = reading.values(kept_mask).to(done.values)
    left = (~finished).nonzero()[:, 0]
    if len(left):
        further = replace(
            task,
            prefix=reading.begun(left, start[left]),
            rows=torch.arange(len(left), device=left.device),
            names=task.names[left],
            ending=replace(ending, forced=forced.ids[left]),
            start=start[left],
        )
        done.put(left, generate(further, done=done.taken(left)))
    return done
