"""Dynamic sampling: groups whose rewards are all equal teach nothing and are replaced (Yu et al.
2025, DAPO, eq. 11).

The prompt that takes a place, and its randomness, are functions of the iteration, the round and how
many such places come before, counted over all processes: the same training on any number of them,
and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.advantages.groups import measured
from mmrl.core import distributed
from mmrl.core.types import Media, Prompt, Rewards, Rollout
from mmrl.rollout.collect import joined, together
from mmrl.rollout.ground_truth import sampled_only
from samplers.noise import Rng


@dataclass(frozen=True)
class Drawn:
    """Samples with their rewards, and the groups that were sampled too but gave way to others.

    Of these ``gave_way`` has what says how they were rewarded; not their samples.
    """

    rollout: Rollout
    media: Media
    rewards: Rewards
    gave_way: tuple[tuple[Rollout, Rewards], ...] = ()

    def sampled(self) -> tuple[Rollout, Rewards]:
        """Everything the policy wrote itself in this iteration, also what is not trained on: for
        statistics."""
        parts = [(_outline(self.rollout), self.rewards.per_row()), *self.gave_way]
        rewards = {name: torch.cat([part[name] for _, part in parts]) for name in self.rewards}
        whole = joined([rollout for rollout, _ in parts])
        _, sampled, earned = sampled_only(
            [None] * len(whole), whole, Rewards(rewards, self.rewards.weights)
        )
        return sampled, earned


def _outline(rollout: Rollout) -> Rollout:
    """Which rows answer which prompts, without what they are."""
    nothing = torch.zeros_like(rollout.mask[:, :1])
    return Rollout(
        group=rollout.group,
        row_id=rollout.row_id,
        prompts=rollout.prompts,
        sample=rollout.row_id,
        mask=nothing,
        logprob=nothing.to(rollout.logprob),
        is_ground_truth=_marks(rollout, rollout.is_ground_truth),
        is_replayed=_marks(rollout, rollout.is_replayed),
    )


def _marks(rollout: Rollout, rows: Tensor | None) -> Tensor:
    return torch.zeros_like(rollout.group, dtype=torch.bool) if rows is None else rows


def resampled(
    drawn: Drawn,
    choose: Callable[[float], Prompt],
    draw: Callable[[list[Prompt], Rng], Drawn],
    streams: Sequence[Rng],
    spread: float = 0.0,
) -> tuple[Drawn, dict[str, float]]:
    """As many rounds as there are ``streams``, or fewer. Also counts, over all processes, for the
    log.

    ``choose`` gives the prompt at a number in [0, 1). ``spread``: as in ``flat_groups``.
    """
    replaced = 0
    rounds = 0
    rank, _ = distributed.world()
    for stream in streams:
        flat = flat_groups(drawn, spread)
        counts = distributed.all_gather_rows(
            torch.tensor([len(flat)], device=drawn.rollout.group.device)
        ).tolist()
        if not any(counts):
            break
        # all processes draw equally many, as sharded models need
        first = sum(counts[:rank])
        most = max(counts)
        chosen = stream.fold("prompts").uniform(torch.arange(first, first + most))
        new_prompts = [choose(u) for u in chosen.tolist()]
        drawn = exchanged(drawn, draw(new_prompts, Rng(stream.key, first)), flat)
        replaced = replaced + sum(counts)
        rounds = rounds + 1
    left = distributed.all_sum(
        torch.tensor(len(flat_groups(drawn, spread)), device=drawn.rollout.group.device)
    )
    return drawn, {
        "resample/groups": replaced,
        "resample/rounds": rounds,
        "resample/left": int(left),
    }


def flat_groups(drawn: Drawn, spread: float = 0.0) -> list[int]:
    """Groups whose scored samples all have one reward, or that have none, in the order of their
    rows' names.

    ``spread``: the standard deviation (population) of a group's rewards up to which they count as
    one; continuous rewards are never equal.
    """
    rewards = drawn.rewards.per_row() if isinstance(drawn.rewards, Rewards) else drawn.rewards
    double, groups = measured(rewards, drawn.rollout)
    rollout = drawn.rollout
    total = double.total()
    level = groups.flat(total)
    if spread:
        level = level | (groups.variance(total, 0).sqrt() <= spread)
    level = level[groups.index].to(rollout.row_id.device)
    first = {}
    for name, group in sorted(
        zip(rollout.row_id[level].tolist(), rollout.group[level].tolist(), strict=True)
    ):
        first.setdefault(group, name)
    return list(first)


def exchanged(drawn: Drawn, new: Drawn, flat: Sequence[int]) -> Drawn:
    """The groups ``flat`` of ``drawn`` give way to the first of ``new``, which take their places
    and names of rows."""
    if not flat:
        return drawn
    old = drawn.rollout
    count = len(drawn.rollout.prompts)
    pooled = joined([old, new.rollout])
    gone = torch.isin(old.group, torch.tensor(flat, device=old.group.device))
    rows = [(~gone).nonzero()[:, 0]]
    names = [old.row_id[~gone]]
    for k, place in enumerate(flat):
        rows.append((pooled.group == count + k).nonzero()[:, 0])
        names.append(old.row_id[old.group == place])
    index = torch.cat(rows)
    name = torch.cat(names)
    order = name.argsort()
    index = index[order]
    name = name[order]
    rewards = {
        key: torch.cat([value, new.rewards[key]])[index] for key, value in drawn.rewards.items()
    }
    media = together([drawn.media, new.media])
    chosen = (
        media[index.to(media.device)]
        if isinstance(media, Tensor)
        else [media[row] for row in index.tolist()]
    )
    lost = Rewards(
        {key: value[gone] for key, value in drawn.rewards.items()}, drawn.rewards.weights
    )
    gave_way = (*drawn.gave_way, (_outline(old)[gone], lost.per_row()))
    return Drawn(
        pooled[index].replace(row_id=name),
        chosen,
        Rewards(rewards, drawn.rewards.weights),
        gave_way,
    )
