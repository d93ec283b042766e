"""Remembers answers of earlier iterations, for every kind of model, and replays them.

A remembered row keeps everything that was recorded when it was sampled: tokens and their order, or
the states of a path, with the log-probs of the sampling weights. Its prompt is re-encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError, called
from mmrl.core.types import (
    Fields,
    LatentPath,
    MaskTrace,
    Prompt,
    Provenance,
    Records,
    Rewards,
    Rollout,
    TextAndPath,
    TokenOrder,
)
from mmrl.policies.base import Drafts, Policy
from mmrl.policies.contracts import Replays
from mmrl.rollout.collect import joined, padded
from mmrl.rollout.stages import Drawn, Setup, Stage

# of trajectories, those with more fields first
KINDS: tuple[type[Fields], ...] = (TextAndPath, LatentPath, MaskTrace, TokenOrder)


@dataclass
class Remembered:
    """Holds the answers of one iteration to one prompt."""

    index: int  # of the prompt in the data
    iteration: int  # in which they were sampled; negative: they never age
    rollout: Rollout  # their rows, on the CPU, without condition
    rewards: Rewards = field(default_factory=lambda: Rewards({}))
    times: int = 0  # how often they were replayed, or cut off
    rank: int = 0  # of the process that remembers them, set by ``gathered``
    row: int | None = None  # the row of a rollout that it replaces; None: the group's last

    def total(self) -> Tensor:
        """Return the total reward of every row, [n] float64."""
        return self.rewards.per_row().total().double()

    def spread(self) -> float:
        return float(self.total().std(correction=0))


def remembered(drawn: Drawn, rows: Tensor, index: int, iteration: int) -> Remembered:
    """Remember the ``rows`` [n] of one group."""
    rollout = drawn.rollout[rows]
    stored = rollout.replace(
        cond=None,
        prompts=(),
        group=torch.zeros_like(rows),
        all_samples=None,
        records=None,
        advantage=None,
        provenance=rollout.provenance.replace(is_replayed=None),  # set when it is replayed
    )
    rewards = {name: value[rows].cpu() for name, value in drawn.rewards.items()}
    return Remembered(index, iteration, stored.to("cpu"), Rewards(rewards, drawn.rewards.weights))


def token_rows(rollout: Rollout) -> Rollout:
    """Keep what a draft needs of token rows: the tokens and their log-probs under the sampling
    weights."""
    sampler = rollout.provenance.sampler_logprob
    return Rollout(
        group=torch.zeros_like(rollout.group),
        row_id=rollout.row_id,
        sample=rollout.sample,
        mask=rollout.mask,
        logprob=rollout.logprob if sampler is None else sampler,
    )


@dataclass
class AnswerMemory:
    """Remembers answers by the index of their prompt in the data."""

    prompts: Sequence[Prompt]  # the data
    entries: list[Remembered] = field(default_factory=list)  # the newest last

    def by_prompt(self) -> dict[int, list[Remembered]]:
        """Group the entries by prompt, in their order."""
        answers: dict[int, list[Remembered]] = {}
        for entry in self.entries:
            answers.setdefault(entry.index, []).append(entry)
        return answers

    def forget(self, oldest: int) -> None:
        """Forget what was sampled before iteration ``oldest``, except what never ages."""
        self.entries = [e for e in self.entries if e.iteration < 0 or e.iteration >= oldest]

    def add(
        self,
        fresh: Sequence[Remembered],
        per_prompt: int,
        leaving: Callable[[list[int]], Sequence[int]],
    ) -> None:
        """Add entries and keep the ``per_prompt`` newest of each prompt. ``leaving`` chooses the
        prompts to forget from a list sorted by last answer, the latest at the end."""
        answers = self.by_prompt()
        for entry in fresh:
            answers[entry.index] = [*answers.pop(entry.index, ()), entry]
        for index in leaving([*answers]):
            del answers[index]
        self.entries = [e for of_prompt in answers.values() for e in of_prompt[-per_prompt:]]

    def drafts(
        self,
        chosen: Sequence[Remembered | None],
        sizes: Sequence[int],
        lenience: float,
        device: torch.device,
    ) -> Drafts:
        """Make drafts of remembered token rows: ``sizes`` rows of each entry, missing ones
        empty."""
        longest = max(entry.rollout.mask.shape[1] for entry in self.entries)
        empty = padded(self.entries[0].rollout[:1].map(torch.zeros_like), longest)
        parts = []
        for entry, size in zip(chosen, sizes, strict=True):
            known = empty[:0] if entry is None else padded(entry.rollout[:size], longest)
            parts += [known, empty.repeat(size - len(known))]
        rows = Rollout.cat(parts).to(device)
        return Drafts(
            ids=rows.sample,
            mask=rows.mask,
            logprob=rows.logprob,
            full=None if rows.records is None else rows.record("full"),
            lenience=torch.full((len(rows),), lenience, device=device),
        )

    def state_dict(self) -> tuple[dict[str, Tensor], Any]:
        return packed(self.entries)

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Any) -> None:
        """Restore the entries whose prompts are still in the data."""
        every = unpacked(tensors, plain)
        self.entries = [entry for entry in every if entry.index < len(self.prompts)]


def longest_ago(size: int) -> Callable[[list[int]], Sequence[int]]:
    """Forget the prompts answered longest ago, all but ``size``."""
    return lambda prompts: prompts[:-size]


class OldAnswers(Stage):
    """Remembers answers by the index of their prompt in the data, for policies that can replay
    them."""

    effects = Effects(looks_at_samples=True, exchanges_rows=True)
    policy: Policy
    prompts: Sequence[Prompt]

    def setup(self, setup: Setup) -> None:
        self.policy = setup.policy
        self.prompts = setup.prompts
        self.replays = Replays.of(setup.policy)
        self.memory = AnswerMemory(self.prompts)
        self.places = {id(prompt): i for i, prompt in enumerate(self.prompts)}
        # of prompts as the policy returned them in this iteration
        self.origins: dict[int, int] = {}

    @classmethod
    def unfit(cls, options: Any, policy: Any) -> Iterator[tuple[str, str]]:
        if not Replays.kept_by(policy):
            yield "", f"{called(policy)} cannot be shown old answers again: it has no recall"

    def begin(self, iteration: int) -> None:
        self.origins = {}

    def observe(self, prompts: Sequence[Prompt], drawn: Drawn) -> None:
        for prompt, returned in zip(prompts, drawn.rollout.prompts, strict=True):
            # prompts modified on the way, such as by hints, have other answers
            if id(prompt) in self.places:
                self.origins[id(returned)] = self.places[id(prompt)]

    def indices(self, rollout: Rollout) -> list[int]:
        """Return the index in the data of each of a rollout's prompts; -1: it is not there."""
        return [self.origins.get(id(prompt), -1) for prompt in rollout.prompts]

    def recalled(self, entries: Sequence[Remembered], rollout: Rollout) -> Rollout:
        """Replay answers: return groups that can be batched with those of ``rollout``."""
        cond, prompts = self.replays.recall([self.prompts[entry.index] for entry in entries])
        parts = [
            beside(entry, rollout).replace(prompts=(prompt,))
            for entry, prompt in zip(entries, prompts, strict=True)
        ]
        return joined(parts).replace(cond=cond)

    def refuse_trees(self, rollout: Rollout, what: str) -> None:
        """Raise UserError for rows that cannot be separated."""
        if rollout.edge_id is not None:
            raise UserError(
                f"train.stages.{self.saved_as}: the samples of a tree share their beginnings and "
                f"cannot be {what} one by one; sample without policy.tree"
            )

    def state_dict(self) -> tuple[dict[str, Tensor], Any]:
        return self.memory.state_dict()

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Any) -> None:
        self.memory.load_state_dict(tensors, plain)


