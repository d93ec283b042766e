"""Samples a rollout in parts: the rewards of one part are computed while the next is sampled.

Randomness is keyed by the row, so that the samples do not depend on the number of parts, up to
rounding: a few units in the last place, where the rounding of a matrix product depends on the
position of a row in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.sharding import in_step, sharded
from mmrl.core.types import Copies, LatentPath, Media, Prompt, Rewards, Rollout, per_prompt
from mmrl.policies.base import NO_CONTEXT, Policy, RolloutContext
from samplers.batching import chunks
from samplers.noise import Rng

EMPTY = "uncond"  # the condition of the empty prompt: one for all

Score = Callable[[Media, list[Prompt]], Rewards]


@dataclass(frozen=True)
class Sampled:
    """Holds what the policy sampled itself in an iteration: no ground-truth or replayed answers."""

    iteration: int  # from 0
    media: Media
    rollout: Rollout  # with the masks and advantages that are trained on
    rewards: Rewards  # as measured
    shaped: Rewards  # as compared
    # with the groups that were replaced; shaped if none was
    everything: tuple[Rollout, Rewards]
    metrics: Mapping[str, float]  # of the stages and the monitors before


Monitor = Callable[[Sampled], dict[str, float]]


class RewardStream(Protocol):
    """Scores a batch that arrives in parts."""

    def put(self, media: Media, prompts: list[Prompt], group: Tensor) -> None: ...

    def result(self) -> Rewards: ...


@runtime_checkable
class GroupScorer(Protocol):
    """Scores knowing which rows are a group, also in parts (``Scorer``)."""

    def __call__(
        self, media: Media, prompts: list[Prompt], group: Tensor | None = None
    ) -> Rewards: ...

    def stream(self, rows: int) -> RewardStream: ...


class Share(NamedTuple):
    """Says how many prompts all processes resample, and where this process's begin among them;
    ``idle``: extra ones, since sharded models need equally many on all processes."""

    total: int
    offset: int
    idle: int


def evenly(count: int, device: torch.device) -> Share:
    """Distribute what is resampled, of which this process has ``count`` prompts; a collective
    call."""
    counts = distributed.all_gather_rows(torch.tensor([count], device=device)).tolist()
    rank, _ = distributed.world()
    return Share(sum(counts), sum(counts[:rank]), max(counts) - count)


def draw(
    policy: Policy,
    prompts: Sequence[Prompt],
    copies: Copies,
    rng: Rng,
    scorer: Score,
    parts: int = 1,
    context: RolloutContext = NO_CONTEXT,
) -> tuple[Rollout, Media, Callable[[], Rewards]]:
    """Sample, and return the rollout, its media and a function that waits for the rewards.

    ``scorer``: a ``Scorer``; with one part any ``(media, prompts) -> Rewards``, called when the
    rewards are asked for.
    """
    parts = min(parts, len(prompts))
    if parts < 2 or not isinstance(scorer, GroupScorer):
        rollout = policy.rollout(list(prompts), copies, rng, context)
        media = policy.decode(rollout)
        return rollout, media, lambda: scored(scorer, media, rollout)
    sizes = per_prompt(copies, len(prompts))
    stream = scorer.stream(sum(sizes))
    done = []
    decoded = []
    for first, last in pairwise(i * len(prompts) // parts for i in range(parts + 1)):
        part = policy.rollout(
            list(prompts[first:last]),
            copies if isinstance(copies, int) else copies[first:last],
            rng.after(copies, first),
            context,
        )
        decoded.append(policy.decode(part))
        done.append(part)
        stream.put(decoded[-1], part.prompt_per_row(), part.group + first)
    return joined(done), together(decoded), stream.result


def scored(scorer: Score, media: Media, rollout: Rollout) -> Rewards:
    """Score a rollout. A ``Scorer`` is given the groups of the rows; other functions are not."""
    if isinstance(scorer, GroupScorer):
        return scorer(media, rollout.prompt_per_row(), rollout.group)
    return scorer(media, rollout.prompt_per_row())


class Unscored:
    """Replaces the scorer on processes whose rows another process scores."""

    def __call__(self, media: Media, prompts: list[Prompt], group: Tensor | None = None) -> Rewards:
        return Rewards({})

    def stream(self, rows: int) -> RewardStream:
        return self

    def put(self, media: Media, prompts: list[Prompt], group: Tensor) -> None: ...

    def result(self) -> Rewards:
        return Rewards({})


def once(scorer: Any) -> Any:
    """Return the scorer on the process that scores for all that hold the same rows; ``shared`` then
    broadcasts the rewards."""
    return scorer if distributed.leads() else Unscored()


def shared(rewards: Rewards, weights: Mapping[str, float] | None = None) -> Rewards:
    """Return the rewards of the process that scored these rows; a collective call. ``weights``: of
    the scorer."""
    return Rewards(distributed.of_first(rewards), weights or rewards.weights)


def together(media: Sequence[Media]) -> Media:
    """Join the samples of all parts, in order."""
    tensors = [part for part in media if isinstance(part, Tensor)]
    if len(tensors) == len(media):
        return torch.cat(tensors)
    return [item for part in media for item in part]


def media_of(media: Media, rows: Tensor) -> Media:
    """Take the samples of these rows, [n] long."""
    if isinstance(media, Tensor):
        return media[rows.to(media.device)]
    return [media[row] for row in rows.tolist()]


def appended(*parts: Rollout) -> Rollout:
    """Append rows that answer prompts of the first part, to which their ``group`` already leads."""
    longest = max(part.mask.shape[1] for part in parts)
    states = max(
        part.trajectory.states.shape[1] if isinstance(part.trajectory, LatentPath) else 0
        for part in parts
    )
    return Rollout.cat([with_room(padded(part, longest), states) for part in parts])


@torch.no_grad()
def rescored(policy: Policy, rollout: Rollout, rows: Tensor) -> Tensor:
    """Score the decisions of ``rows`` [B] bool under the current weights: the log-probs [B, K] of
    all rows, those of the others unchanged. Every process makes equally many passes."""
    logprob = rollout.logprob.flatten().clone()
    places = torch.arange(len(logprob), device=logprob.device).double()
    chosen = rollout.replace(logprob=places.view_as(rollout.logprob))[rows]
    size = policy.pass_sizes.rows or max(len(rollout), 1)
    idle = rollout[:1].replace(logprob=places[: rollout.logprob.shape[1]][None])
    idle = idle.replace(
        mask=torch.zeros_like(idle.mask) if policy.keep_groups_together else idle.mask
    )
    parts = (chosen[part] for part in chunks(len(chosen), size))
    for part, counts in in_step(parts, idle, policy.device, sharded(policy.net)):
        for point in policy.path(part):
            scores = policy.dist(point).log_prob(point.target).to(logprob)
            where = point.mask & counts
            logprob[point.recorded[where].long()] = scores[where]
    return logprob.view_as(rollout.logprob)


def joined(parts: Sequence[Rollout]) -> Rollout:
    """Join parts into one rollout of all prompts. Shorter ones are padded at the end, masked."""
    longest = max(part.mask.shape[1] for part in parts)
    states = max(
        part.trajectory.states.shape[1] if isinstance(part.trajectory, LatentPath) else 0
        for part in parts
    )
    first = 0
    edges = 0
    rows = []
    for part in parts:
        part = with_room(padded(part, longest), states)
        branch = None if part.edge_id is None else part.edge_id + edges
        edges = edges if branch is None else int(branch.max()) + 1
        rows.append(part.replace(group=part.group + first, edge_id=branch, cond=None))
        first += len(part.prompts)
    prompts = tuple(prompt for part in parts for prompt in part.prompts)
    return Rollout.cat(rows).replace(
        prompts=prompts, cond=conditions([part.cond for part in parts])
    )


def padded(rollout: Rollout, length: int) -> Rollout:
    """Pad token rows to ``length`` decisions; rollouts with a path have equally many steps
    anyway."""
    have = rollout.mask.shape[1]

    def pad(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != have:
            return tensor
        return torch.cat(
            [tensor, tensor.new_zeros(len(tensor), length - have, *tensor.shape[2:])], 1
        )

    if have == length:
        return rollout
    return rollout.map(pad)


def with_room(rollout: Rollout, states: int) -> Rollout:
    """Pad the path to ``states`` states: rows with other stochastic steps may have fewer.

    ``visit`` points to none of the new ones."""
    path = rollout.trajectory
    if not isinstance(path, LatentPath) or path.states.shape[1] == states:
        return rollout
    room = path.states.new_zeros(
        len(rollout), states - path.states.shape[1], *path.states.shape[2:]
    )
    return rollout.replace(trajectory=path.replace(states=torch.cat([path.states, room], 1)))


def conditions(parts: Sequence[Any]) -> Any:
    """Join the conditions of the parts to the condition [P, *] of all prompts."""
    first = parts[0]
    if isinstance(first, dict):
        return {
            key: first[key] if key == EMPTY else conditions([part[key] for part in parts])
            for key in first
        }
    if isinstance(first, list):
        return [item for part in parts for item in part]
    if isinstance(first, tuple):
        return tuple(conditions(items) for items in zip(*parts, strict=True))
    if not isinstance(first, Tensor):
        return first
    if len({part.shape[1:] for part in parts}) > 1:
        raise UserError(
            "train: this policy encodes prompts of different lengths to tensors of different "
            "shapes, which cannot be joined: set reward_overlap_chunks to 1 and leave out "
            "dynamic_sampling_rounds and replay_buffer, or take prompts of one length"
        )
    return torch.cat(list(parts))
