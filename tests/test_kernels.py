"""Kernels: published vectors, exact convergence on a Gaussian target, what eta = 0 means, dtypes."""

import math

import pytest
import torch

from mmrl.registry import describe
from samplers import KERNELS
from samplers.kernels import dance_sde, flow_sde, ode

X = torch.tensor([[0.5, -1, 1.5, 0.25], [-0.75, 0.4, 0.1, -1.2]]).view(2, 1, 2, 2)
V = torch.tensor([[0.2, -0.6, 0.9, -0.3], [1.1, -0.5, 0.35, 0.7]]).view(2, 1, 2, 2)
E = torch.tensor([[1, -0.5, 0.3, -1.2], [0.7, 0.2, -0.9, 1.5]]).view(2, 1, 2, 2)
SIG = [1, 0.9, 0.75, 0.5, 0.2, 0]


def mean_logp(x, mean, std):
    """[B] Gaussian log-density, mean over the dimensions of a sample."""
    dense = -((x - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return dense.flatten(1).mean(1)


def near(found, wanted, atol=2e-6):
    wanted = torch.as_tensor(wanted, dtype=found.dtype).view_as(found)
    torch.testing.assert_close(found, wanted, atol=atol, rtol=0)


# -- published numbers (specs section 9) -------------------------------------------------------------------------------


def test_tv1_flow_sde_first_step():
    mean, std = flow_sde(X, V, SIG[0], SIG[1], 0.7)
    near(std / math.sqrt(0.1), [2.2135942] * 2)
    near(mean[0], [0.3575, -0.695, 1.0425, 0.21875])
    near(mean_logp(mean + std * E, mean, std), [-0.90976357, -1.01101351])


def test_tv1_flow_sde_middle_step():
    mean, std = flow_sde(X, V, SIG[2], SIG[3], 0.7)
    near(std / 0.5, [1.21243548] * 2)
    near(mean, [0.31525, -0.56825, 0.852375, 0.282125, -0.908625, 0.457625, -0.0334375, -1.123875])
    x = mean + std * E
    near(x[0], [0.92146778, -0.87135893, 1.03424037, -0.44533631])
    near(x[1], [-0.4842726, 0.57886857, -0.57903343, -0.21454853])
    near(mean_logp(x, mean, std), [-0.76592255, -0.86717248])


def test_tv1b_replay_under_other_weights():
    mean, std = flow_sde(X, V, SIG[2], SIG[3], 0.7)
    x = mean + std * E
    moved, _ = flow_sde(X, V + 0.01, SIG[2], SIG[3], 0.7)
    logp = mean_logp(x, moved, std)
    near(logp, [-0.76542228, -0.86911094])
    near((logp - mean_logp(x, mean, std)).exp(), [1.00050044, 0.99806345])
    near((moved - mean).square().flatten(1).mean(1) / (2 * (std.flatten() / 0.5) ** 2), [3.3e-6] * 2, atol=5e-8)


def test_tv3_dance_sde():
    mean, std = dance_sde(X, V, SIG[2], SIG[3], 0.3)
    x = mean + std * E
    near(x, [0.59175, -0.90775, 1.294125, 0.142375, -0.912875, 0.550875, -0.1253125, -1.134625])
    near(mean_logp(x, mean, std), [0.6306814, 0.52943146])
    near(-((x - mean) ** 2 / (2 * std**2)).flatten(1).mean(1), [-0.3475, -0.44875])
    mean, std = dance_sde(X, V, SIG[0], SIG[1], 0.3)
    near(mean_logp(mean + std * E, mean, std), [1.08882654, 0.9875766])


# -- identities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("s", [0.96, 0.9, 0.5, 0.0])
def test_first_step_of_flow_sde_injects_exactly_eta(s):
    near(flow_sde(X, V, 1.0, s, 0.7)[1], [0.7] * 2, atol=2e-7)


@pytest.mark.parametrize("t, s", [(0.9, 0.75), (0.5, 0.2), (0.2, 0.0)])
def test_both_sdes_are_one_formula(t, s):
    """I1: the Flow-SDE is the Dance-SDE with the noise eta sqrt(t / (1 - t)), row by row."""
    x, v, eta = X.double(), V.double(), torch.tensor([0.7, 0.2], dtype=torch.float64)
    flow, dance = flow_sde(x, v, t, s, eta), dance_sde(x, v, t, s, eta * math.sqrt(t / (1 - t)))
    for found, wanted in zip(flow, dance, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("t, s", [(1.0, 0.9), (1.0, 0.0), (0.5, 0.4), (0.3, 0.0), (0.008929, 0.0)])
def test_without_noise_it_is_euler_to_the_bit(name, t, s):
    mean, std = KERNELS[name](X, V, t, s, torch.tensor([0.0, 0.7]))
    assert torch.equal(mean[0], (X + V * (torch.tensor(s) - torch.tensor(t)))[0]) and std[0].item() == 0
    assert mean.isfinite().all() and std.isfinite().all()
    assert (std[1].item() > 0) == (name != "ode")


@pytest.mark.parametrize("name", KERNELS)
def test_rows_of_one_batch_have_their_own_times(name):
    t, s, eta = torch.tensor([1.0, 0.6]), torch.tensor([0.8, 0.0]), torch.tensor([0.3, 0.9])
    together = KERNELS[name](X, V, t, s, eta)
    for b in range(2):
        alone = KERNELS[name](X[b : b + 1], V[b : b + 1], float(t[b]), float(s[b]), float(eta[b]))
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[b : b + 1], part)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 1, 2, 2), (2, 4, 3, 2, 2)])
def test_shapes_and_description(name, shape):
    mean, std = KERNELS[name](torch.ones(shape), torch.zeros(shape), 0.5, 0.25, 0.5)
    assert mean.shape == shape and std.shape == (2, *[1] * (len(shape) - 1))
    assert describe(KERNELS[name])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_half_precision_is_computed_in_float32(name, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    grid = torch.tensor([0.75, 0.5], dtype=torch.float64)
    found = KERNELS[name](X.to(dtype), V.to(dtype), grid[0], grid[1], 0.7)
    wanted = KERNELS[name](X.to(dtype).to(wide), V.to(dtype).to(wide), grid[0].to(wide), grid[1].to(wide), 0.7)
    assert all(part.dtype == wide and torch.equal(part, other) for part, other in zip(found, wanted, strict=True))


def test_a_velocity_of_higher_precision_is_not_rounded():
    assert flow_sde(X.bfloat16(), V.double(), 0.5, 0.2, 0.7)[0].dtype == torch.float64


@pytest.mark.parametrize("name", KERNELS)
def test_gradient_to_the_velocity_is_right(name):
    v = V.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: KERNELS[name](X.double(), v, torch.tensor([1.0, 0.5]), 0.2, 0.6)[0], v)


