"""Defines time grids: ``(steps, *, ...) -> [steps + 1]`` float64, falling from 1 (noise) to 0
(data).

An impossible request is a ValueError that says what is possible.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor


def shift_time(time: Tensor, shift: float) -> Tensor:
    """Return shift t / (1 + (shift - 1) t): more of the steps near the noise for shift > 1 (Esser
    et al. 2024, eq. 23)."""
    if not shift > 0:
        raise ValueError(f"shift must be greater than 0, not {shift}")
    return shift * time / (1 + (shift - 1) * time)


def linear(steps: int) -> Tensor:
    """Spaces times evenly."""
    return _falling(steps, 0.0, steps + 1)


def shifted(steps: int, *, shift: float = 3.0) -> Tensor:
    """Spaces times evenly and shifts them once (DanceGRPO, MixGRPO).

    ``shift``: above 1 more steps are near the noise.
    """
    return shift_time(linear(steps), shift)


def flow_match_euler(steps: int, *, shift: float = 3.0, train_steps: int = 1000) -> Tensor:
    """Shifts the smallest time twice, as diffusers' FlowMatchEulerDiscreteScheduler (SD3, SD3.5).

    The times before the last are evenly spaced from 1 to shift(1 / train_steps), then shifted; 0 is
    appended. ``shift``: above 1 more steps are near the noise. ``train_steps``: training times of
    the model.
    """
    if train_steps < 1:
        raise ValueError(f"train_steps must be at least 1, not {train_steps}")
    smallest = shift_time(torch.tensor(1 / train_steps, dtype=torch.float64), shift)
    return _append_zero(shift_time(_falling(steps, float(smallest), steps), shift))


def dynamic(
    steps: int,
    *,
    mu: float | None = None,
    tokens: int | None = None,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
    base_tokens: int = 256,
    max_tokens: int = 4096,
    time_shift: Literal["exponential", "linear"] = "exponential",
    smallest: float | None = None,
    terminal: float | None = None,
) -> Tensor:
    """Shifts times by the resolution, as pipelines of diffusers do (FLUX, Qwen-Image, SD3 with mu).

    ``mu``: logarithm of the shift; null: on the line through (base_tokens, base_shift) and
    (max_tokens, max_shift) at ``tokens``. ``tokens``: the number of image tokens. ``base_shift``,
    ``base_tokens``: first point of that line. ``max_shift``, ``max_tokens``: its second point.
    ``time_shift``: the shift is exp(mu), or mu itself (linear). ``smallest``: the last time above 0
    before shifting; null: 1 / steps (FLUX); SD3 pipelines take 1 / 1000. ``terminal``: the last
    time above 0 after stretching (``shift_terminal`` of Qwen-Image and LTX); null: not stretched.
    """
    if mu is None and tokens is not None:
        if base_tokens == max_tokens:
            raise ValueError(f"base_tokens and max_tokens must differ, both are {base_tokens}")
        slope = (max_shift - base_shift) / (max_tokens - base_tokens)
        mu = base_shift + slope * (tokens - base_tokens)
    elif mu is None or tokens is not None:
        raise ValueError(
            "a dynamic time grid needs exactly one of mu and tokens (the number of image tokens)"
        )
    shift = {"exponential": math.exp, "linear": float}[time_shift](mu)
    smallest = 1 / max(steps, 1) if smallest is None else smallest
    if not 0 < smallest <= 1:
        raise ValueError(f"smallest must lie between 0 and 1, not {smallest}")
    times = shift_time(_falling(steps, smallest, steps), shift)
    return _append_zero(times if terminal is None else _stretch(times, terminal))


def compressed(times: Tensor, after: int, ratio: float) -> Tensor:
    """Return the grid [K + 1] with fewer steps after step ``after``: int(ratio * remaining), at
    least 1 (MixGRPO-Flash).

    The new times lie evenly on the old grid's curve, which keeps its shift.
    """
    if not 0 < ratio <= 1:
        raise ValueError(
            f"the share of steps kept after the noise window must lie in (0, 1], not {ratio}"
        )
    rest = len(times) - 1 - after
    if rest <= 0:
        return times
    index = torch.linspace(
        after, len(times) - 1, max(1, int(rest * ratio)) + 1, dtype=torch.float64
    )
    low = index.floor().long().clamp_max(len(times) - 2)
    tail = torch.lerp(times[low], times[low + 1], index - low)
    return torch.cat([times[:after], tail])


def _falling(steps: int, end: float, count: int) -> Tensor:
    if steps < 1:
        raise ValueError(f"a time grid needs at least 1 step, not {steps}")
    return torch.linspace(1.0, end, count, dtype=torch.float64)


def _stretch(times: Tensor, terminal: float) -> Tensor:
    """Scale 1 - t so that the last of the times becomes ``terminal``."""
    if not 0 < terminal < 1 or len(times) < 2:
        raise ValueError(
            f"terminal must lie between 0 and 1 and needs 2 steps; got {terminal} "
            f"and {len(times)} steps"
        )
    return 1 - (1 - times) * (1 - terminal) / (1 - times[-1])


def _append_zero(times: Tensor) -> Tensor:
    return torch.cat([times, times.new_zeros(1)])
