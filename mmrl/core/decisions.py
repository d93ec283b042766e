"""Measures the decisions of records, and adds decisions to score."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.distributed import all_gather_rows
from mmrl.core.types import Point, Rollout
from samplers.warp import TINY, EntropyScale


def entropy_scale(rollout: Rollout) -> EntropyScale | None:
    """Measure the range of the log entropies of a rollout's decisions, over all processes; None if
    there are none."""
    every = all_gather_rows(rollout.entropies()[rollout.mask]).double()
    if not len(every):
        return None
    logs = every.clamp_min(TINY).log()
    std = logs.std(correction=0)
    h = (logs - logs.median()) / (std + TINY)
    values = torch.stack([logs.median(), std, h.max().clamp_min(TINY), h.min().clamp_max(-TINY)])
    return EntropyScale(*values.tolist())


def judged(point: Point, token: int) -> Point:
    """Append ``token`` to every answer of a point, to be scored too: [B, L + 1]."""
    last = point.mask.sum(1, keepdim=True)
    blank = torch.zeros_like(point.target[:, :1])
    target = torch.cat([point.target, blank], 1).scatter(1, last, token)
    mask = torch.cat([point.mask, torch.zeros_like(point.mask[:, :1])], 1)
    return point.replace(target=target, state=target, mask=mask.scatter(1, last, True))


def behind(mask: Tensor, values: Tensor) -> Tensor:
    """Select from values [B, L + 1] the one after each row of ``mask`` [B, L], [B]."""
    return values.gather(1, mask.sum(1, keepdim=True))[:, 0]
