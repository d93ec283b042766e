"""Solves the steps that need no density deterministically: ``solver(process) -> step``, ``step(x,
out, t, s) -> x_s``.

A step function keeps the state of multistep methods, so every batch needs a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from samplers.processes import Process

Step = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def ddim(process: Process) -> Step:
    """Keeps the predicted noise and scales it down (Song et al. 2021, eq. 12, eta 0): Euler on a
    flow."""

    def step(x: Tensor, output: Tensor, t: Tensor, s: Tensor) -> Tensor:
        alpha, sigma = process.scales(s, x)
        return alpha * process.clean(x, output, t) + sigma * process.noise(x, output, t)

    return step


def dpm(
    process: Process,
    *,
    order: Literal[1, 2] = 2,  # of the method; 1 is DDIM
) -> Step:
    """Extrapolates the predicted data (DPM-Solver++, Lu et al. 2022, algorithm 2, midpoint,
    multistep).

    With lambda = log(alpha / sigma) and h its step, x_s = sigma_s / sigma_t x - alpha_s (e^-h - 1)
    D, where D is the predicted x_0, at order 2 extrapolated by half a step from the previous one.
    The first step and a step to s = 0 are of first order. Order 1 is DDIM.
    """
    history: list[tuple[Tensor, Tensor]] = []  # of the step before: predicted x_0 and h

    def step(x: Tensor, output: Tensor, t: Tensor, s: Tensor) -> Tensor:
        (alpha_t, sigma_t), (alpha_s, sigma_s) = process.scales(t, x), process.scales(s, x)
        h = (alpha_s / sigma_s).log() - (alpha_t / sigma_t).log()
        clean = process.clean(x, output, t)
        estimate = clean
        if order == 2 and history:
            before, h_before = history[-1]
            # h_before is inf after t = 1
            weight = torch.where(h.isfinite(), 0.5 * h / h_before, torch.zeros_like(h))
            estimate = clean + weight * (clean - before)
        history[:] = [(clean, h)]
        return sigma_s / sigma_t * x - alpha_s * torch.expm1(-h) * estimate

    return step
