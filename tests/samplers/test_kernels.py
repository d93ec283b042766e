"""Kernels: published vectors, exact convergence on a Gaussian target, what eta = 0 means,
dtypes."""

import math
from functools import partial
from itertools import product

import pytest
import torch

from mmrl.core.distributions import Score
from samplers.kernels import (
    consistency,
    cps,
    dance_sde,
    ddim,
    flow_ddim,
    flow_sde,
    memoryless,
    ode,
    wan_sde,
)
from samplers.processes import Consistent, Diffusion, Flow, TrigFlow, noised
from samplers.schedules import shift_time
from samplers.solvers import ddim as ddim_solver
from samplers.solvers import dpm
from samplers.tables import KERNELS

X = torch.tensor([[0.5, -1, 1.5, 0.25], [-0.75, 0.4, 0.1, -1.2]]).view(2, 1, 2, 2)
V = torch.tensor([[0.2, -0.6, 0.9, -0.3], [1.1, -0.5, 0.35, 0.7]]).view(2, 1, 2, 2)
E = torch.tensor([[1, -0.5, 0.3, -1.2], [0.7, 0.2, -0.9, 1.5]]).view(2, 1, 2, 2)
SIG = [1, 0.9, 0.75, 0.5, 0.2, 0]
FLOWS = [name for name, kernel in KERNELS.items() if not hasattr(kernel, "process")]
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
# the others round in another order
TO_THE_BIT = ["flow_sde", "dance_sde", "wan_sde", "memoryless", "ode"]


