"""Builds optimizers by name, and defines learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

import torch
from annotated_types import Ge, Lt
from torch import nn

from mmrl.core.registry import OPTIMIZERS

NotNegative = Annotated[float, Ge(0)]
Decay = Annotated[float, Ge(0), Lt(1)]


@OPTIMIZERS.register("adamw")
def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    lr: NotNegative = 1e-4,
    weight_decay: NotNegative = 1e-4,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NotNegative = 1e-8,
) -> torch.optim.Optimizer:
    """Build AdamW (Loshchilov and Hutter 2019)."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)


@OPTIMIZERS.register("sgd")
def sgd(
    parameters: Iterable[nn.Parameter],
    *,
    lr: NotNegative = 1e-2,
    momentum: NotNegative = 0.0,
    weight_decay: NotNegative = 0.0,
) -> torch.optim.Optimizer:
    """Build stochastic gradient descent."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)


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
