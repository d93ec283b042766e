"""Answers token by token: a prompt is read once, its copies share keys and values, finished rows leave the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from samplers.noise import Rng
from samplers.warp import Warp

from ...dists import Categorical
from . import caches
from .prefix import Prefix

COMPACT = 0.75  # rows leave the batch when at most this share of it is still at work
AHEAD = 64  # steps whose random numbers are drawn at once


@dataclass(frozen=True)
class Ending:
    """When an answer ends: at a stop token, after a stop string, at ``tokens`` tokens."""

    tokens: int
    stops: tuple[int, ...]
    pad: int
    strings: tuple[str, ...] = ()
    decode: Callable[[list[int]], str] | None = None

    def ended(self, ids: Tensor, count: int) -> Tensor:
        """[B] bool, by the last of the ``count`` tokens written, and by what they spell."""
        last = ids[:, count - 1]
        found = torch.zeros_like(last, dtype=torch.bool)
        for stop in self.stops:
            found |= last == stop
        if self.strings:
            window = 2 * max(map(len, self.strings)) + 4  # a character has at most four tokens, most have one
            tails = [self.decode(row) for row in ids[:, max(0, count - 2 * window) : count].tolist()]
            found |= torch.tensor([any(s in tail for s in self.strings) for tail in tails], device=ids.device)
        return found


@dataclass
class Answers:
    """B rows of at most T tokens."""

    ids: Tensor  # [B, T] long, padded on the right
    mask: Tensor  # [B, T] bool: up to the token that ended it, included
    logprob: Tensor  # [B, T] float32
    finished: Tensor  # [B] bool: by itself, not at the limit


@torch.no_grad()
def generate(
    net: nn.Module, prefix: Prefix, rows: Tensor, names: Tensor, rng: Rng, warp: Warp, ending: Ending,
    busy: Callable[[bool], bool] = bool,
) -> Answers:  # fmt: skip
    """Answer the prompts of ``rows`` [B]; ``names`` [B] are the keys of their randomness.

    ``busy`` says whether any process still works, given whether this one does, where all must make equally many passes.
    """
    batch, device = len(rows), rows.device
    done = Answers(
        ids=torch.full((batch, ending.tokens), ending.pad, device=device),
        mask=torch.zeros(batch, ending.tokens, dtype=torch.bool, device=device),
        logprob=torch.zeros(batch, ending.tokens, device=device),
        finished=torch.zeros(batch, dtype=torch.bool, device=device),
    )
    work = _Work(net, prefix, rows, names, rng, warp)
    for step in range(ending.tokens):
        token, logprob = work.draw(step)
        at, going = work.at, work.going
        done.ids[at, step] = torch.where(going, token, ending.pad)
        done.logprob[at, step] = torch.where(going, logprob, 0.0)
        done.mask[at, step] = going
        ended = ending.ended(done.ids[at], step + 1)
        done.finished[at] |= ended & going
        work.going = going & ~ended
        if step + 1 == ending.tokens or not busy(bool(work.going.any())):
            break
        work.advance(token)
    return done


class _Work:
    """The rows that are being written: some have ended and wait for the next compaction."""

    def __init__(self, net: nn.Module, prefix: Prefix, rows: Tensor, names: Tensor, rng: Rng, warp: Warp):
        self.net, self.names, self.rng, self.warp = net, names, rng, warp
        self.at = torch.arange(len(rows), device=rows.device)  # which row of the result each one is
        self.going = torch.ones_like(self.at, dtype=torch.bool)
        self.mask, self.place = prefix.mask[rows], prefix.following[rows]
        self.hidden, self.cache = prefix.hidden[rows], caches.growing(prefix.kept, rows)

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        """[B] tokens and their log-probs."""
        logprobs = self.warp(self.net("logits", self.hidden)).log_softmax(-1)
        if self.warp.temperature == 0:
            token = logprobs.argmax(-1)
        else:
            if step % AHEAD == 0:
                self.uniform = self.rng.uniform(self.names, (step + AHEAD,))[:, step:]
            token = Categorical(logprobs).sample(self.uniform[:, step % AHEAD])
        return token, logprobs.gather(-1, token[:, None])[:, 0]

    def advance(self, token: Tensor) -> None:
        """One pass: the hidden state after ``token`` [B]."""
        if int(self.going.sum()) <= COMPACT * len(token):
            token = self._compact(token)
        self.hidden = self.net("step", token[:, None], self.place, self.mask, self.cache)[:, -1]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(token), 1)], 1)
        self.place = self.place + 1

    def _compact(self, token: Tensor) -> Tensor:
        left = self.going.nonzero()[:, 0] if self.going.any() else torch.zeros_like(self.at[:1])
        caches.select(self.cache, left)
        for name in ("at", "going", "mask", "place", "names", "uniform"):
            if hasattr(self, name):
                setattr(self, name, getattr(self, name)[left])
        return token[left]