def mean_logp(x, mean, std):
    """[B] Gaussian log-density, mean over the dimensions of a sample."""
    dense = -((x - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return dense.flatten(1).mean(1)


def near(actual, expected, atol=2e-6):
    expected = torch.as_tensor(expected, dtype=actual.dtype).view_as(actual)
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


# What the published functions return


STABLE = Diffusion(final=float(Diffusion().alphas[0]))  # set_alpha_to_one false
STEPS = {  # kernel and its arguments; what the function computes of the first values
    # Flow-GRPO (Liu et al. 2025), eq. 9: sde_step_with_logprob at noise level 0.7
    "flow_sde, first": (
        (flow_sde, 1, 0.9, 0.7),
        {
            "std": [0.7, 0.7],
            "mean": [0.3575, -0.695, 1.0425, 0.21875],
            "logp": [-0.90976357, -1.01101351],
        },
    ),
    "flow_sde": (
        (flow_sde, 0.75, 0.5, 0.7),
        {
            "std": [0.60621774, 0.60621774],
            "mean": [0.31525, -0.56825, 0.852375, 0.282125, -0.908625, 0.457625, -0.0334375],
            "x": [0.92146778, -0.87135893, 1.03424037, -0.44533631, -0.4842726, 0.57886857],
            "logp": [-0.76592255, -0.86717248],
        },
    ),
    # DanceGRPO (Xue et al. 2025), section 3.2: flux_step of its train_grpo_flux at eta 0.3
    "dance_sde, first": ((dance_sde, 1, 0.9, 0.3), {"logp": [1.08882654, 0.9875766]}),
    "dance_sde": (
        (dance_sde, 0.75, 0.5, 0.3),
        {
            "x": [0.59175, -0.90775, 1.294125, 0.142375, -0.912875, 0.550875, -0.1253125],
            "logp": [0.6306814, 0.52943146],
        },
    ),
    # Flow-GRPO's sde_step_with_logprob for Wan: noise by the second time of the grid
    "wan_sde": (
        (wan_sde, 0.75, 0.5, 0.9),
        {
            "mean": [0.40823436, -0.76267183, 1.1440078, 0.31171095, -0.98892969, 0.50411719],
            "std": [0.3375, 0.3375],
        },
    ),
    # Coefficients-Preserving Sampling (Wang et al. 2025): sde_step_with_logprob of Flow-CPS
    "cps": (
        (cps, 0.75, 0.5, 0.8),
        {
            "std": [0.47552827, 0.47552827],
            "mean": [0.25997967, -0.4526847, 0.67902714, 0.264539, -0.86089152, 0.42998981],
            "score": [-0.15715837, -0.20294912],
        },
    ),
    "cps, first": (
        (cps, 1, 0.9, 0.7),
        {"std": [0.80190587, 0.80190587], "score": [-0.44692189, -0.57714009]},
    ),
    "cps, last": ((cps, 0.2, 0, 0.8), {"std": [0, 0], "mean": (X - 0.2 * V).flatten().tolist()}),
    # DDPO (Black et al. 2023) and DanceGRPO: ddim_step_with_logprob, eta 1, with DDIMScheduler's
    # scaled linear betas
    "ddim, first": (
        (partial(ddim, process=STABLE), 0.982, 0.962, 1.0),
        {"std": [0.4544633] * 2, "logp": [-0.47780049, -0.57905048]},
    ),
    "ddim": (
        (partial(ddim, process=STABLE), 0.502, 0.482, 1.0),
        {"std": [0.29478469] * 2, "x": [0.79677522], "logp": [-0.04492848, -0.1461785]},
    ),
    "ddim, last": ((partial(ddim, process=STABLE), 0.002, 0, 1.0), {"std": [0.02064835] * 2}),
    # MixGRPO (Li et al. 2025), dpm_solver_first_order_update of its SDE
    "flow_ddim": (
        (flow_ddim, 0.75, 0.5, 1.0),
        {
            "mean": [0.26666668, -0.46666664, 0.70000005, 0.26666668, -0.86666673, 0.43333331],
            "std": [0.47140452] * 2,
        },
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_the_published_functions(name):
    (kernel, *arguments), expected = STEPS[name]
    mean, std = kernel(X, V, *arguments)
    x = mean + std * E
    found = {"mean": mean, "std": std, "x": x}
    found |= {"logp": mean_logp(x, mean, std)} if "logp" in expected else {}
    found |= {"score": Score(mean, std).log_prob(x)} if "score" in expected else {}
    for what, values in expected.items():
        near(found[what].flatten()[: len(values)], values)


def test_ratio_and_divergence_of_a_step_under_other_weights():
    """Flow-GRPO's log-probs, ratio and KL with a velocity larger by 0.01."""
    mean, std = flow_sde(X, V, 0.75, 0.5, 0.7)
    x = mean + std * E
    moved, _ = flow_sde(X, V + 0.01, 0.75, 0.5, 0.7)
    logp = mean_logp(x, moved, std)
    near(logp, [-0.76542228, -0.86911094])
    near((logp - mean_logp(x, mean, std)).exp(), [1.00050044, 0.99806345])
    gap = (moved - mean).square().flatten(1).mean(1)
    near(gap / (2 * (std.flatten() / 0.5) ** 2), [3.3e-6] * 2, atol=5e-8)


FINALS = {  # DiffusionNFT (Zheng et al. 2025), solver.run_sampling; v = 0.5 x - 0.1 t
    2: ([0.33978865, -0.56338203, 0.9419024, 0.18926018], [-0.41285369, 0.27957726, 0.0989431]),
    1: ([0.34117872, -0.54114127, 0.92939192, 0.19412535], [-0.39408797, 0.28235734, 0.10589337]),
}


@pytest.mark.parametrize(
    ("step", "order"),
    [(dpm(Flow(), order=2), 2), (dpm(Flow(), order=1), 1), (ddim_solver(Flow()), 1)],
)
def test_deterministic_solvers_of_diffusion_nft(step, order):
    x = X
    for t, s in zip(SIG[:-1], SIG[1:]):
        x = step(x, 0.5 * x - 0.1 * t, torch.tensor(float(t)), torch.tensor(float(s)))
    for row, values in zip(x, FINALS[order]):
        near(row.flatten()[: len(values)], values)


@pytest.mark.parametrize("kind", ["flow", "stable diffusion"])
def test_dpm_is_diffusers_solver(kind):
    """On flow times of shift 3, DGPO's (Luo et al. 2025) ten steps, and on Stable Diffusion's
    process."""
    from diffusers import DPMSolverMultistepScheduler

    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    noise = BETAS | {"solver_order": 2, "final_sigmas_type": "zero"}
    plain = DPMSolverMultistepScheduler(**(flow if kind == "flow" else noise))
    plain.set_timesteps(10)
    step = dpm(Flow() if kind == "flow" else Diffusion())
    x, y = X.double(), X.double()
    for k, timestep in enumerate(plain.timesteps):
        after = plain.timesteps[k + 1] if k + 1 < len(plain.timesteps) else -1
        grid = (timestep + 1) / 1000, (torch.as_tensor(after) + 1) / 1000
        t, s = plain.sigmas[k : k + 2].double() if kind == "flow" else grid
        x = step(x, 0.5 * x - 0.1 * timestep / 1000, t, s)
        y = plain.step(0.5 * y - 0.1 * timestep / 1000, timestep, y).prev_sample
    near(x.float(), y.float().flatten(), atol=2e-5)
    if kind == "flow":
        near(x[0], [0.33978665, -0.56339651, 0.94190878, 0.18925612])


def test_flow_ddim_with_noise():
    """DiffusionNFT (Zheng et al. 2025), solver.run_sampling: ddim at eta 0.7, log-probs of each
    step."""
    x = X.double()
    means = []
    for t, s in zip(SIG[:-2], SIG[1:-1]):
        mean, std = flow_ddim(x, 0.5 * x - 0.1 * t, t, s, 0.7)
        x = mean + std * E
        means.append(mean_logp(x, mean, std)[0])
    near(torch.stack(means), [-0.80440313, -0.56318998, -0.15772499, 0.73194337])


# Identities


def test_without_noise_it_is_euler(subtests):
    for name in FLOWS:
        for t, s in [(1.0, 0.9), (1.0, 0.0), (0.5, 0.4), (0.3, 0.0), (0.008929, 0.0)]:
            with subtests.test(name=name, t=t, s=s):
                mean, std = KERNELS[name](X, V, t, s, torch.tensor([0.0, 0.7]))
                euler = (X + V * (torch.tensor(s) - torch.tensor(t)))[0]
                torch.testing.assert_close(
                    mean[0], euler, atol=0 if name in TO_THE_BIT else 2e-7, rtol=0
                )
                assert std[0].item() == 0 and mean.isfinite().all() and std.isfinite().all()
                noiseless_at_the_end = name in ("cps", "consistency", "flow_ddim") and s == 0
                assert (std[1].item() > 0) == (name != "ode" and not noiseless_at_the_end)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_a_process_knows_what_its_network_predicts(prediction):
    """The target's own prediction gives clean sample and noise back; the gain is the derivative of
    the former."""
    process = Diffusion(prediction)
    clean = X.double()
    noise = E.double()
    t = process.snap(torch.tensor([0.3333, 0.9], dtype=torch.float64))
    x = noised(process, clean, noise, t)
    output = process.target(clean, noise, t)
    torch.testing.assert_close(process.clean(x, output, t), clean)
    torch.testing.assert_close(process.noise(x, output, t), noise)
    moved = process.clean(x, output + 1, t) - clean
    torch.testing.assert_close(moved.abs(), process.gain(t, x).expand_as(moved))


def test_ddim_is_diffusers_step():
    from diffusers import DDIMScheduler

    for prediction in ("epsilon", "v_prediction", "sample"):
        options = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
        plain = DDIMScheduler(**BETAS, **options, prediction_type=prediction)
        plain.set_timesteps(10)
        process = Diffusion(prediction, final=STABLE.final)
        for timestep in (901, 501, 1):
            y = plain.step(V, timestep, X, eta=0.6, variance_noise=E)
            mean, std = ddim(
                X, V, (timestep + 1) / 1000, max(timestep - 99, 0) / 1000, 0.6, process=process
            )
            near(mean + std * E, y.prev_sample.flatten(), atol=2e-5)


def test_rows_of_one_batch_have_their_own_times(subtests):
    for name in KERNELS:
        with subtests.test(name=name):
            t = torch.tensor([1.0, 0.6])
            s = torch.tensor([0.8, 0.0])
            eta = torch.tensor([0.3, 0.9])
            together = KERNELS[name](X, V, t, s, eta)
            for b in range(2):
                alone = KERNELS[name](
                    X[b : b + 1], V[b : b + 1], float(t[b]), float(s[b]), float(eta[b])
                )
                for whole, part in zip(together, alone, strict=True):
                    assert torch.equal(whole[b : b + 1], part)


def test_half_precision_is_computed_in_float32(subtests):
    for name in KERNELS:
        for dtype in [torch.bfloat16, torch.float16, torch.float32, torch.float64]:
            with subtests.test(name=name, dtype=dtype):
                wide = torch.promote_types(dtype, torch.float32)
                grid = torch.tensor([0.75, 0.5], dtype=torch.float64)
                x, v = X.to(dtype), V.to(dtype)
                step = KERNELS[name](x, v, *grid, 0.7)
                expected = KERNELS[name](x.to(wide), v.to(wide), *grid.to(wide), 0.7)
                for part, reference in zip(step, expected, strict=True):
                    assert part.dtype == wide and torch.equal(part, reference)


# of a Gaussian target
CENTRE = 0.8
SPREAD = 0.5


def final_error(kernel, eta, steps):
    """(mean, std) of the samples minus those of the target, from pure noise. A step is affine in x,
    so two points tell it all, of every step at once."""
    grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    t, s = grid[:-1, None], grid[1:, None]
    x = torch.tensor([[0.0, 1.0]], dtype=torch.float64).expand(steps, 2)
    rate = (t - (1 - t) * SPREAD**2) / (((1 - t) * SPREAD) ** 2 + t**2)
    velocity = -CENTRE + rate * (x - (1 - t) * CENTRE)  # E[e - x_0 | x_t = x]
    ends, stds = kernel(x, velocity, t[:, 0], s[:, 0], torch.full((steps,), eta))
    mean, variance = 0.0, 1.0
    for (zero, one), std in zip(ends.tolist(), stds[:, 0].tolist(), strict=True):
        slope = one - zero
        mean = slope * mean + zero
        variance = slope**2 * variance + std**2
    return abs(mean - CENTRE), abs(math.sqrt(variance) - SPREAD)


def test_from_pure_noise_the_right_marginal_is_reached(subtests):
    """The guard of flow_sde at t = 1 adds an error of order 1 that is forgotten at a rate of
    steps^-(eta^2)."""
    for kernel, eta in (
        *((flow_sde, 0.7), (dance_sde, 1.0), (ode, 0.0), (wan_sde, 0.9)),
        *((memoryless, 1.0), (flow_ddim, 1.0)),
    ):
        with subtests.test(kernel=kernel, eta=eta):
            errors = [final_error(kernel, eta, steps) for steps in (10, 2560)]
            assert max(mean for mean, _ in errors) < 1e-12
            assert errors[1][1] < 1e-3 and errors[1][1] < errors[0][1] / 20


@pytest.mark.parametrize("process", [Flow(), Diffusion()])
def test_a_consistency_step_keeps_a_share_of_the_noise(process):
    """At eta 0.6 it renews 0.36 of the variance and keeps 0.8 of the predicted noise."""
    x = X.double()
    v = V.double()
    alpha, sigma = process.scales(0.5, x)
    clean, noise = process.clean(x, v, 0.75), process.noise(x, v, 0.75)
    mean, std = consistency(x, v, 0.75, 0.5, 0.6, process=process)
    torch.testing.assert_close(mean, alpha * clean + sigma * 0.8 * noise)
    torch.testing.assert_close(std, 0.6 * sigma)
    if isinstance(process, Flow):
        torch.testing.assert_close(mean, 0.5 * (x - 0.75 * v) + 0.4 * (x + 0.25 * v))


def test_times_between_two_timesteps_are_those_of_the_later():
    """So that uniform times visit every timestep equally often."""
    time = torch.tensor([1e-9, 0.0004, 0.001, 0.5, 0.5001, 0.9999, 1.0], dtype=torch.float64)
    assert Diffusion().snap(time).tolist() == pytest.approx(
        [0.001, 0.001, 0.001, 0.5, 0.501, 1.0, 1.0], abs=1e-12
    )


def test_a_consistency_model_is_itself_at_the_first_timestep(subtests):
    """c_skip x + c_out x_0 with tau = scaling i, d = 1/2; the gain is the derivative by the
    output."""
    for prediction in ["epsilon", "v_prediction", "sample"]:
        for scaling in [10.0, 0.01]:
            with subtests.test(prediction=prediction, scaling=scaling):
                x = X.double()
                output = V.double()
                plain = Diffusion(prediction)
                process = Consistent(prediction, scaling=scaling)
                assert torch.equal(process.clean(x, output, 1 / 1000), x), "timestep 0"
                for i in (20, 999):
                    t = (i + 1) / 1000
                    tau = scaling * i
                    clean = plain.clean(x, output, t)
                    size = tau**2 + 0.25
                    expected = 0.25 / size * x + tau / math.sqrt(size) * clean
                    torch.testing.assert_close(process.clean(x, output, t), expected)
                    moved = process.clean(x, output + 1, t) - process.clean(x, output, t)
                    torch.testing.assert_close(moved.abs(), process.gain(t, x).expand_as(moved))
                assert Consistent().scaling == 10.0


def test_trigflow_takes_the_steps_of_diffusers_scheduler(monkeypatch):
    """And its target is what a perfect network says of noised data."""
    from diffusers import SCMScheduler
    from diffusers.schedulers import scheduling_scm

    x, output, noise = X.double(), V.double(), V.double().flip(0)
    process = TrigFlow()
    scheduler = SCMScheduler()
    scheduler.set_timesteps(2, intermediate_timesteps=1.3)
    monkeypatch.setattr(scheduling_scm, "randn_tensor", lambda *_, **__: noise)
    t, s = 1.0, 1.3 / 1.5708
    scheduler.timesteps = scheduler.timesteps.double()
    scheduler.timesteps[:2] = torch.tensor([1.5708, 1.3])
    theirs, clean = scheduler.step(output, scheduler.timesteps[0], x, return_dict=False)
    mean, std = consistency(x, output, t, s, 1.0, process)
    torch.testing.assert_close(mean + std * noise, theirs, atol=1e-7, rtol=0)
    torch.testing.assert_close(process.clean(x, output, t), clean, atol=1e-7, rtol=0)
    state, target = noised(process, x, noise, s), process.target(x, noise, s)
    torch.testing.assert_close(process.clean(state, target, s), x, atol=1e-12, rtol=0)
    torch.testing.assert_close(process.noise(state, target, s), noise, atol=1e-12, rtol=0)
    moved = process.clean(state, target + 1, s) - x
    torch.testing.assert_close(moved.abs(), process.gain(s, x).expand_as(moved))


def test_a_path_keeps_its_size_in_its_first_and_last_step(subtests):
    """Data and noise are standard normal, so that states of a flow are sqrt(t^2 + (1 - t)^2)
    large, between 0.7 and 1, and the perfect velocity is known."""
    for dtype, first, name in product((torch.float32, torch.bfloat16), (1.0, 0.9999999), FLOWS):
        with subtests.test(dtype=dtype, first=first, name=name):
            for steps, shift in ((4, 1.0), (4, 12.0), (20, 3.0)):
                times = shift_time(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift)
                times[0] = first
                kernel = KERNELS[name]
                if hasattr(kernel, "first_step"):
                    kernel = partial(kernel, second=times[1])
                # one coarse step of Euler to the data is less exact, whatever the sampler
                for (t, s), (low, high) in ((times[:2], (0.7, 1.2)), (times[-2:], (0.2, 2.5))):
                    size = (t**2 + (1 - t) ** 2).sqrt()
                    x = size.to(dtype).view(1, 1)
                    v = (x * (t - (1 - t)) / size**2).to(dtype)
                    mean, std = kernel(x, v, t, s, 0.7)
                    assert low < float((mean**2 + std**2).sqrt()) < high


def test_the_first_step_of_a_grid_is_the_published_one_however_it_begins():
    for first in (1.0, 0.9997):
        _, std = flow_sde(X, V, first, 0.75, 0.7, 0.75)
        near(std, [0.7 * math.sqrt(first / 0.25 * (first - 0.75))] * 2)
    for kernel in (flow_sde, memoryless):  # no later step differs
        for mine, bare in zip(kernel(X, V, 0.75, 0.5, 0.7, 0.75), kernel(X, V, 0.75, 0.5, 0.7)):
            assert torch.equal(mine, bare)
