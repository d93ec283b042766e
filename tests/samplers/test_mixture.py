"""Kernels and solvers on a mixture of two Gaussians, whose marginals are known at every time,
without Monte Carlo.

A kernel carries a density from one time to the next by quadrature on a line; a solver carries
quantiles.
"""

import math

import pytest
import torch

from samplers.kernels import (
    consistency,
    cps,
    dance_sde,
    flow_ddim,
    flow_sde,
    memoryless,
    ode,
    wan_sde,
)
from samplers.processes import Flow
from samplers.solvers import ddim, dpm

SHARE = torch.tensor([0.3, 0.7], dtype=torch.float64)  # of the two components
CENTRE = torch.tensor([-0.9, 0.7], dtype=torch.float64)
SPREAD = torch.tensor([0.25, 0.4], dtype=torch.float64)
BEGIN = 0.9
END = 0.2
LINE = torch.linspace(-4.0, 4.0, 257, dtype=torch.float64)
CELL = float(LINE[1] - LINE[0])


def parts(t):
    """Mean and variance [2] of the components of x_t = (1 - t) x_0 + t e."""
    return (1 - t) * CENTRE, ((1 - t) * SPREAD) ** 2 + t**2


def weighted_densities(x, t):
    """[N, 2] share times density of each component at x [N]."""
    mean, variance = parts(t)
    return (
        SHARE
        * torch.exp(-((x[:, None] - mean) ** 2) / (2 * variance))
        / (2 * math.pi * variance).sqrt()
    )


def density(x, t):
    return weighted_densities(x, t).sum(1)


def below(x, t):
    """[N] probability that x_t is less than x."""
    mean, variance = parts(t)
    return (SHARE * torch.special.ndtr((x[:, None] - mean) / variance.sqrt())).sum(1)


def velocity(x, t):
    """[N] E[e - x_0 | x_t = x], by the posterior of the component and of x_0 within it."""
    mean, variance = parts(t)
    posterior = weighted_densities(x, t)
    posterior = posterior / posterior.sum(1, keepdim=True)
    each = -CENTRE + (t - (1 - t) * SPREAD**2) / variance * (x[:, None] - mean)
    return (posterior * each).sum(1)


def grid(steps):
    return torch.linspace(BEGIN, END, steps + 1, dtype=torch.float64).tolist()


def distance(kernel, eta, steps):
    """Total variation between what the kernel's steps make of the exact marginal at BEGIN, and that
    at END."""
    mass = density(LINE, BEGIN)
    times = grid(steps)
    for t, s in zip(times[:-1], times[1:], strict=True):
        mean, std = kernel(LINE[:, None], velocity(LINE, t)[:, None], t, s, eta)
        step = (LINE[:, None] - mean.T) / std.T  # [to, from]
        mass = (torch.exp(-0.5 * step**2) / std.T) @ mass * (CELL / math.sqrt(2 * math.pi))
    return float((mass - density(LINE, END)).abs().sum() * CELL / 2)


KERNELS = [
    (flow_sde, 0.7),
    (dance_sde, 0.5),
    (wan_sde, 0.9),
    (memoryless, 1.0),
    (flow_ddim, 0.7),
    (flow_ddim, 1.0),
]


def test_kernels_converge_to_the_marginal_at_first_order(subtests):
    for kernel, eta in KERNELS:
        with subtests.test(kernel=kernel, eta=eta):
            coarse, fine = (distance(kernel, eta, steps) for steps in (16, 64))
            assert fine < 0.013 and 3.7 < coarse / fine < 4.3, (coarse, fine)


def test_cps_and_consistency_are_no_sdes():
    """Their noise does not shrink with the step: finer grids bring the samples no closer to the
    marginal."""
    for kernel, eta in ((cps, 0.8), (consistency, 0.8)):
        coarse, fine = (distance(kernel, eta, steps) for steps in (64, 128))
        assert fine > 0.03 and fine > 0.85 * coarse, (kernel, coarse, fine)  # of first order: half


def euler(process):
    return lambda x, out, t, s: ode(x[:, None], out[:, None], t, s)[0][:, 0]


SOLVERS = [(euler, {}, 4), (ddim, {}, 4), (dpm, {"order": 1}, 4), (dpm, {"order": 2}, 16)]


@pytest.mark.parametrize(
    ("solver", "options", "gain"), SOLVERS, ids=["euler", "ddim", "dpm1", "dpm2"]
)
def test_solvers_keep_quantiles_at_their_order(solver, options, gain):
    """The probability below a path's state never changes along the exact flow."""
    start = torch.linspace(-2.5, 2.5, 101, dtype=torch.float64)
    errors = []
    for steps in (40, 160):
        step = solver(Flow(), **options)
        times = torch.tensor(grid(steps), dtype=torch.float64)
        x = start
        for t, s in zip(times[:-1], times[1:], strict=True):
            x = step(x, velocity(x, float(t)), t, s)
        errors.append(float((below(x, END) - below(start, BEGIN)).abs().max()))
    assert errors[1] < 0.01 and 0.75 * gain < errors[0] / errors[1] < 1.35 * gain, errors
