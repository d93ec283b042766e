"""Samples more answers than a pass has rows: where one ends, the next begins (Infinite Sampling).

Wang et al. 2025, "Infinite Sampling": a group is written in micro groups whose rows are refilled
while the others go on, so that memory does not grow with the group and no row waits for the
longest. Every answer is drawn by its own random numbers: it is the same whatever writes beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.core.host import sent
from mmrl.policies.scores import recorded
from mmrl.policies.vlm import caches
from mmrl.policies.vlm.generate import COMPACT, Answers, Drawn, Ending, blank, draw
from samplers.noise import Rng
from samplers.warp import Warp

if TYPE_CHECKING:
    from mmrl.policies.vlm.prefix_sharing import Prefix, SharedPrefix

Refill = Literal["none", "rows", "longest", "shortest"]


class Slots(NamedTuple):
    """Says how many rows a pass has, and which row takes the place of one that has ended."""

    rows: int
    order: Refill
    # takes whether this process still works and tells whether any does, where all must make
    # equally many passes
    busy: Callable[[bool], bool] | None = None


class Queue:
    """Holds the rows that wait for a place, and says which is next.

    ``order``: as they stand, or those whose prompt's answers have been longest, or shortest, on
    average so far; before, the first answer to a prompt none of whose answers has ended.
    """

    def __init__(self, prompts: list[int], order: Refill):
        self.prompts = prompts  # of every row
        self.order = order
        self.waiting = list(range(len(prompts)))
        self.lengths: dict[int, list[int]] = {}
        counts: dict[int, int] = {}
        self.copy = []  # how many answers to its prompt stand before each row
        for prompt in prompts:
            self.copy.append(counts.get(prompt, 0))
            counts[prompt] = self.copy[-1] + 1

    def ended(self, rows: list[int], lengths: list[int]) -> None:
        """Learn how long answers were."""
        for row, length in zip(rows, lengths, strict=True):
            self.lengths.setdefault(self.prompts[row], []).append(length)

    def take(self, count: int) -> list[int]:
        """Return the next rows, at most ``count``."""
        if self.order != "rows":
            self.waiting.sort(key=self._rank)
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def _rank(self, row: int) -> tuple[int, float, int]:
        known = self.lengths.get(self.prompts[row])
        if not known:
            return (0, float(self.copy[row]), row)
        return (1, fmean(known) * (1 if self.order == "shortest" else -1), row)


@torch.no_grad()
def generate_refilled(
    net: SharedPrefix,
    prefix: Prefix,
    rows: Tensor,
    names: Tensor,
    rng: Rng,
    warp: Warp,
    ending: Ending,
    slots: Slots,
) -> Answers:
    """Answer the prompts of ``rows`` [B] with at most ``slots.rows`` of them in a pass; the rest
    is as in ``generate``."""
    busy = slots.busy
    routing = net.routing
    done = blank(names, ending, net.hf, routing.width if routing else 0)
    queue = Queue(rows.tolist(), slots.order)
    work = _Work(net, prefix, rows, names, rng, warp, ending)
    work.enter(queue.take(slots.rows))
    while True:
        drawn = work.draw()
        going = work.write(done, drawn)
        left = int(going.sum())
        waits = bool(queue.waiting)
        if not (busy(left > 0 or waits) if busy else left or waits):
            return done
        if left or busy is not None:
            work.advance(drawn.token)
            if routing is not None:
                real = ~work.idle
                done.routes[work.at[real], work.step[real]] = routing.last()[real]
        work.step = work.step + 1
        if left <= COMPACT * len(work.at) or (waits and left < len(work.at)):
            ended = work.at[~work.going & ~work.idle]
            queue.ended(ended.tolist(), done.mask[ended].sum(1).tolist())
            work.enter(queue.take(slots.rows - left))


class _Work:
    """Holds the rows that are being written, each at a step of its own."""

    def __init__(
        self,
        net: SharedPrefix,
        prefix: Prefix,
        rows: Tensor,
        names: Tensor,
        rng: Rng,
        warp: Warp,
        ending: Ending,
    ):
        self.net = net
        self.prefix = prefix
        self.rows = rows
        self.names = names
        self.rng = rng
        self.warp = warp
        self.ending = ending
        none = rows[:0]
        self.at = none  # [B'] which row each one is
        self.step = none  # [B'] tokens it has
        self.going = none.bool()
        self.idle = none.bool()  # only there because every process makes its passes
        self.place = prefix.following[none]
        self.mask = prefix.mask[none]
        self.hidden = prefix.hidden[none]
        self.noise = rng.uniform(names[none], (ending.tokens,))
        self.cache = caches.growing(prefix.key_values, none)

    def enter(self, new: list[int]) -> None:
        """Drop the rows that have ended, and begin ``new`` ones."""
        left = self.going.nonzero()[:, 0]
        if not len(left) and not new:  # other processes still work: one row goes on for nothing
            left = torch.zeros_like(self.at[:1])
        at = sent(torch.tensor(new, dtype=torch.long), self.rows.device)
        rows = self.rows[at]
        prefix = self.prefix
        longest = int(self.mask[left].sum(1).max()) if len(left) else 0
        width = max(longest, prefix.mask.shape[1] if new else 0)
        caches.refill(self.cache, left, prefix.key_values, rows, width)
        self.mask = torch.cat([fit(self.mask[left], width), fit(prefix.mask[rows], width)])
        # passed on, or transformers waits for the device at every token
        self.whole = bool(self.mask.all())
        self.idle = torch.cat([~self.going[left], torch.zeros_like(at, dtype=torch.bool)])
        self.going = torch.cat([self.going[left], torch.ones_like(at, dtype=torch.bool)])
        self.step = torch.cat([self.step[left], torch.zeros_like(at)])
        self.at = torch.cat([self.at[left], at])
        self.place = torch.cat([self.place[left], prefix.following[rows]])
        self.hidden = torch.cat([self.hidden[left], prefix.hidden[rows]])
        noise = self.rng.uniform(self.names[at], (self.ending.tokens,))
        self.noise = torch.cat([self.noise[left], noise])

    def draw(self) -> Drawn:
        step = self.step.clamp(max=self.ending.tokens - 1)
        uniform = self.noise.gather(1, step[:, None])[:, 0] if self.warp.temperature else None
        return draw(self.net("logits", self.hidden), self.warp, uniform, self.step)

    def write(self, done: Answers, drawn: Drawn) -> Tensor:
        """Add one token to every row that goes on; returns which still do, [B'] bool."""
        rows = self.at[self.going]
        step = self.step[self.going]
        done.ids[rows, step] = drawn.token[self.going]
        done.logprob[rows, step] = drawn.logprob[self.going].to(done.logprob)
        done.mask[rows, step] = True
        if self.ending.quantities:
            values = recorded(self.ending.quantities, drawn.logits, drawn.warped)
            done.values[rows, step] = values[self.going].to(done.values)
        window = self.ending.window if self.ending.strings else 1
        columns = self.step[:, None] + torch.arange(1 - window, 1, device=self.step.device)
        last = done.ids[self.at].gather(1, columns.clamp(0, self.ending.tokens - 1))
        last = last.masked_fill(columns < 0, self.ending.pad)
        going, _ = self.ending.going(last, self.going)
        self.going = going & (self.step + 1 < self.ending.tokens)
        return self.going

    def advance(self, token: Tensor) -> None:
        """Make one pass: update the hidden states by ``token`` [B']."""
        step = self.net("step", token[:, None], self.place, self.mask, self.cache, self.whole)
        self.hidden = step[:, -1]
        self.mask = F.pad(self.mask, (0, 1), value=True)
        self.place = self.place + 1


def fit(mask: Tensor, width: int) -> Tensor:
    """Cut or pad a mask [B, S] on the left to ``width`` columns."""
    length = mask.shape[1]
    return mask[:, length - width :] if length >= width else F.pad(mask, (width - length, 0))
