"""Measures texts: their length, and which were truncated at the limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.types import Completion, Media, Rewards, Rollout


def finished(media: Media, rollout: Rollout) -> Tensor:
    """Tell whether each row's answer ended by itself, [B, 1] bool: False if it was truncated at the
    limit; True for media that have no end token."""
    ended = (
        [not isinstance(answer, Completion) or answer.finished for answer in media]
        if isinstance(media, list)
        else [True] * len(rollout)
    )
    return torch.tensor(ended, dtype=torch.bool, device=rollout.mask.device)[:, None]


def written(media: Sequence[str], rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Find the rows that are texts of counted tokens, [n] long, and how many each has, [n]
    float64."""
    counted = [
        (row, float(answer.tokens))
        for row, answer in enumerate(media)
        if isinstance(answer, Completion) and answer.tokens is not None
    ]
    rows, tokens = zip(*counted, strict=True) if counted else ((), ())
    device = rollout.mask.device
    return torch.tensor(rows, device=device).long(), torch.tensor(
        tokens, device=device, dtype=torch.float64
    )


def lengths(media: Media, rollout: Rollout) -> dict[str, float]:
    """Measure the mean, smallest and largest number of tokens, and the share truncated, over all
    processes; {} for other media."""
    if not isinstance(media, list):
        return {}
    _, tokens = written(media, rollout)
    cut = (~finished(media, rollout)).double().sum()
    count, total, many = distributed.all_sum(
        torch.stack([tokens.new_tensor(len(tokens)), tokens.sum(), cut])
    ).tolist()
    ends = (
        torch.stack([tokens.max(), -tokens.min()])
        if len(tokens)
        else tokens.new_full((2,), -torch.inf)
    )
    most, least = distributed.all_max(ends).tolist()
    if not count:
        return {}
    names = ("answer/tokens", "answer/min", "answer/max", "answer/cut")
    return dict(zip(names, (total / count, -least, most, many / count), strict=True))


def lengths_by_reward(media: Media, rollout: Rollout, rewards: Rewards) -> dict[str, float]:
    """Measure the mean tokens of answers with more than the iteration's mean reward, and of the
    others, over all processes.

    With a reward of 0 or 1 these are the right and the wrong ones. {} for other media; a side
    without answers is left out.
    """
    if not isinstance(media, list):
        return {}
    rows, tokens = written(media, rollout)
    rows = rows.cpu()
    tokens = tokens.cpu()
    total = rewards.per_row().total().double().cpu()[rows]
    known = total.isfinite()
    tokens = tokens[known]
    total = total[known]
    device = rollout.mask.device
    count, whole = distributed.all_sum(
        torch.stack([known.sum().double(), total.sum()]).to(device)
    ).tolist()
    better = total > whole / max(count, 1)
    sums = [
        side for rows in (better, ~better) for side in (rows.sum().double(), tokens[rows].sum())
    ]
    many, high, few, low = distributed.all_sum(torch.stack(sums).to(device)).tolist()
    sides = {"answer/tokens_better": (high, many), "answer/tokens_worse": (low, few)}
    return {name: value / number for name, (value, number) in sides.items() if number}
