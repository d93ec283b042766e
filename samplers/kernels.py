"""Computes one stochastic step of a sampler: ``(x, v, t, s, eta) -> (mean, std)``. Most kernels are
for rectified flow.

The path is x_t = (1 - t) x_0 + t e with e standard normal; t = 1 is noise, t = 0 is data. The
network gives the velocity v = E[e - x_0 | x_t], so x_0 ~ x - t v and e ~ x + (1 - t) v, and the
score of x_t is -(x + (1 - t) v) / t.

Every kernel takes x, v [B, *] and t, s, eta [B] or scalars, 0 <= s < t <= 1, and returns the mean
[B, *] and the standard deviation [B, 1, ...] of the state at time s, step length included: ``x_s =
mean + std * noise``. ``eta = 0`` is the Euler step of the ODE, row by row. Half-precision inputs
are computed in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samplers.processes import Diffusion, Flow, Number, Process, TrigFlow, per_row


def flow_sde(
    x: Tensor, v: Tensor, t: Number, s: Number, eta: Number, second: float | None = None
) -> tuple[Tensor, Tensor]:
    """Adds Flow-GRPO's noise, eta sqrt(t / (1 - t)): less of it the closer to the data.

    Liu et al. 2025, "Flow-GRPO", eq. 9. The noise is infinite at t = 1; in the first step it is
    replaced by t / (1 - s), as published, which makes the injected std of a step from 1 exactly
    eta. The first step begins above ``second``, the grid's second time, be it at 1 or by rounding
    or a shift just below; None: at 1.
    """
    x, v, t, s, eta = _align(x, v, t, s, eta)
    first = t >= 1 if second is None else t > second  # rounded to the type of t, as the grid is
    variance = eta**2 * t / (1 - torch.where(first, s, t))
    return _euler_maruyama(x, v, t, s, variance)


def dance_sde(x: Tensor, v: Tensor, t: Number, s: Number, eta: Number) -> tuple[Tensor, Tensor]:
    """Adds DanceGRPO's noise, the same eta at every time.

    Xue et al. 2025, "DanceGRPO", section 3.2.
    """
    x, v, t, s, eta = _align(x, v, t, s, eta)
    return _euler_maruyama(x, v, t, s, eta**2)


def wan_sde(x: Tensor, v: Tensor, t: Number, s: Number, eta: Number) -> tuple[Tensor, Tensor]:
    """Adds Flow-GRPO's noise for Wan, eta t, with eta the second time of the grid as published."""
    x, v, t, s, eta = _align(x, v, t, s, eta)
    return _euler_maruyama(x, v, t, s, (eta * t) ** 2)


def memoryless(
    x: Tensor, v: Tensor, t: Number, s: Number, eta: Number, second: float | None = None
) -> tuple[Tensor, Tensor]:
    """Adds noise eta sqrt(2 t / (1 - t)): at eta = 1 the end of a path is independent of its
    beginning.

    Domingo-Enrich et al. 2025, "Adjoint Matching", section 4.3: only then does fine-tuning tilt the
    model's distribution by the reward without a bias from the initial noise. The first step is as
    in ``flow_sde``.
    """
    return flow_sde(x, v, t, s, torch.as_tensor(eta) * math.sqrt(2), second)


def cps(x: Tensor, v: Tensor, t: Number, s: Number, eta: Number) -> tuple[Tensor, Tensor]:
    """Preserves the flow's coefficients (Flow-CPS): noise s sin(eta pi / 2), whatever the step
    length.

    Wang et al. 2025, "Coefficients-Preserving Sampling". Predicted data and noise keep the scales
    of time s, but as the noise does not shrink with the step, there is no SDE limit for finer
    grids.
    """
    x, v, t, s, eta = _align(x, v, t, s, eta)
    angle = eta * (math.pi / 2)
    return _towards(x, v, t, s, s * angle.cos()), s * angle.sin()


def flow_ddim(x: Tensor, v: Tensor, t: Number, s: Number, eta: Number) -> tuple[Tensor, Tensor]:
    """Steps as DDIM on a flow, std eta s sqrt(1 - s^2 (1 - t)^2 / (t^2 (1 - s)^2)); eta = 1 is
    ancestral.

    Song et al. 2021, "DDIM", eq. 16, written for alpha = 1 - t, sigma = t. No noise in a step to s
    = 0.
    """
    x, v, t, s, eta = _align(x, v, t, s, eta)
    # share of the variance that stays
    remaining = (s * (1 - t) / (t * (1 - s)).clamp_min(torch.finfo(x.dtype).tiny)) ** 2
    std = eta * s * (1 - remaining).clamp_min(0).sqrt()
    return _towards(x, v, t, s, (s**2 - std**2).clamp_min(0).sqrt()), std


