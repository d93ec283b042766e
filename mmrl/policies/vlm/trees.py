"""Branches answers that share prefixes into trees: finished answers are continued again from inner
positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.host import sent
from mmrl.core.numbers import Count
from mmrl.core.types import Copies
from mmrl.policies.vlm import caches
from mmrl.policies.vlm.caches import KV
from mmrl.policies.vlm.generate import Answers, Task, Work, blank, write
from mmrl.policies.vlm.prefixes import Prefix

Place = tuple[int, int]  # an answer, and how many of its tokens a new one shares


@dataclass(frozen=True)
class TextTree:
    """Sets how the answers to a prompt branch; a branch shares the tokens before its place.

    every: an answer may branch after every ``every`` tokens. marks: instead, after these strings,
    such as the end of a step or of a sentence. choose: "in_turn": in round d every answer branches
    at its d-th place, a full tree (TreeRPO, Yang et al. 2025); "random": in every round a tree
    draws places at random (Tree-GRPO, Ji et al. 2025); "entropy": it takes those before the tokens
    of highest entropy. branches: new answers in a round, from every answer in turn, else from the
    tree. rounds: how often it grows. An answer too short for its turn branches where it began, and
    a tree without places starts a new answer, so that every group is full (our reading).
    """

    every: Count = 32
    marks: Sequence[str] = ()
    choose: Literal["in_turn", "random", "entropy"] = "in_turn"
    branches: Count = 1
    rounds: Count = 2

    @property
    def leaves(self) -> int:
        """Return the number of answers of a tree."""
        if self.choose == "in_turn":
            leaves: int = (1 + self.branches) ** self.rounds
            return leaves
        return 1 + self.branches * self.rounds

    def fit(self, copies: Copies) -> None:
        """Raise UserError unless every group is made of whole trees."""
        for size in [copies] if isinstance(copies, int) else copies:
            if size % self.leaves:
                raise UserError(
                    f"train.group_size {size}: a tree of policy.vlm.tree has {self.leaves} "
                    f"answers, so it must be a multiple of {self.leaves}"
                )


class Growth:
    """Holds the trees of R answers, R a multiple of their leaves, while they grow."""

    def __init__(
        self,
        tree: TextTree,
        task: Task,
    ):
        self.tree = tree
        self.net = task.net
        self.prefix = task.prefix
        self.rows = rows = task.rows  # [R] index of the prompt each answers
        self.names = names = task.names
        ending = task.ending
        self.kept = len(ending.quantities)  # recorded quantities; entropy may serve only the tree
        recorded_names = [*ending.quantities, *(["entropy"] if tree.choose == "entropy" else [])]
        self.ending = replace(ending, quantities=tuple(dict.fromkeys(recorded_names)))
        self.task = replace(task, ending=self.ending)
        self.answers = blank(names, self.ending, task.net.hf)
        # [R, T] long: which answer drew each token
        self.owner = torch.arange(len(rows), device=rows.device)[:, None].repeat(1, ending.tokens)
        self.start = [0] * len(rows)  # tokens that an answer shares with the one it branches from
        self.length = [0] * len(rows)
        self.used: set[Place] = set()
        self.lots = task.rng.fold("tree").uniform(names).tolist()
        # everything read and written so far, and where each answer is in it
        self.sources = [Source(task.prefix.key_values, task.prefix.mask)]
        self.of_source = [(0, row) for row in rows.tolist()]

    @torch.no_grad()
    def grow(self) -> Answers:
        """Write all answers, one round of sampling after another; returns them, each with the
        tokens it drew itself in its mask."""
        trees = [[trunk] for trunk in range(0, len(self.rows), self.tree.leaves)]
        trunks = [answer for answers in trees for answer in answers]
        self._write(trunks, [(trunk, 0) for trunk in trunks], self.prefix, self.rows[trunks])
        for number in range(1, self.tree.rounds + 1):
            fresh: list[int] = []
            places: list[Place] = []
            for answers in trees:
                chosen = self._chosen(answers, number)
                first = answers[-1] + 1
                answers += range(first, first + len(chosen))
                fresh += range(first, first + len(chosen))
                places += chosen
            self._write(fresh, places, *self._begun(fresh, places))
        self.answers.edge_id = self.names[self.owner]
        self.answers.values = self.answers.values[..., : self.kept]
        return self.answers

    def _chosen(self, answers: list[int], number: int) -> list[Place]:
        """Choose the places where a tree of ``answers`` answers grows in round ``number``."""
        branches = self.tree.branches
        if self.tree.choose == "in_turn":
            turns = [(answer, self._turn(answer, number)) for answer in answers]
            return [turn for turn in turns for _ in range(branches)]
        every = [(answer, place) for answer in answers for place in self._places(answer)]
        fresh = [place for place in every if place not in self.used] or every
        if self.tree.choose == "entropy":
            entropy = self.entropy
            fresh.sort(key=lambda place: (-entropy[place[0]][place[1]], place))
        else:
            lots = self.lots[answers[-1] + 1 :]
            for n in range(min(branches, len(fresh))):  # to the front, as cards are drawn
                lot = n + int(lots[n] * (len(fresh) - n))
                fresh[n], fresh[lot] = fresh[lot], fresh[n]
        chosen = fresh[:branches]
        self.used |= set(chosen)
        chosen = chosen or [(answers[0], 0)]
        return [chosen[n % len(chosen)] for n in range(branches)]

    def _turn(self, answer: int, number: int) -> int:
        """Return the ``number``-th place of an answer's whole path, or its start."""
        places = self._places(answer, 1)
        return places[number - 1] if len(places) >= number else self.start[answer]

    def _places(self, answer: int, first: int | None = None) -> list[int]:
        """List the places of an answer after its ``first`` tokens, by default after those that it
        shares."""
        first = self.start[answer] + 1 if first is None else first
        span = range(first, self.length[answer])
        if not self.tree.marks:
            return [place for place in span if place % self.tree.every == 0]
        return [place for place in span if self._marked(self.ids[answer][:place])]

    def _marked(self, ids: list[int]) -> bool:
        """Tell whether the last of the tokens completes a mark."""
        tail = ids[-4 * max(map(len, self.tree.marks)) - 4 :]
        text = self.ending.decode(tail)
        before = len(self.ending.decode(tail[:-1]))
        ends = [text.rfind(mark) + len(mark) for mark in self.tree.marks if mark in text]
        return any(end > before for end in ends)

    def _write(self, fresh: list[int], places: list[Place], prefix: Prefix, rows: Tensor) -> None:
        """Sample the answers ``fresh``, which branch at ``places``, after the prefixes ``rows``
        [N]."""
        at = self._index(fresh)
        start = self._index([shared for _, shared in places])
        ending = replace(self.ending, tokens=self.ending.tokens - min(s for _, s in places))
        task = replace(self.task, prefix=prefix, rows=rows, names=self.names[at], ending=ending)
        work = Work(task, torch.arange(len(at), device=at.device), keeps=True)
        written = write(work, blank(task.names, ending, self.net.hf))
        for n, answer in enumerate(fresh):
            self.of_source[answer] = len(self.sources), n
        self.sources.append(Source(caches.key_values(work.cache), prefix.mask[rows]))
        self._put(at, self._index([parent for parent, _ in places]), start[:, None], written)
        lengths = (start + self.answers.mask[at].sum(1)).tolist()
        for answer, (_, shared), length in zip(fresh, places, lengths, strict=True):
            self.start[answer] = shared
            self.length[answer] = length
        if self.tree.marks:
            self.ids = self.answers.ids.tolist()
        if self.tree.choose == "entropy":
            place = self.ending.quantities.index("entropy")
            self.entropy = self.answers.values[..., place].tolist()

    def _put(self, at: Tensor, parents: Tensor, start: Tensor, written: Answers) -> None:
        """Append what was ``written`` to the first ``start`` [N, 1] tokens of the parents."""
        columns = torch.arange(self.ending.tokens, device=at.device)
        shared = columns < start
        steps = (columns - start).expand(len(at), -1)
        inside = (steps >= 0) & (steps < written.ids.shape[1])
        steps = steps.clamp(0, written.ids.shape[1] - 1)
        for name in ("ids", "logprob"):
            values = getattr(self.answers, name)
            empty = self.ending.pad if name == "ids" else 0
            drawn = torch.where(inside, getattr(written, name).gather(1, steps), empty)
            values[at] = torch.where(shared, values[parents], drawn)
        for number in range(len(self.ending.quantities)):
            values = self.answers.values[..., number]
            drawn = torch.where(inside, written.values[..., number].gather(1, steps), 0)
            values[at] = torch.where(shared, values[parents], drawn)
        self.answers.mask[at] = inside & written.mask.gather(1, steps)
        self.owner[at] = torch.where(shared, self.owner[parents], at[:, None])

    def _begun(self, fresh: list[int], places: list[Place]) -> tuple[Prefix, Tensor]:
        """Return the shared prefixes of new answers as prompts already read, one per row, and their
        rows.

        Keys and values are those that were computed when the tokens were drawn; only the last token
        is read again, since its hidden state was not kept.
        """
        at = self._index(fresh)
        parents = self._index([parent for parent, _ in places])
        shared = self._index([count for _, count in places])
        last = (shared - 1).clamp_min(0)[:, None]
        owners = self.owner[parents].gather(1, last)[:, 0].tolist()
        ends = []
        origins = []
        for answer, owner, (_, count) in zip(fresh, owners, places, strict=True):
            source, row = self.of_source[owner] if count else self.of_source[answer]
            behind = count - self.start[owner] if count else 0
            ends.append(self.sources[source].mask.shape[1] + behind)
            origins.append((source, row))
        key_values, mask = gathered(self.sources, origins, ends)
        prompts = self.rows[at]
        following = self.prefix.following[prompts] + shared
        every = torch.arange(len(fresh), device=at.device)
        cache = caches.continued([(k[:, :, :-1], v[:, :, :-1]) for k, v in key_values], every)
        ids = self.answers.ids[parents].gather(1, last)
        hidden = self.net("step", ids, following - 1, mask[:, :-1], cache)[:, -1]
        whole = (shared == 0)[:, None]  # nothing shared but the prompt
        hidden = torch.where(whole, self.prefix.hidden[prompts], hidden)
        return Prefix(hidden, mask, following, key_values), every

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return sent(torch.tensor(numbers), self.names.device)