def marked(rollout: Rollout, replayed: bool) -> Rollout:
    """Mark the rows of an earlier iteration."""
    is_replayed = torch.full_like(rollout.group, replayed, dtype=torch.bool)
    return rollout.replace(provenance=rollout.provenance.replace(is_replayed=is_replayed))


def fits(entry: Remembered, rollout: Rollout) -> bool:
    """Tell whether remembered rows can be batched with those of a rollout: their paths have as many
    steps and the same records."""
    old, new = entry.rollout.trajectory, rollout.trajectory
    if old is None or new is None:
        return old is new
    if type(old) is not type(new) or set(old.row_fields()) != set(new.row_fields()):
        return False
    by_step = not isinstance(old, TokenOrder) or isinstance(old, MaskTrace)
    steps = entry.rollout.mask.shape[1] == rollout.mask.shape[1]
    trees = (entry.rollout.edge_id is None) == (rollout.edge_id is None)
    return trees and (steps or not by_step)


def beside(entry: Remembered, rollout: Rollout) -> Rollout:
    """Return remembered rows on the devices of a rollout, with the marks that it has; they count as
    replayed unless marked otherwise."""
    rows = entry.rollout.to(rollout.row_id.device)
    path = rollout.trajectory
    if isinstance(path, LatentPath) and isinstance(rows.trajectory, LatentPath):
        states = entry.rollout.latents.states.to(path.states)
        rows = rows.replace(trajectory=rows.trajectory.replace(states=states))
    like = rollout.provenance
    known = rows.provenance
    sampler = rows.logprob if known.sampler_logprob is None else known.sampler_logprob
    nowhere = torch.zeros_like(rows.group, dtype=torch.bool)
    truth = nowhere if known.is_ground_truth is None else known.is_ground_truth
    marks = Provenance(
        sampler_logprob=None if like.sampler_logprob is None else sampler,
        is_ground_truth=None if like.is_ground_truth is None else truth,
        is_replayed=~nowhere if known.is_replayed is None else known.is_replayed,
    )
    return rows.replace(provenance=marks)


