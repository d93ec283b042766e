"""What the rewards of an iteration look like, for the log."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.groups import measured
from mmrl.advantages.normalise import moments
from mmrl.distributed import all_sum
from mmrl.types import Rewards, Rollout


def statistics(rewards: Rewards | Tensor, rollout: Rollout) -> dict[str, float]:
    """Counts and spreads over all processes, each of which must call it.

    ``reward`` and ``reward_std`` of the weighted total, ``group_std`` the root mean square std (population) inside
    the groups, ``groups``, ``flat_groups`` those with a spread of zero, ``samples``, ``missing`` those of them that
    could not be scored, and per reward ``reward/<name>`` and ``missing/<name>``. Means leave missing samples out and
    are NaN when nothing is left.
    """
    double, groups = measured(rewards, rollout)
    total, present = double.total(), groups.present
    there = groups.size() > 0
    within = groups.centred(total).masked_fill(~present, 0.0).square().sum()
    flat = (groups.flat(total) & there).sum()
    counts = [groups.count, flat, (~present).sum(), len(present), within]
    many, flat, missing, samples, within = all_sum(total.new_tensor([float(x) for x in counts])).tolist()
    mean, variance = (float(x) for x in moments(total, present))
    left = samples - missing
    found = {
        "reward": mean if left else torch.nan,
        "reward_std": variance**0.5 if left else torch.nan,
        "group_std": (within / left) ** 0.5 if left else torch.nan,
        "groups": int(many),
        "flat_groups": int(flat),
        "missing": int(missing),
        "samples": int(samples),
    }
    for name, values in rewards.items() if isinstance(rewards, dict) else ():
        here = values.isfinite()
        count = int(all_sum(here.sum()))
        found[f"reward/{name}"] = float(moments(values.double(), here)[0]) if count else torch.nan
        found[f"missing/{name}"] = int(samples) - count
    return found
