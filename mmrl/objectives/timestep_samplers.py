"""Times of the forward process for objectives that re-noise finished samples.

A time sampler is ``(rng, name, draws, grid) -> [B, D]`` with times in (0, 1], 1 being noise. Rows
of equal ``name`` [B] draw the same; ``grid`` [B, K + 1] are the times the sampler visited, None for
models that have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from annotated_types import Gt, Le
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import TIMES
from samplers.noise import Rng
from samplers.schedules import shift_time

Share = Annotated[float, Gt(0), Le(1)]
TimeSampler = Callable[[Rng, Tensor, int, Tensor | None], Tensor]


@TIMES.register("steps")
def steps(
    rng: Rng,
    name: Tensor,
    draws: int,
    grid: Tensor | None,
    *,
    share: Share = 0.99,
    skip: int = 0,
    alike: bool = False,
) -> Tensor:
    """Draw distinct steps of the sampler's own grid, for each row by itself or the same for all.

    From the first int(share * steps), the noisy ones, without the first ``skip``; at most as many
    as there are.

    share: of the grid, from its noisy end. skip: first steps left out. alike: the same steps for
    all rows.
    """
    if grid is None:
        raise UserError(
            "only flow and diffusion models have a sampler's grid, whose times this objective uses"
        )
    last = int((grid.shape[1] - 1) * share + 1e-9)
    if not 0 <= skip < last:
        raise UserError(
            f"share {share} and skip {skip} leave none of the sampler's {grid.shape[1] - 1} steps"
        )
    # [B, K]
    order = rng.uniform(torch.zeros_like(name) if alike else name, (last - skip,)).argsort(1)
    return grid.gather(1, order[:, :draws].to(grid.device) + skip)


@TIMES.register("early_steps")
def early_steps(
    rng: Rng, name: Tensor, draws: int, grid: Tensor | None, *, share: Share = 0.6
) -> Tensor:
    """Draw the same steps for all rows, out of the noisy part of the sampler's grid (DGPO).

    share: of the grid, from its noisy end.
    """
    return steps(rng, name, draws, grid, share=share, alike=True)


@TIMES.register("uniform")
def uniform(
    rng: Rng, name: Tensor, draws: int, grid: Tensor | None, *, low: float = 0.0, high: float = 1.0
) -> Tensor:
    """Draw times uniformly between two times.

    low, high: the two times.
    """
    if not 0 <= low < high <= 1:
        raise UserError(
            f"the time sampler uniform needs 0 <= low < high <= 1, not {low} and {high}"
        )
    return low + (high - low) * rng.uniform(name, (draws,))


@TIMES.register("logit_normal")
def logit_normal(
    rng: Rng,
    name: Tensor,
    draws: int,
    grid: Tensor | None,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    shift: float = 1.0,
) -> Tensor:
    """Draw the sigmoid of a normal number (Esser et al. 2024, section 3.1), shifted towards
    noise.

    mean, std: of the normal number. shift: above 1 more times are near the noise.
    """
    if std <= 0 or shift <= 0:
        raise UserError(
            f"the time sampler logit_normal needs std > 0 and shift > 0, not {std} and {shift}"
        )
    return shift_time((mean + std * rng.normal(name, (draws,), 0, torch.float64)).sigmoid(), shift)
