"""Makes trial passes of a flow policy at random states, to measure their speed before a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmrl.core.types import Query, Renoised, Transition
from mmrl.policies.base import rows_of, without_empty
from samplers.windows import FIXED


def outputs(
    policy: Any, prompts: int, cond: dict[str, Any], rows: int, renoised: bool = False
) -> Tensor:
    """Return the means [rows, D] of decisions at the first step of paths, whose states are noise;
    ``renoised``: at a re-noised state, as objectives of finished samples use, without guidance.

    ``cond``: the conditions of ``prompts`` prompts, which the rows take in turn.
    """
    row = torch.arange(rows, device=policy.device)
    group = row % prompts
    noise = FIXED.normal(row, policy.shape, 0, policy.dtype)
    state = policy.begin(noise, rows_of(without_empty(cond), group))
    first = policy.times[:2].to(policy.device, policy.dtype)
    time, after = first.expand(rows, -1).unbind(1)
    unit = torch.ones_like(time)
    step = Renoised(time=time, x0_per_output=unit, snr=unit) if renoised else None
    point = Query(
        group=group,
        cond=cond,
        row_id=row,
        state=state,
        step=step or Transition(time=time, next_time=after, noise_level=unit),
        mask=torch.ones_like(row, dtype=torch.bool)[:, None],
    )
    mean: Tensor = policy.dist(point).mean
    return mean.flatten(1)
