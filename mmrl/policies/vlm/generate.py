"""Samples answers token by token: a prompt is read once, its copies share keys and values, finished
rows leave the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mmrl.core.distributions import Categorical
from mmrl.core.host import sent
from mmrl.policies.drafts import FREE
from mmrl.policies.scores import recorded
from mmrl.policies.vlm import caches
from samplers.noise import Rng
from samplers.warp import Warp

if TYPE_CHECKING:
    from mmrl.policies.vlm.prefix_sharing import Prefix, SharedPrefix

COMPACT = 0.75  # rows leave the batch when at most this share of it is still at work
AHEAD = 64  # steps whose random numbers are drawn at once


@dataclass(frozen=True)
class Ending:
    """Decides when an answer ends (at a stop token, after a stop string, at ``tokens`` tokens), and
    what is kept of it."""

    tokens: int
    stops: tuple[int, ...]
    pad: int
    strings: tuple[str, ...]
    decode: Callable[[list[int]], str]
    quantities: tuple[str, ...] = ()  # recorded of the distribution of each token
    # [B, T] what the answers of a call begin with, else FREE; None: nothing
    forced: Tensor | None = None

    def ended(self, ids: Tensor) -> Tensor:
        """Tell which rows have ended, [B] bool, by the last token of ids [B, n] and by the text of
        the last ones."""
        last = ids[:, -1]
        ended = torch.zeros_like(last, dtype=torch.bool)
        for stop in self.stops:
            ended |= last == stop
        if self.strings:
            spelt = [self.spells(row) for row in ids[:, -self.window :].tolist()]
            ended |= torch.tensor(spelt, device=ids.device)
        return ended

    def going(self, ids: Tensor, going: Tensor) -> tuple[Tensor, int]:
        """Tell which rows of ids [B, n] continue behind their last token, of those ``going`` [B]
        before it, and how many.

        The host needs both numbers and strings: it waits for the device once.
        """
        for stop in self.stops:
            going = going & (ids[:, -1] != stop)
        if not self.strings:
            return going, int(going.sum())
        rows = torch.cat([ids[:, -self.window :], going[:, None].long()], 1).tolist()
        left = [bool(alive) and not self.spells(tail) for *tail, alive in rows]
        return sent(torch.tensor(left, dtype=torch.bool), ids.device), sum(left)

    @property
    def window(self) -> int:
        """Return the number of tokens in which a stop string is searched: a character has at most
        four."""
        return 4 * max(map(len, self.strings)) + 4

    def spells(self, ids: list[int]) -> bool:
        """Tell whether there is a stop string in the text of tokens."""
        tail = self.decode(ids)
        return any(string in tail for string in self.strings)


@dataclass
class Answers:
    """Holds B answers of at most T tokens."""

    ids: Tensor  # [B, T] long, padded on the right
    mask: Tensor  # [B, T] bool: up to the token that ended it, included
    logprob: Tensor  # [B, T] at least float32
    values: Tensor  # [B, T, R] at least float32: the quantities that are recorded
    routes: Tensor  # [B, T, R] int16: the experts that each token went to
    edge_id: Tensor | None = None  # [B, T] long, of trees: the name of the row that drew each

    def write(
        self, step: int, rows: Tensor | slice, going: Tensor, drawn: Drawn, ending: Ending
    ) -> tuple[Tensor, int]:
        """Add one token to those of ``rows`` that are ``going`` [B'], and return which still are,
        and how many."""
        self.ids[rows, step] = torch.where(going, drawn.token, ending.pad)
        self.logprob[rows, step] = torch.where(going, drawn.logprob, 0.0)
        if ending.quantities:
            values = recorded(ending.quantities, drawn.logits, drawn.warped)
            self.values[rows, step] = torch.where(going[:, None], values, 0.0).to(self.values.dtype)
        self.mask[rows, step] = going
        return ending.going(self.ids[rows, : step + 1], going)


def blank(names: Tensor, ending: Ending, hf: Any, routes: int = 0) -> Answers:
    """Make room for the answers of the rows ``names`` [B], with ``routes`` numbers a token."""
    rows = len(names)
    device = names.device
    shape = (rows, ending.tokens)
    dtype = torch.promote_types(hf.dtype, torch.float32)
    return Answers(
        ids=torch.full((rows, ending.tokens), ending.pad, device=device),
        mask=torch.zeros(shape, dtype=torch.bool, device=device),
        logprob=torch.zeros(shape, device=device, dtype=dtype),
        values=torch.zeros(*shape, len(ending.quantities), device=device, dtype=dtype),
        routes=torch.full((*shape, routes), -1, device=device, dtype=torch.int16),
    )


class Drawn(NamedTuple):
    """Holds the next token of B rows."""

    token: Tensor  # [B] long
    logprob: Tensor  # [B]
    logits: Tensor  # [B, V] the model's own
    warped: Tensor  # [B, V] log-probs of the distribution drawn from

    def forced(self, ids: Tensor, warp: Warp, place: int) -> Drawn:
        """Take the tokens ids [B] that are known already, where they are not FREE."""
        token = torch.where(ids == FREE, self.token, ids)
        logprobs = warp(self.logits, keep=token, place=place).log_softmax(-1)
        exact = logprobs.gather(-1, token[:, None])[:, 0].to(self.logprob)
        logprob = torch.where(ids == FREE, self.logprob, exact)
        return self._replace(token=token, logprob=logprob)


def draw(
    logits: Tensor, warp: Warp, uniform: Tensor | None, place: Tensor | int | None = None
) -> Drawn:
    """Draw tokens by inversion at ``uniform`` [B], or take the likeliest ones; ``place``: in their
    answers, where the warp has a schedule."""
    logprobs = warp(logits, place=place).log_softmax(-1)
    token = logprobs.argmax(-1) if uniform is None else Categorical(logprobs).sample(uniform)
    return Drawn(token, logprobs.gather(-1, token[:, None])[:, 0], logits, logprobs)


@torch.no_grad()
def generate(
    net: SharedPrefix,
    prefix: Prefix,
    rows: Tensor,
    names: Tensor,
    rng: Rng,
    warp: Warp,
    ending: Ending,
    busy: Callable[[bool], bool] | None = None,
) -> Answers:
    """Answer the prompts of ``rows`` [B]; ``names`` [B] are the keys of their randomness.

    ``busy`` takes whether this process still works and tells whether any does, where all must make
    equally many passes.
    """
    routing = net.routing
    done = blank(names, ending, net.hf, routing.width if routing else 0)
    work = Work(net, prefix, rows, names, rng, warp)
    return write(work, done, ending, busy)


def write(
    work: Work, done: Answers, ending: Ending, busy: Callable[[bool], bool] | None = None
) -> Answers:
    """Draw token after token into ``done``, until all rows have ended."""
    routing = work.net.routing
    for step in range(ending.tokens):
        drawn = work.draw(step)
        if ending.forced is not None:
            drawn = drawn.forced(ending.forced[work.at, step], work.warp, step)
        work.going, left = done.write(step, work.at, work.going, drawn, ending)
        if step + 1 == ending.tokens or not (busy(left > 0) if busy else left):
            break
        work.advance(drawn.token, left)
        if routing is not None:
            done.routes[work.at, step] = routing.last()
    return done


class Work:
    """Holds the rows that are being written: some have ended and wait for the next compaction.

    ``compacts``: False keeps all rows, and in ``cache`` their keys and values.
    """

    def __init__(
        self,
        net: SharedPrefix,
        prefix: Prefix,
        rows: Tensor,
        names: Tensor,
        rng: Rng,
        warp: Warp,
        compacts: bool = True,
    ):
        self.net = net
        self.compacts = compacts
        self.names = names
        self.rng = rng
        self.warp = warp
        self.at = torch.arange(len(rows), device=rows.device)  # which row of the result each one is
        self.going = torch.ones_like(self.at, dtype=torch.bool)
        self.mask = prefix.mask[rows]
        self.place = prefix.following[rows]
        self.hidden = prefix.hidden[rows]
        self.cache = caches.growing(prefix.key_values, rows)
        # passed on, or transformers waits for the device at every token
        self.whole = bool(self.mask.all())

    def draw(self, step: int) -> Drawn:
        uniform = None
        if self.warp.temperature:
            if step % AHEAD == 0:
                self.uniform = self.rng.uniform(self.names, (step + AHEAD,))[:, step:]
            uniform = self.uniform[:, step % AHEAD]
        return draw(self.net("logits", self.hidden), self.warp, uniform, step)

    def advance(self, token: Tensor, left: int) -> None:
        """Make one pass: updates the hidden states by ``token`` [B], for the ``left`` unfinished
        rows and some finished ones."""
        if self.compacts and left <= COMPACT * len(token):
            token = self._compact(token)
        self.hidden = self.net(
            "step", token[:, None], self.place, self.mask, self.cache, self.whole
        )[:, -1]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(token), 1)], 1)
        self.place = self.place + 1

    def _compact(self, token: Tensor) -> Tensor:
        left = self.going.nonzero()[:, 0]
        # other processes still work, and every process must make the same passes
        if not len(left):
            left = torch.zeros_like(self.at[:1])
        if len(left) == len(token):
            return token
        caches.select(self.cache, left)
        for name in ("at", "going", "mask", "place", "names", "uniform"):
            if hasattr(self, name):
                setattr(self, name, getattr(self, name)[left])
        self.whole = bool(self.mask.all())
        return token[left]
