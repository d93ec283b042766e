"""Summarises the rewards of an iteration for the log."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.groups import measured, named
from mmrl.advantages.normalise import moments
from mmrl.core import distributed
from mmrl.core.distributed import all_gather_rows, all_sum
from mmrl.core.types import Rewards, Rollout
from mmrl.data.base import Outcome


def statistics(rewards: Rewards | Tensor, rollout: Rollout) -> dict[str, float]:
    """Return counts and spreads of the rewards over all processes, each of which must call it.

    ``reward/mean`` and ``reward/std`` of the weighted total, ``reward/group_std`` the root mean
    square std (population) inside the groups, ``groups/total``, ``groups/flat`` those with a spread
    of zero, ``samples/total``, ``samples/excluded`` those of them that could not be scored, and per
    reward ``reward/<name>/mean``, ``reward/<name>/std`` and ``reward/<name>/excluded``. Means leave
    excluded samples out and are NaN when nothing is left.
    """
    rewards = named(rewards).per_row() if isinstance(rewards, dict) else rewards
    double, groups = measured(rewards, rollout)
    total = double.total()
    present = groups.present
    compared = groups.size() > 0
    within = groups.centred(total).masked_fill(~present, 0.0).square().sum()
    flat = (groups.flat(total) & compared).sum()
    counts: list[int | Tensor] = [groups.count, flat, (~present).sum(), len(present), within]
    many, flat, missing, samples, within = all_sum(
        total.new_tensor([float(x) for x in counts])
    ).tolist()
    mean, variance = (float(x) for x in moments(total, present))
    left = samples - missing
    metrics = {
        "reward/mean": mean if left else torch.nan,
        "reward/std": variance**0.5 if left else torch.nan,
        "reward/group_std": (within / left) ** 0.5 if left else torch.nan,
        "groups/total": int(many),
        "groups/flat": int(flat),
        "samples/excluded": int(missing),
        "samples/total": int(samples),
    }
    for name, values in rewards.items() if isinstance(rewards, dict) else ():
        scored = values.isfinite()
        count = int(all_sum(scored.sum()))
        mean, variance = (float(x) for x in moments(values.double(), scored))
        metrics[f"reward/{name}/mean"] = mean if count else torch.nan
        metrics[f"reward/{name}/std"] = variance**0.5 if count else torch.nan
        metrics[f"reward/{name}/excluded"] = int(samples) - count
    return metrics


def outcomes(rewards: Rewards, rollout: Rollout) -> list[Outcome]:
    """Return how the groups of all processes were rewarded, for data sources that draw by it; NaN
    where nothing could be scored.

    Of prompts with an ``entry`` only. A collective call.
    """
    double, groups = measured(rewards.per_row(), rollout)
    total = double.total()
    names = rollout.group.unique().tolist()
    mean = groups.mean(total).masked_fill(groups.size() == 0, torch.nan)
    values_of: list[list[float]] = [[] for _ in names]
    for group, value in zip(groups.index.tolist(), total.tolist(), strict=True):
        values_of[group].append(value)
    largest = distributed.largest(max(map(len, values_of), default=0), total.device)
    rows = [
        [float(rollout.prompts[name]["entry"]), m, float(flat), *values]
        + [torch.nan] * (largest - len(values))
        for name, m, flat, values in zip(
            names, mean.tolist(), groups.flat(total).tolist(), values_of, strict=True
        )
        if "entry" in rollout.prompts[name]
    ]
    table = total.new_tensor(rows).view(-1, 3 + largest)
    return [
        Outcome(int(entry), m, bool(flat), tuple(v for v in values if v == v))
        for entry, m, flat, *values in all_gather_rows(table).tolist()
    ]
