"""Defines learning-rate schedules and the moving average's decay, as pure functions of the step."""

from __future__ import annotations

import math


def lr_factor(schedule: str, step: int, warmup: int, total: int) -> float:
    """Return the factor of the learning rate at optimizer step ``step`` of ``total``."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    left = max(0.0, 1 - (step - warmup) / max(1, total - warmup))
    return {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 - math.cos(math.pi * left))}[
        schedule
    ]


def ema_decay(step: int, limit: float) -> float:
    """Return the decay of a moving average at optimizer step ``step``: small at first, so that the
    start is soon forgotten."""
    return min(limit, (1 + step) / (10 + step))
