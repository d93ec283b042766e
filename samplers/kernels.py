"""One step of a sampler on rectified flow: ``(x, v, t, s, eta) -> (mean, std)``.

The path is x_t = (1 - t) x_0 + t e with e standard normal; t = 1 is noise, t = 0 is data. The network gives the
velocity v = E[e - x_0 | x_t], so x_0 ~ x - t v and e ~ x + (1 - t) v, and the score of x_t is -(x + (1 - t) v) / t.

Every kernel takes x, v [B, *] and t, s, eta [B] or scalars, 0 <= s < t <= 1, and returns the mean [B, *] and the
standard deviation [B, 1, ...] of the state at time s, step length included: ``x_s = mean + std * noise``.
``eta = 0`` is the Euler step of the ODE, to the bit and row by row. Half-precision inputs are computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

Number = Tensor | float


def flow_sde(x: Tensor, v: Tensor, t: Number, s: Number, eta: Number) -> tuple[Tensor, Tensor]:
    """Flow-SDE of Flow-GRPO: noise eta sqrt(t / (1 - t)), so less of it the closer to the data.

    Liu et al. 2025, "Flow-GRPO", eq. 9. The noise is infinite at t = 1; there t / (1 - s) stands in, as published,
    which makes the injected std of a first step exactly eta.
    """
    x, v, t, s, eta = _align(x, v, t, s, eta)
    variance = eta**2 * t / (1 - torch.where(t < 1, t, s))
    return _euler_maruyama(x, v, t, s, variance)


def dance_sde(x: Tensor, v: Tensor, t: Number, s: Number, eta: Number) -> tuple[Tensor, Tensor]:
    """SDE of DanceGRPO: the same noise eta at every time.

    Xue et al. 2025, "DanceGRPO", section 3.2.
    """
    x, v, t, s, eta = _align(x, v, t, s, eta)
    return _euler_maruyama(x, v, t, s, eta**2)


def ode(x: Tensor, v: Tensor, t: Number, s: Number, eta: Number = 0.0) -> tuple[Tensor, Tensor]:
    """Euler step of the probability-flow ODE, without noise whatever eta says."""
    x, v, t, s, eta = _align(x, v, t, s, eta)
    return x + v * (s - t), torch.zeros_like(t)


def _align(x: Tensor, v: Tensor, t: Number, s: Number, eta: Number) -> tuple[Tensor, ...]:
    """Everything in one dtype of at least float32; t, s, eta as [B, 1, ...].

    Times are rounded to the dtype of the state first, so that a recorded time and the grid it came from agree.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, v.dtype), torch.float32)
    shape = (len(x), *[1] * (x.ndim - 1))

    def per_row(value: Number) -> Tensor:
        value = torch.as_tensor(value, dtype=dtype, device=x.device)
        return value.reshape(-1, *shape[1:]).expand(shape)

    return x.to(dtype), v.to(dtype), per_row(t), per_row(s), per_row(eta)


def _euler_maruyama(x: Tensor, v: Tensor, t: Tensor, s: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """dx = (v - variance / 2 * score) dt + sqrt(variance) dw, backwards in time: the marginals of the ODE, kept.

    ``variance`` [B, 1, ...] is that of the noise per unit of time.
    """
    noise = x + (1 - t) * v  # [B, *] the predicted noise e; the score is -e / t
    mean = x + (v + variance / (2 * t) * noise) * (s - t)
    return mean, (variance * (t - s)).sqrt()