def ode(x: Tensor, v: Tensor, t: Number, s: Number, eta: Number = 0.0) -> tuple[Tensor, Tensor]:
    """Takes an Euler step of the probability-flow ODE, without noise, whatever eta is."""
    x, v, t, s, eta = _align(x, v, t, s, eta)
    return x + v * (s - t), torch.zeros_like(t)


# the default process; a policy passes its own
EPSILON = Diffusion()
FLOW = Flow()


def ddim(
    x: Tensor, v: Tensor, t: Number, s: Number, eta: Number, process: Process = EPSILON
) -> tuple[Tensor, Tensor]:
    """Steps as DDIM with noise, for networks of epsilon, v or the sample; eta = 1 is ancestral
    (DDPO).

    Song et al. 2021, "DDIM", eq. 12 and 16: std^2 = eta^2 sigma_s^2 / sigma_t^2 (1 - alpha_t^2 /
    alpha_s^2). A step to a state without noise adds none.
    """
    (alpha_t, sigma_t), (alpha_s, sigma_s) = process.scales(t, x), process.scales(s, x)
    variance = (sigma_s / sigma_t) ** 2 * (1 - (alpha_t / alpha_s) ** 2)
    std = per_row(eta, x) * variance.clamp_min(0).sqrt()
    clean, noise = (f(x.to(std), v.to(std), t) for f in (process.clean, process.noise))
    return alpha_s * clean + (sigma_s**2 - std**2).clamp_min(0).sqrt() * noise, std


def consistency(
    x: Tensor, v: Tensor, t: Number, s: Number, eta: Number, process: Process = FLOW
) -> tuple[Tensor, Tensor]:
    """Jumps to the predicted data and adds noise again (consistency models); eta = 1: all fresh.

    Luo et al. 2023, "Latent Consistency Models", algorithm 3; between 0 and 1 the share eta^2 of
    its variance. A step to a state without noise adds none.
    """
    (alpha_s, sigma_s), eta = process.scales(s, x), per_row(eta, x)
    clean, noise = (f(x.to(sigma_s), v.to(sigma_s), t) for f in (process.clean, process.noise))
    return alpha_s * clean + sigma_s * (1 - eta**2).clamp_min(0).sqrt() * noise, sigma_s * eta


# kernels whose first step depends on the grid's second time
for _kernel in (flow_sde, memoryless):
    vars(_kernel)["first_step"] = True
# the processes a kernel is for; those without this are for flows
vars(ddim)["process"] = Diffusion
vars(consistency)["process"] = (Flow, Diffusion, TrigFlow)


def _towards(x: Tensor, v: Tensor, t: Tensor, s: Tensor, noise_scale: Tensor) -> Tensor:
    """Mix (1 - s) times the predicted data with ``noise_scale`` times the predicted noise, [B,
    *]."""
    return (1 - s) * (x - t * v) + noise_scale * (x + (1 - t) * v)


def _align(x: Tensor, v: Tensor, t: Number, s: Number, eta: Number) -> tuple[Tensor, ...]:
    """Convert everything to one dtype of at least float32; t, s, eta to [B, 1, ...].

    Times are first rounded to the dtype of the state, so that recorded times and the grid agree.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, v.dtype), torch.float32)
    x = x.to(dtype)
    v = v.to(dtype)
    return x, v, per_row(t, x), per_row(s, x), per_row(eta, x)


def _euler_maruyama(
    x: Tensor, v: Tensor, t: Tensor, s: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Step dx = (v - variance / 2 * score) dt + sqrt(variance) dw backwards in time, which keeps
    the marginals of the ODE.

    ``variance`` [B, 1, ...] is that of the noise per unit of time.
    """
    noise = x + (1 - t) * v  # [B, *] the predicted noise e; the score is -e / t
    mean = x + (v + variance / (2 * t) * noise) * (s - t)
    return mean, (variance * (t - s)).sqrt()