@dataclass(frozen=True)
class Source:
    """Holds keys and values of prefixes that were read, and of what was written after them."""

    key_values: list[KV]
    mask: Tensor  # [N, S] bool, of the prefixes; what was written follows


def gathered(
    sources: Sequence[Source], origins: Sequence[Place], ends: Sequence[int]
) -> tuple[list[KV], Tensor]:
    """Gather the first ``ends`` columns of the rows (source, row), padded on the left."""
    width = max(ends)
    order: list[int] = []
    parts: list[list[KV]] = []
    masks = []
    for number, source in enumerate(sources):
        chosen = [n for n, (origin, _) in enumerate(origins) if origin == number]
        if not chosen:
            continue
        device = source.mask.device
        rows = sent(torch.tensor([origins[n][1] for n in chosen]), device)
        end = sent(torch.tensor([ends[n] for n in chosen]), device)
        columns = torch.arange(width, device=device) - (width - end)[:, None]
        real = columns >= 0
        columns = columns.clamp_min(0)
        begun = source.mask.shape[1]
        read = source.mask[rows].gather(1, columns.clamp_max(begun - 1))
        masks.append(real & (read | (columns >= begun)))
        parts.append(
            [(_columns(k, rows, columns), _columns(v, rows, columns)) for k, v in source.key_values]
        )
        order += chosen
    back = torch.tensor(order).argsort().to(masks[0].device)
    layers = zip(*parts, strict=True)
    joined = [
        (torch.cat([k for k, _ in layer])[back], torch.cat([v for _, v in layer])[back])
        for layer in layers
    ]
    return joined, torch.cat(masks)[back]


def _columns(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Take columns [N, S] of the rows [N] of x [*, heads, *, D]."""
    index = columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.index_select(0, rows).gather(2, index)
