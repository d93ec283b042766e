"""What is known of texts besides their reward: how long they are and which were cut off at the limit."""

from __future__ import annotations

import torch
from torch import Tensor

from . import distributed
from .types import Media, Rewards, Rollout


def finished(media: Media, rollout: Rollout) -> Tensor:
    """[B, 1] bool: False where an answer was cut off at the limit; all True for what has no end of its own."""
    ended = (
        [getattr(answer, "finished", True) for answer in media] if isinstance(media, list) else [True] * len(rollout)
    )
    return torch.tensor(ended, dtype=torch.bool, device=rollout.mask.device)[:, None]


def lengths(media: Media, rollout: Rollout) -> dict[str, float]:
    """Mean, smallest and largest number of tokens, and the share cut off, over all processes; {} for other media."""
    answers = [one for one in media if hasattr(one, "tokens")] if isinstance(media, list) else []
    if not answers:
        return {}
    tokens = torch.tensor([float(answer.tokens) for answer in answers], device=rollout.mask.device, dtype=torch.float64)
    cut = (~finished(media, rollout)).double().sum()
    count, total, many = distributed.all_sum(torch.stack([tokens.new_tensor(len(answers)), tokens.sum(), cut])).tolist()
    most, least = distributed.all_max(torch.stack([tokens.max(), -tokens.min()])).tolist()
    names = ("answer/tokens", "answer/min", "answer/max", "answer/cut")
    return dict(zip(names, (total / count, -least, most, many / count), strict=True))


def lengths_by_reward(media: Media, rollout: Rollout, rewards: Rewards) -> dict[str, float]:
    """Mean tokens of answers with more than the iteration's mean reward, and of the others, over all processes.

    With a reward of 0 or 1 these are the right and the wrong ones. {} for other media; a side without answers is left
    out.
    """
    if not (isinstance(media, list) and media and hasattr(media[0], "tokens")):
        return {}
    tokens = torch.tensor([float(answer.tokens) for answer in media], dtype=torch.float64)
    total = rewards.per_row().total().double().cpu()
    known = total.isfinite()
    tokens, total = tokens[known], total[known]
    device = rollout.mask.device
    count, whole = distributed.all_sum(torch.stack([known.sum().double(), total.sum()]).to(device)).tolist()
    better = total > whole / max(count, 1)
    sums = [side for rows in (better, ~better) for side in (rows.sum().double(), tokens[rows].sum())]
    many, high, few, low = distributed.all_sum(torch.stack(sums).to(device)).tolist()
    found = {"answer/tokens_better": (high, many), "answer/tokens_worse": (low, few)}
    return {name: value / number for name, (value, number) in found.items() if number}