def with_marks(rollout: Rollout) -> Rollout:
    """Mark which rows are ground truths, if they are not marked yet."""
    nowhere = torch.zeros_like(rollout.group, dtype=torch.bool)
    known = rollout.provenance
    return rollout.replace(
        provenance=known.replace(
            is_ground_truth=nowhere if known.is_ground_truth is None else known.is_ground_truth,
            is_replayed=nowhere if known.is_replayed is None else known.is_replayed,
        )
    )


# ---------------------------------------------------------------------------------------------
# checkpoints, and exchange between processes


def packed(entries: Sequence[Remembered]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Turn entries into tensors and plain data."""
    tensors: dict[str, Tensor] = {}
    plain = []
    for n, entry in enumerate(entries):
        rows = entry.rollout.row_tensors()
        tensors |= {f"{n}/{name}": value for name, value in rows.items()}
        tensors |= {f"{n}/reward/{name}": value for name, value in entry.rewards.items()}
        plain.append(
            {
                "index": entry.index,
                "iteration": entry.iteration,
                "times": entry.times,
                "rank": entry.rank,
                "weights": entry.rewards.weights,
            }
        )
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, plain


def unpacked(tensors: Mapping[str, Tensor], plain: Any) -> list[Remembered]:
    """Restore the entries that ``packed`` packed."""
    parts: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, rest = name.partition("/")
        parts.setdefault(int(number), {})[rest] = tensor
    entries = []
    for n, entry in enumerate(plain or ()):
        numbers = {name: value for name, value in entry.items() if name != "weights"}
        weights = entry["weights"]
        rows = {name: tensor for name, tensor in parts[n].items() if "/" not in name}
        rewards = Rewards({name: parts[n][f"reward/{name}"] for name in weights}, weights)
        entries.append(Remembered(rollout=_rollout(rows), rewards=rewards, **numbers))
    return entries


def gathered(entries: Sequence[Remembered]) -> list[Remembered]:
    """Gather the entries of every process, in order of rank; a collective call."""
    rank, processes = distributed.world()
    for entry in entries:
        entry.rank = rank
    if processes == 1:
        return [*entries]
    tensors, plain = packed(entries)
    parts = zip(
        distributed.all_gather_tensors(tensors), distributed.all_gather_json([plain]), strict=True
    )
    return [entry for part in parts for entry in unpacked(*part)]


def _rollout(rows: Mapping[str, Tensor]) -> Rollout:
    """Make a rollout of one prompt from its stored tensors."""
    kind = next((kind for kind in KINDS if _required(kind) <= set(rows)), None)
    rows = {**rows, "group": torch.zeros_like(rows["row_id"])}
    path = {} if kind is None else _part(kind, rows)
    provenance = _part(Provenance, rows)
    columns = _part(Rollout, rows)
    records = {name: rows[name] for name in rows if name not in path | provenance | columns}
    return Rollout(
        trajectory=cast(Any, None if kind is None else kind(**path)),
        provenance=Provenance(**provenance),
        records=Records(columns=records) if records else None,
        **columns,
    )


def _required(kind: type[Fields]) -> set[str]:
    return {f.name for f in fields(kind) if f.default is not None}


def _part(kind: type[Fields], rows: Mapping[str, Tensor]) -> dict[str, Any]:
    return {f.name: rows[f.name] for f in fields(kind) if f.name in rows}
