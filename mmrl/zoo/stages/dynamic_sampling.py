"""Replaces groups of equal rewards, which have no gradient: dynamic sampling (Yu et al. 2025, DAPO,
eq. 11).

The new prompt, and its randomness, depend on the iteration, the round and how many replaced groups
come before, counted over all processes: training is the same on any number of them, and after a
resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from mmrl.advantages.groups import measured
from mmrl.config.options import TrainOptions
from mmrl.core import distributed
from mmrl.core.effects import Effects
from mmrl.core.registry import STAGES
from mmrl.core.types import Copies, Prompt, Rewards
from mmrl.data.base import pick
from mmrl.rollout.collect import joined, media_of, together
from mmrl.rollout.stages import Drawn, Sample, Setup, Stage, group_sizes, moments, outline
from samplers.noise import Rng


@STAGES.register("dynamic_sampling")
class DynamicSampling(Stage):
    """Draws other prompts for groups of equal rewards, in ``train.dynamic_sampling_rounds``
    rounds."""

    option = "dynamic_sampling_rounds"
    effects = Effects(looks_at_samples=True, renames_rows=True, in_dry_run=False)

    def __init__(self, options: TrainOptions, prompts: Sequence[Prompt]):
        self.options = options
        self.prompts = prompts

    @classmethod
    def build(cls, setup: Setup) -> DynamicSampling | None:
        return cls(setup.options, setup.prompts) if setup.options.dynamic_sampling_rounds else None

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        options = self.options
        streams = [
            Rng.of(options.seed, iteration, "resample", n)
            for n in range(options.dynamic_sampling_rounds)
        ]
        return resampled(
            drawn,
            lambda u: pick(self.prompts, u, iteration),
            sample,
            streams,
            options.dynamic_sampling_min_std,
        )


def resampled(
    drawn: Drawn,
    choose: Callable[[float], Prompt],
    draw: Sample,
    streams: Sequence[Rng],
    spread: float = 0.0,
) -> tuple[Drawn, dict[str, float]]:
    """Replace groups of equal rewards, in at most as many rounds as there are ``streams``.

    Also returns counts over all processes, for the log.

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
        rng, sizes = same_sizes(drawn, flat, most, replace(stream, offset=first))
        drawn = exchanged(drawn, draw(new_prompts, rng, sizes), flat)
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
    """List the groups whose scored samples all have the same reward, or that have none, in the
    order of their rows' names.

    ``spread``: the standard deviation (population) of a group's rewards up to which they count as
    equal; continuous rewards are never exactly equal.
    """
    rewards = drawn.rewards.per_row() if isinstance(drawn.rewards, Rewards) else drawn.rewards
    double, groups = measured(rewards, drawn.rollout)
    rollout = drawn.rollout
    total = double.total()
    level = groups.flat(total)
    if spread:
        level = level | (groups.variance(total, 0).sqrt() <= spread)
    level = level[groups.index].to(rollout.row_id.device)
    first: dict[int, int] = {}
    for name, group in sorted(
        zip(rollout.row_id[level].tolist(), rollout.group[level].tolist(), strict=True)
    ):
        first.setdefault(group, name)
    return list(first)


def same_sizes(drawn: Drawn, flat: Sequence[int], most: int, rng: Rng) -> tuple[Rng, Copies]:
    """Return copies for ``most`` prompts, as many as the groups ``flat`` have: one number where all
    groups are equally large. The stream returned numbers rows consecutively over all processes."""
    device = drawn.rollout.group.device
    counts = group_sizes(drawn.rollout)
    largest = distributed.largest(max(counts), device)
    # groups that were replaced before have no rows any more
    if largest == -distributed.largest(-min(filter(None, counts)), device):
        return rng, largest
    sizes = [counts[group] for group in flat]
    every: list[int] = distributed.all_gather_rows(
        torch.tensor(sizes, dtype=torch.long, device=device)
    ).tolist()
    rng = replace(rng, first_row=sum(every[: rng.offset]))
    return rng, sizes + [largest] * (most - len(flat))


def exchanged(drawn: Drawn, new: Drawn, flat: Sequence[int]) -> Drawn:
    """Replace the groups ``flat`` of ``drawn`` by the first of ``new``, which take their row
    names."""
    if not flat:
        return drawn
    old = drawn.rollout
    fresh = new.rollout
    if old.all_samples is not None:
        fresh = fresh.replace(all_samples=moments(fresh, new.rewards))
    count = len(drawn.rollout.prompts)
    pooled = joined([old, fresh])
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
    chosen = media_of(together([drawn.media, new.media]), index)
    lost = Rewards(
        {key: value[gone] for key, value in drawn.rewards.items()}, drawn.rewards.weights
    )
    gave_way = (*drawn.gave_way, (outline(old)[gone], lost.per_row()))
    return Drawn(
        pooled[index].replace(row_id=name),
        chosen,
        Rewards(rewards, drawn.rewards.weights),
        gave_way,
        drawn.unused,
    )
