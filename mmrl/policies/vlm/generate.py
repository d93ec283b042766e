"""Samples answers token by token: a prompt is read once, its copies share keys and values, and
finished rows leave the batch or are refilled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.core.distributions import Categorical
from mmrl.core.host import sent
from mmrl.policies.draft_verification import FREE
from mmrl.policies.scores import recorded
from mmrl.policies.vlm import caches
from mmrl.policies.vlm.refill import Queue, Slots
from samplers.noise import Rng
from samplers.warp import Warp

if TYPE_CHECKING:
    from mmrl.policies.vlm.prefix_sharing import SharedPrefix
    from mmrl.policies.vlm.prefixes import Prefix

COMPACT = 0.75  # the batch is compacted when at most this share of it is unfinished
# tokens between two counts of the unfinished rows, on devices that run asynchronously: each count
# synchronises with the host
LOOK = 4
AHEAD = 64  # least number of steps whose random numbers are drawn at once


@dataclass(frozen=True)
class Ending:
    """Decides when an answer ends (at a stop token, after a stop string, at ``tokens`` tokens), and
    what is recorded."""

    tokens: int
    stops: tuple[int, ...]
    pad: int
    strings: tuple[str, ...]
    decode: Callable[[list[int]], str]
    quantities: tuple[str, ...] = ()  # recorded of the distribution of each token
    # [B, T] given prefixes of the answers, then FREE; None: no prefixes
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

    def going(self, ids: Tensor, going: Tensor, count: bool) -> tuple[Tensor, int | None]:
        """Tell which rows of ids [B, n] continue after their last token, of those ``going`` [B]
        before it, and, if counted, how many.

        The host needs both numbers and strings: it waits for the device once, or not at all.
        """
        for stop in self.stops:
            going = going & (ids[:, -1] != stop)
        if not self.strings:
            return going, int(going.sum()) if count else None
        rows = torch.cat([ids[:, -self.window :], going[:, None].long()], 1).tolist()
        left = [bool(alive) and not self.spells(tail) for *tail, alive in rows]
        return sent(torch.tensor(left, dtype=torch.bool), ids.device), sum(left)

    @property
    def window(self) -> int:
        """Return how many last tokens are searched for a stop string: a character has at most
        four."""
        return 4 * max(map(len, self.strings)) + 4

    def spells(self, ids: list[int]) -> bool:
        """Tell whether the text of tokens contains a stop string."""
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
    num_accepted: Tensor | None = None  # [B] long: tokens kept of a draft; None: no drafts
    edge_id: Tensor | None = None  # [B, T] long, of trees: the name of the row that drew each

    def taken(self, rows: Tensor) -> Answers:
        """Take these rows, without the fields of drafts and trees."""
        columns = (self.ids, self.mask, self.logprob, self.values, self.routes)
        return Answers(*(column[rows] for column in columns))

    def put(self, rows: Tensor, written: Answers) -> None:
        """Replace these rows by ``written``."""
        for name in ("ids", "mask", "logprob", "values", "routes"):
            getattr(self, name)[rows] = getattr(written, name)

    def write(
        self,
        at: Tensor,
        step: Tensor,
        going: Tensor,
        drawn: Drawn,
        ending: Ending,
        count: bool = True,
        all_go: bool = False,
    ) -> tuple[Tensor, int | None]:
        """Add the token at ``step`` [B'] to those of the rows ``at`` [B'] that are ``going``, and
        return which still are, and, if they are counted, how many; ``all_go``: all are known to
        be."""
        place = (at, step)
        logprob = drawn.logprob.to(self.logprob)
        if all_go:
            self.ids[place] = drawn.token
            self.logprob[place] = logprob
            self.mask[place] = True
        else:
            self.ids[place] = torch.where(going, drawn.token, self.ids[place])
            self.logprob[place] = torch.where(going, logprob, self.logprob[place])
            self.mask[place] |= going
        if ending.quantities:
            values = recorded(ending.quantities, drawn.logits, drawn.warped).to(self.values)
            self.values[place] = torch.where(going[:, None], values, self.values[place])
        last = drawn.token[:, None]
        if ending.strings:
            columns = step[:, None] + torch.arange(1 - ending.window, 1, device=at.device)
            last = self.ids[at].gather(1, columns.clamp_min(0))
            last = last.masked_fill(columns < 0, ending.pad)
        return ending.going(last, going & (step + 1 < ending.tokens), count)


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

    def forced(self, ids: Tensor, warp: Warp, place: Tensor) -> Drawn:
        """Replace by the given tokens ids [B] where these are not FREE."""
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


@dataclass(frozen=True)
class Task:
    """Defines a call of the sampler: answers to the prompts of ``rows``."""

    net: SharedPrefix
    prefix: Prefix
    rows: Tensor  # [B] long: the prompt of each answer
    names: Tensor  # [B] long: the keys of their randomness
    rng: Rng
    warp: Warp
    ending: Ending
    # maps whether this process still has work to whether any has, where all must make the same
    # number of passes
    busy: Callable[[bool], bool] | None = None
    start: Tensor | None = None  # [B] long: tokens of each that the prefix holds; None: none

    def of(self, rows: slice) -> Task:
        """Return the task of some of the rows."""
        return replace(self, rows=self.rows[rows], names=self.names[rows])

    def blank(self) -> Answers:
        """Make room for the answers."""
        routing = self.net.routing
        return blank(self.names, self.ending, self.net.hf, routing.width if routing else 0)


@torch.no_grad()
def generate(task: Task, slots: Slots | None = None, done: Answers | None = None) -> Answers:
    """Answer all prompts of the task in one batch, or with ``slots`` in that many rows, which are
    refilled when an answer ends. ``done`` holds what is there already."""
    done = task.blank() if done is None else done
    queue = Queue(task.rows.tolist(), slots) if slots is not None else None
    first = torch.arange(len(task.rows), device=task.rows.device)
    if queue is not None:
        queue.expect(task.prefix.hidden[task.rows])
        first = sent(torch.tensor(queue.take(queue.slots.rows)), task.rows.device)
    return write(Work(task, first), done, queue)


def write(work: Work, done: Answers, queue: Queue | None = None) -> Answers:
    """Draw token after token into ``done``, until all rows have ended and the ``queue`` is
    empty."""
    busy = work.task.busy
    # with refilled rows, or other processes to wait for, rows are counted at every token
    look = 1 if busy or queue is not None else interval(work.task.rows.device)
    with work.task.net.sampling(work.cascade):
        for token in itertools.count():
            left = work.write(done, work.draw(), work.last or token % look == 0)
            waits = queue is not None and bool(queue.waiting)
            active = left != 0 or waits
            if not (busy(active) if busy else active):
                break
            if left != 0 or busy is not None:
                work.advance(done, left, compacts=not waits, draws=queue is None)
            if queue is not None:
                queue.note(work.at, work.step, work.hidden)
                if waits and left is not None and left < len(work.at):
                    ended = work.at[~work.going]
                    queue.ended(ended.tolist(), done.mask[ended].sum(1).tolist())
                    going = work.going
                    free = queue.slots.rows - left
                    work.enter(queue.take(free, work.hidden[going], work.step[going]))
    if queue is not None:
        queue.learn(done.mask.sum(1))
    return done


def interval(device: torch.device) -> int:
    """Return after how many tokens the host counts the unfinished rows."""
    return 1 if device.type == "cpu" else LOOK


class Work:
    """Holds the active rows, each at its own step: some have ended and wait for the next
    compaction.

    ``keeps``: ended rows stay too, with their keys and values in ``cache``.
    """

    def __init__(self, task: Task, first: Tensor, keeps: bool = False):
        rows = task.rows[first]
        prefix = task.prefix
        self.task = task
        self.keeps = keeps
        self.at = first  # [B'] index of each in the result
        self.step = self._start(first)  # [B'] long: tokens it has
        self.going = torch.ones_like(first, dtype=torch.bool)
        self.left: int | None = len(first)  # unfinished rows; None: not counted
        self.place = prefix.following[rows]
        self.hidden = prefix.hidden[rows]
        # [B', S] of the cached columns: prompt and answer, or with a cascade the answer only
        self.mask = prefix.mask[rows]
        self.cascade = None if keeps else task.net.cascade(prefix, rows)
        if self.cascade is not None:
            self.mask = self.mask[:, :0]
            self.cache = self.cascade.cache
        else:
            self.cache = caches.growing(prefix.memory, rows)
        # passed on, or transformers synchronises at every token
        self.whole = bool(self.mask.all())
        # the most tokens that a row has, and random numbers for at least that many
        self.longest = 0 if task.start is None else int(task.start.max())
        self.uniform = self._uniform(first, self._ahead())
        self.drawn: Drawn | None = None  # by the pass that made the hidden states

    def draw(self) -> Drawn:
        task = self.task
        drawn, self.drawn = self.drawn, None
        if drawn is None:
            drawn = task.net("draw", draw, self.hidden, task.warp, self._random(), self.step)
        if task.ending.forced is None:
            return drawn
        return drawn.forced(task.ending.forced[self.at, self.step], task.warp, self.step)

    @property
    def last(self) -> bool:
        """Tell whether no answer may have more than the next token."""
        return self.longest + 1 >= self.task.ending.tokens

    def write(self, done: Answers, drawn: Drawn, count: bool = True) -> int | None:
        """Add one token to every row that goes on; return how many still do, if they are
        counted."""
        self.token = drawn.token
        ending = self.task.ending
        all_go = self.left == len(self.at)
        rows = (self.at, self.step, self.going, drawn, ending, count, all_go)
        self.going, self.left = done.write(*rows)
        return self.left

    def advance(self, done: Answers, left: int | None, compacts: bool, draws: bool = False) -> None:
        """Make one pass: update the hidden states by the last tokens, for the ``left`` unfinished
        rows, where counted, and some finished ones. ``draws``: the next tokens belong to the same
        rows, and may be drawn in the same pass."""
        fewer = left is not None and left <= COMPACT * len(self.at)
        if compacts and not self.keeps and fewer:
            self._compact()
        net = self.task.net
        known = (self.mask, self.cache, self.whole, None, self.cascade)
        before = self.step
        self.longest = min(self.longest + 1, self.task.ending.tokens - 1)
        self.step = (self.step + 1).clamp_max(self.longest)
        token = self.token[:, None], self.place
        if draws and net.compiled is not None:
            then = draw, self.task.warp, self._random()
            hidden, self.drawn = net("step_and_draw", then, *token, *known)
        else:
            hidden = net("step", *token, *known)
        self.hidden = hidden[:, -1]
        if net.routing is not None:
            place = (self.at, before)
            routes = net.routing.last()
            done.routes[place] = torch.where(self.going[:, None], routes, done.routes[place])
        self.mask = F.pad(self.mask, (0, 1), value=True)
        self.place = self.place + 1

    def enter(self, new: Sequence[int]) -> None:
        """Drop the rows that have ended, and start ``new`` ones."""
        prefix = self.task.prefix
        left = self.going.nonzero()[:, 0]
        at = sent(torch.tensor(new, dtype=torch.long), left.device)
        rows = self.task.rows[at]
        longest = int(self.mask[left].sum(1).max()) if len(left) else 0
        entering = prefix.mask[rows]
        if self.cascade is not None:
            entering = entering[:, :0]
        width = max(longest, entering.shape[1])
        if self.cascade is not None:
            self.cascade.refill(left, rows, width)
        else:
            caches.refill(self.cache, left, prefix.memory, rows, width)
        self.mask = torch.cat([fit(self.mask[left], width), fit(entering, width)])
        self.whole = bool(self.mask.all())
        uniform = self._uniform(at, self.uniform.shape[1])
        for name, fresh in (
            ("at", at),
            ("step", self._start(at)),
            ("going", torch.ones_like(at, dtype=torch.bool)),
            ("place", prefix.following[rows]),
            ("hidden", prefix.hidden[rows]),
            ("uniform", uniform),
        ):
            setattr(self, name, torch.cat([getattr(self, name)[left], fresh]))
        self.left = len(self.at)

    def _compact(self) -> None:
        left = self.going.nonzero()[:, 0]
        # other processes still have work, and all must make the same passes
        if not len(left):
            left = torch.zeros_like(self.at[:1])
        if len(left) == len(self.at):
            return
        if self.cascade is not None:
            self.cascade.select(left)
        else:
            caches.select(self.cache, left)
        for name in ("at", "step", "going", "mask", "place", "token", "uniform"):
            setattr(self, name, getattr(self, name)[left])
        self.whole = bool(self.mask.all())

    def _start(self, at: Tensor) -> Tensor:
        return torch.zeros_like(at) if self.task.start is None else self.task.start[at]

    def _ahead(self) -> int:
        """Return for how many tokens random numbers are drawn at once."""
        return min(2 * self.longest + AHEAD, self.task.ending.tokens)

    def _random(self) -> Tensor | None:
        """Return the random number [B'] of each row's next token; None: the likeliest is taken."""
        if not self.task.warp.temperature:
            return None
        if self.longest >= self.uniform.shape[1]:
            self.uniform = self._uniform(self.at, self._ahead())
        return self.uniform.gather(1, self.step[:, None])[:, 0]

    def _uniform(self, at: Tensor, count: int) -> Tensor:
        return self.task.rng.uniform(self.task.names[at], (count,))


def fit(mask: Tensor, width: int) -> Tensor:
    """Cut or pad a mask [B, S] on the left to ``width`` columns."""
    length = mask.shape[1]
    return mask[:, length - width :] if length >= width else F.pad(mask, (width - length, 0))
