"""What the forward-process objectives share: noise a finished sample, compare the velocity with
what was added.

They need no log-probs of the path, so any deterministic solver may have sampled.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mmrl.core.distributions import Dist, Gaussian
from mmrl.core.errors import UserError
from mmrl.core.types import LatentPath, Point, Rollout
from mmrl.objectives.timestep_samplers import TimeSampler
from mmrl.policies.base import Policy, first_of_group
from samplers.noise import Rng

VELOCITIES = (
    "this objective compares velocities: it is for flow and diffusion models, not for token models"
)


def noised(
    policy: Policy, rollout: Rollout, rng: Rng, times: TimeSampler, draws: int, shared: bool = False
) -> Iterator[Point]:
    """Re-noise each row ``draws`` times (fewer if the sampler has fewer), each time with fresh
    noise, or with noise shared by the group."""
    if not isinstance(rollout.trajectory, LatentPath):
        raise UserError(VELOCITIES)
    name = first_of_group(rollout) if shared else rollout.row_id
    when = times(rng.fold("time"), name, draws, rollout.trajectory.time)  # [B, D]
    per_draw = (
        policy.renoise(rollout, rng.fold("noise", j), t, shared)
        for j, t in enumerate(when.unbind(1))
    )
    return (
        point.replace(num_decisions=point.num_decisions * when.shape[1])
        for points in per_draw
        for point in points
    )


def velocity(dist: Dist) -> Tensor:
    """Return what the network predicts at a re-noised state, [B, *]."""
    if not isinstance(dist, Gaussian):
        raise UserError(VELOCITIES)
    return dist.mean


def mean_square(x: Tensor) -> Tensor:
    """Average the squares over all dimensions of x [B, *], [B, 1]."""
    return x.square().flatten(1).mean(1, keepdim=True)


def mean_absolute(x: Tensor) -> Tensor:
    """Average the absolute values over all dimensions of x [B, *], [B, 1] in float64."""
    return x.double().abs().flatten(1).mean(1, keepdim=True)


def error(dist: Dist, point: Point) -> Tensor:
    """Return [B, 1]: the denoising error: mean square of the velocity minus (noise - sample)."""
    return mean_square(velocity(dist) - point.target)


def comparisons(point: Point) -> Tensor:
    """Return [B] long: which rows are compared: those of one group, at its first visit, at its
    second ... (shared) noise.

    ``point`` holds every row equally often.
    """
    visits = len(point) // len(point.row_id.unique())
    order = point.row_id.argsort(stable=True)
    visit = torch.empty_like(order)
    visit[order] = torch.arange(len(order), device=order.device) % visits
    return point.group * visits + visit


def summed(x: Tensor, index: Tensor) -> Tensor:
    """Return [max index + 1, 1]: sums of x [B, 1] by index [B]."""
    return x.new_zeros(int(index.max()) + 1, 1).index_add(0, index, x)


def positive(where: str, **options: float) -> None:
    """Raise UserError for options that are not positive numbers."""
    wrong = {name: value for name, value in options.items() if not value > 0}
    if wrong:
        raise UserError(
            f"{where}: must be positive: "
            f"{', '.join(f'{name} {value}' for name, value in wrong.items())}"
        )
