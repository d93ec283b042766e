"""Makes points of the decisions on a stored path of latents."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmrl.core.types import LatentPath, Point, Rollout, Transition


def decision(rollout: Rollout, length: Tensor, rows: Tensor, k: int) -> Point:
    """Make the point of decision k of the given rows."""
    latents = rollout.latents
    states = latents.states
    state_rows = rows.to(states.device)
    before, after = _places(latents, rows, k)

    def at_decision(x: Tensor) -> Tensor:
        return x[rows, min(k, x.shape[1] - 1), None]

    return Point(
        group=rollout.group[rows],
        cond=rollout.cond,
        row_id=rollout.row_id[rows],
        num_decisions=length[rows],
        state=states[state_rows, before].to(rollout.sample.dtype),
        target=states[state_rows, after].to(rollout.sample.dtype),
        step=Transition(
            time=latents.time[rows, k],
            next_time=latents.time[rows, k + 1],
            noise_level=latents.noise_level[rows, k],
        ),
        logprob=rollout.logprob[rows, k, None],
        mask=rollout.mask[rows, k, None],
        advantage=at_decision(rollout.advantages()),
        advantage_parts=rollout.parts(at_decision),
        provenance=rollout.provenance.columns(slice(k, k + 1)).map(lambda x: x[rows]),
    )


def _places(latents: LatentPath, rows: Tensor, k: int) -> tuple[Any, Any]:
    """Find the indices of the states before and after decision k of the given rows in their
    paths."""
    if latents.visit is None:
        return k, k + 1
    at = latents.visit[rows].to(latents.states.device)
    return at[:, k], at[:, k + 1]
