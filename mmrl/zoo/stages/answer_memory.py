"""Remembers answers of earlier iterations, of every kind of model, and shows them to the policy
again.

A remembered row keeps everything that was recorded when it was sampled: tokens and their order, or
the states of a path, with the log-probs under the weights of then. Its prompt is encoded anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
    Rewards,
    Rollout,
    TextAndPath,
    TokenOrder,
)
from mmrl.policies.base import Policy
from mmrl.policies.contracts import Replays
from mmrl.rollout.collect import appended, media_of, together
from mmrl.rollout.stages import Drawn, Stage, outline

# of trajectories, those with more fields first
KINDS: tuple[type[Fields], ...] = (TextAndPath, LatentPath, MaskTrace, TokenOrder)


@dataclass
class Remembered:
    """Holds answers to one prompt, of one iteration."""

    index: int  # of the prompt in the data
    iteration: int  # in which they were sampled
    rollout: Rollout  # their rows, on the CPU, without condition
    rewards: Rewards
    used: int = 0
    row: int | None = None  # the row of a rollout whose place it takes; None: the group's last

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
        drift=None,
        value=None,
        records=None,
        advantage=None,
        provenance=rollout.provenance.replace(is_replayed=None),  # it will be, whatever it was
    )
    rewards = {name: value[rows].cpu() for name, value in drawn.rewards.items()}
    return Remembered(index, iteration, stored.to("cpu"), Rewards(rewards, drawn.rewards.weights))


class OldAnswers(Stage):
    """Remembers answers by their prompts' places in the data, for policies that can be shown old
    answers again."""

    effects = Effects(looks_at_samples=True, exchanges_rows=True)
    policy: Policy
    prompts: Sequence[Prompt]

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Replays):
            raise UserError(
                f"train.{self.option}: {type(self.policy).__name__} cannot be shown old answers "
                f"again; it is for policies that derive from Replays, as those of mmrl"
            )
        self.replays: Replays = self.policy
        self.places = {id(prompt): i for i, prompt in enumerate(self.prompts)}
        # of prompts as the policy returned them in this iteration
        self.origins: dict[int, int] = {}

    @classmethod
    def unfit(cls, options: Any, policy: Any) -> Iterator[tuple[str, str]]:
        if not Replays.kept_by(policy):
            yield "", f"{called(policy)} cannot be shown old answers again: it has no recall"

    def observe(self, prompts: Sequence[Prompt], drawn: Drawn) -> None:
        for prompt, returned in zip(prompts, drawn.rollout.prompts, strict=True):
            # prompts that are changed on the way, by hints for instance, have other answers
            if id(prompt) in self.places:
                self.origins[id(returned)] = self.places[id(prompt)]


def marked(rollout: Rollout, replayed: bool) -> Rollout:
    """Mark the rows that are of an earlier iteration."""
    is_replayed = torch.full_like(rollout.group, replayed, dtype=torch.bool)
    return rollout.replace(provenance=rollout.provenance.replace(is_replayed=is_replayed))


def fits(entry: Remembered, rollout: Rollout) -> bool:
    """Tell whether remembered rows can stand beside those of a rollout: with paths of as many
    steps, of which the same is recorded."""
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
    """Return remembered rows on the devices of a rollout, marked as replayed unless they say
    otherwise, with the marks that it has."""
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
    """Mark which rows are ground truths, if that is not known yet."""
    nowhere = torch.zeros_like(rollout.group, dtype=torch.bool)
    known = rollout.provenance
    return rollout.replace(
        provenance=known.replace(
            is_ground_truth=nowhere if known.is_ground_truth is None else known.is_ground_truth,
            is_replayed=nowhere if known.is_replayed is None else known.is_replayed,
        )
    )


def inserted(
    policy: Policy, drawn: Drawn, chosen: Sequence[tuple[int, Remembered]], grows: bool
) -> Drawn:
    """Put answers in groups: in the places of their last rows, or of those that the answers name,
    or behind the group. A collective call if rows are added, since they get new names."""
    rollout = drawn.rollout
    if rollout.provenance.is_replayed is None:
        drawn = replace(drawn, rollout=marked(rollout, False))
        rollout = drawn.rollout
    if not chosen:
        return renamed(drawn) if grows else drawn
    device = rollout.group.device
    new_rows: dict[int, list[int]] = {}
    left: dict[int, list[int]] = {}
    for place, (group, entry) in enumerate(chosen):
        new_rows.setdefault(group, []).append(len(rollout) + place)
        if entry.row is not None:
            left.setdefault(group, []).append(entry.row)
    order, replaced = _places(rollout, new_rows, grows, left)
    last = {group: row for row, group in enumerate(rollout.group.tolist())}
    parts = []
    for group, entry in chosen:
        old = rollout[last[group] : last[group] + 1]
        # what is known of the prompt is that of the row it replaces
        parts.append(
            beside(entry, rollout).replace(
                group=old.group,
                row_id=old.row_id,
                all_samples=old.all_samples,
                drift=old.drift,
                value=old.value,
            )
        )
    whole = appended(rollout, *parts)
    media = together([drawn.media, policy.decode(whole[len(rollout) :])])
    rewards = {
        name: torch.cat([value, *(entry.rewards[name].to(value) for _, entry in chosen)])[order]
        for name, value in drawn.rewards.items()
    }
    plain = drawn.rewards.per_row()
    lost = Rewards({name: value[replaced] for name, value in plain.items()}, plain.weights)
    unused = ((outline(rollout)[replaced], lost),) if len(replaced) else ()
    mixed = whole[order]
    if not grows:
        mixed = mixed.replace(row_id=rollout.row_id)
    drawn = replace(
        drawn,
        rollout=mixed,
        media=media_of(media, order.to(device)),
        rewards=Rewards(rewards, drawn.rewards.weights),
        unused=(*drawn.unused, *unused),
    )
    return renamed(drawn) if grows else drawn


def _places(
    rollout: Rollout,
    new_rows: Mapping[int, Sequence[int]],
    grows: bool,
    left: Mapping[int, Sequence[int]],
) -> tuple[Tensor, Tensor]:
    """List the rows in their new order, and the old rows that are replaced: those ``left`` by a
    group, else its last."""
    device = rollout.group.device
    group = rollout.group.tolist()
    if not grows:
        order = list(range(len(rollout)))
        replaced: list[int] = []
        for name, rows in new_rows.items():
            last_places = [row for row, of in enumerate(group) if of == name][-len(rows) :]
            own_places = left.get(name, last_places)
            replaced += own_places
            for place, row in zip(own_places, rows, strict=True):
                order[place] = row
        return torch.tensor(order, device=device), torch.tensor(replaced, device=device)
    order = []
    by_name = rollout.row_id.argsort().tolist()
    for at, row in enumerate(by_name):
        order.append(row)
        if at + 1 == len(by_name) or group[by_name[at + 1]] != group[row]:
            order += new_rows.get(group[row], [])
    return torch.tensor(order, device=device), torch.zeros(0, dtype=torch.long, device=device)


def renamed(drawn: Drawn) -> Drawn:
    """Name the rows by their order over all processes; a collective call."""
    rollout = drawn.rollout
    device = rollout.group.device
    rank, _ = distributed.world()
    counts = distributed.all_gather_rows(torch.tensor([len(rollout)], device=device)).tolist()
    names = torch.arange(len(rollout), device=device) + sum(counts[:rank])
    return replace(drawn, rollout=rollout.replace(row_id=names))


# ---------------------------------------------------------------------------------------------
# checkpoints, and from process to process


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
                "used": entry.used,
                "weights": entry.rewards.weights,
            }
        )
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, plain


def unpacked(tensors: Mapping[str, Tensor], plain: Any, prompts: int) -> list[Remembered]:
    """Make entries of what ``packed`` returned, as far as the data still has their prompts."""
    names: dict[int, list[str]] = {}
    for name in tensors:
        number, _, rest = name.partition("/")
        names.setdefault(int(number), []).append(rest)
    entries = []
    for n, entry in enumerate(plain or ()):
        if entry["index"] < prompts:
            rows = {name: tensors[f"{n}/{name}"] for name in names[n] if "/" not in name}
            rewards = {name: tensors[f"{n}/reward/{name}"] for name in entry["weights"]}
            entries.append(
                Remembered(
                    entry["index"],
                    entry["iteration"],
                    _rollout(rows),
                    Rewards(rewards, entry["weights"]),
                    entry["used"],
                )
            )
    return entries


def of_all_processes(entries: Sequence[Remembered], prompts: int) -> list[list[Remembered]]:
    """Gather the entries of every process, in order of rank; a collective call."""
    if distributed.world()[1] == 1:
        return [list(entries)]
    tensors, plain = packed(entries)
    parts = zip(
        distributed.all_gather_tensors(tensors), distributed.all_gather_json([plain]), strict=True
    )
    return [unpacked(part, text, prompts) for part, text in parts]


def _rollout(rows: Mapping[str, Tensor]) -> Rollout:
    """Make a rollout of one prompt from the tensors that are stored of it."""
    kind = next((kind for kind in KINDS if _required(kind) <= set(rows)), None)
    rows = {**rows, "group": torch.zeros_like(rows["row_id"])}
    return Rollout(
        trajectory=cast(Any, None if kind is None else kind(**_part(kind, rows))),
        provenance=Provenance(**_part(Provenance, rows)),
        **_part(Rollout, rows),
    )


def _required(kind: type[Fields]) -> set[str]:
    return {f.name for f in fields(kind) if f.default is not None}


def _part(kind: type[Fields], rows: Mapping[str, Tensor]) -> dict[str, Any]:
    return {f.name: rows[f.name] for f in fields(kind) if f.name in rows}
