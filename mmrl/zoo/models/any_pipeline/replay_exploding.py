"""Treats variance-exploding pipelines, x = x_0 + sigma e, as flows: Cosmos 2, and folders with
EDM's schedulers, such as Playground 2.5's (Karras et al. 2022, "Elucidating the design space of
diffusion-based generative models").

With t = sigma / (1 + sigma) the state y = x / (1 + sigma) = (1 - t) x_0 + t e is that of a flow,
and the network's input; an Euler step in sigma is one of the flow in t. Such a pipeline passes e to
its scheduler, so the velocity is e - x_0 = (1 + sigma) e - x; others pass the network's output,
from which EDM's schedulers compute x_0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EDM = ("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler")
BOUNDS = {"sigma_min": 0.002, "sigma_max": 80.0}  # of a configuration that does not say them


def explodes(scheduler: Any) -> bool:
    """Tell whether a scheduler's sigmas are standard deviations beside data of fixed scale, not
    shares of noise: only those may exceed 1."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    largest = scheduler.config.get("sigma_max")
    euler = isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    return is_edm(scheduler) or (euler and largest is not None and largest > 1)


def is_edm(scheduler: Any) -> bool:
    """Tell whether a scheduler scales what the network sees and what it gives, as EDM does."""
    return type(scheduler).__name__ in EDM


def edm_form(scheduler: Any) -> Any:
    """Return Euler's form of a scheduler of EDM, whose steps have no history; None where its
    outputs are not known."""
    from diffusers import EDMEulerScheduler

    config = scheduler.config
    known = config.get("prediction_type", "epsilon") in ("epsilon", "v_prediction")
    return EDMEulerScheduler.from_config(config) if known else None


def times(scheduler: Any) -> tuple[Tensor, Tensor]:
    """Return the times [K + 1] and the timesteps [K] that the scheduler has set. A pipeline that
    ends at its smallest sigma takes a last step of no length, which is none here."""
    sigmas = torch.as_tensor(scheduler.sigmas).double().cpu()
    shares = sigmas / (1 + sigmas)
    if scheduler.config.get("final_sigmas_type") == "sigma_min":
        return shares[:-1], scheduler.timesteps[:-1]
    return shares, scheduler.timesteps


def timestep(scheduler: Any, time: Tensor) -> Tensor:
    """Return the timestep of a time [*], within the sigmas that the network knows."""
    config = scheduler.config
    lowest, highest = (config.get(name) or usual for name, usual in BOUNDS.items())
    time = time.double().clamp(lowest / (1 + lowest), highest / (1 + highest))
    sigma = time / (1 - time)
    timesteps: Tensor = sigma.log() / 4 if is_edm(scheduler) else sigma * config.num_train_timesteps
    return timesteps


def sigma_of(scheduler: Any, timestep: Tensor) -> Tensor:
    """Return the sigma that belongs to a timestep."""
    if is_edm(scheduler):
        return (4 * timestep).exp()
    if scheduler.packed:
        return 1 - timestep
    return timestep / float(scheduler.config.num_train_timesteps)


def shown(scheduler: Any, state: Tensor) -> Tensor:
    """Scale a state [B, *] as the network sees it at the step that the scheduler is at."""
    scaled: Tensor = scheduler.precondition_inputs(state, scheduler.sigmas[scheduler.step_number])
    return scaled


def clean_of(scheduler: Any, output: Tensor, state: Tensor) -> Tensor:
    """Compute the data [B, *] that an output of EDM's network predicts of a state [B, *]."""
    sigma = scheduler.sigmas[scheduler.step_number].to(state)
    clean: Tensor = scheduler.precondition_outputs(state, output, sigma)
    return clean


def noise_of(scheduler: Any, clean: Tensor, state: Tensor) -> Tensor:
    """Compute the noise [B, *] in a state [B, *] of such data."""
    sigma: Tensor = scheduler.sigmas[scheduler.step_number].to(state)
    return (state - clean) / sigma


def asks_for_data(call: Any) -> bool:
    """Tell whether a pipeline's call asks its scheduler for the predicted data, guides these, and
    hands them back for the step, as that of Cosmos 1 does."""
    arguments = [names for names in call.__code__.co_consts if isinstance(names, tuple)]
    return any("pred_original_sample" in names for names in arguments)


def euler(scheduler: Any, noise: Tensor, state: Tensor) -> Tensor:
    """Take Euler's step by sigma [B, *]."""
    k = scheduler.step_number
    sigmas: Tensor = scheduler.sigmas.to(state)
    return state + noise * (sigmas[k + 1] - sigmas[k])


def growth(scheduler: Any, place: int) -> Tensor:
    """Return 1 + sigma of a place of the scheduler's sigmas, [] float32."""
    return 1 + torch.as_tensor(scheduler.sigmas)[place]


def first_scale(scheduler: Any) -> float:
    """Return by what the first latents of the pipeline are multiplied to be a flow's."""
    return 1 / (1 + float(scheduler.config.sigma_max))


def velocity(noise: Tensor, state: Tensor, growth: Tensor) -> Tensor:
    """Compute the flow's velocity [B, *] of the noise that a pipeline predicts in its own state x,
    both [B, *]."""
    return growth.to(state) * noise - state