# -- convergence: exact propagation of mean and variance, no Monte Carlo error -----------------------------------------

CENTRE, SPREAD = 0.8, 0.5  # of the target


def marginal(t):
    """Mean and variance of x_t = (1 - t) x_0 + t e."""
    return (1 - t) * CENTRE, ((1 - t) * SPREAD) ** 2 + t**2


def velocity(x, t):
    """E[e - x_0 | x_t = x] of the Gaussian target."""
    mean, variance = marginal(t)
    return -CENTRE + (t - (1 - t) * SPREAD**2) / variance * (x - mean)


def final_error(kernel, eta, steps, begin):
    """(mean, std) of the samples minus those of the target. The step is affine in x, so two points tell it all."""
    mean, variance = marginal(begin)
    grid = torch.linspace(begin, 0, steps + 1, dtype=torch.float64).tolist()
    for t, s in zip(grid[:-1], grid[1:], strict=True):
        x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        (zero, one), std = kernel(x, velocity(x, t), t, s, eta)
        slope = (one - zero).item()
        mean, variance = slope * mean + zero.item(), slope**2 * variance + std[0].item() ** 2
    return abs(mean - CENTRE), abs(math.sqrt(variance) - SPREAD)


CASES = [(flow_sde, 0.7), (flow_sde, 0.3), (dance_sde, 0.3), (dance_sde, 1.0), (ode, 0.0)]


@pytest.mark.parametrize("kernel, eta", CASES)
def test_from_the_exact_marginal_convergence_is_of_first_order(kernel, eta):
    errors = [final_error(kernel, eta, steps, begin=0.9) for steps in (160, 640, 2560)]
    assert max(mean for mean, _ in errors) < 1e-12  # the mean is transported exactly, only the spread is not
    assert errors[-1][1] < 3e-4
    for coarse, fine in zip(errors[:-1], errors[1:], strict=True):
        assert 3.4 < coarse[1] / fine[1] < 4.6  # four times the steps


@pytest.mark.parametrize("kernel, eta", CASES)
def test_from_pure_noise_the_right_marginal_is_reached(kernel, eta):
    """The guard of flow_sde at t = 1 adds an error of order 1 that is forgotten at a rate of steps^-(eta^2)."""
    errors = [final_error(kernel, eta, steps, begin=1.0) for steps in (10, 2560)]
    assert max(mean for mean, _ in errors) < 1e-12
    assert errors[1][1] < 1e-3 and errors[1][1] < errors[0][1] / 20


def test_a_wrong_drift_would_be_seen():
    """The convergence test has teeth: with the score's sign turned around the marginal is off at any step size."""

    def turned(x, v, t, s, eta):
        right, std = dance_sde(x, v, t, s, eta)
        return 2 * ode(x, v, t, s)[0] - right, std

    assert final_error(turned, 0.3, 2560, begin=0.9)[1] > 0.02
