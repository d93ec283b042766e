"""Samplers of consistency models for a replay, whose step predicts the data and adds fresh noise:
LCMScheduler, FlowMatchLCMScheduler and SCMScheduler of diffusers.

Such a step is a Gaussian of known mean and deviation, ``samplers.kernels.consistency`` at noise
level 1, so paths are scored as diffusers samples them, without additional noise. The last step has
no noise, and is not a decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.policies.diffusion import few_step
from mmrl.policies.diffusion.modular_folder import is_modular
from mmrl.zoo.models.any_pipeline import replay_exploding
from samplers.processes import Consistent, Process, TrigFlow

Sampler = Literal["own", "lcm"]
DISCRETE = "LCMScheduler"
FLOW = "FlowMatchLCMScheduler"
TRIGONOMETRIC = "SCMScheduler"
INTERMEDIATE = "intermediate_timesteps"  # of a call: the second of two times


def renews(scheduler: Any) -> bool:
    """Tell whether a scheduler adds fresh noise to predicted data, by its class alone: a subclass
    may do more."""
    return type(scheduler).__name__ in (DISCRETE, FLOW, TRIGONOMETRIC)


def form(scheduler: Any) -> Any:
    """Return a new scheduler of the same configuration. UserError where its steps have no
    density."""
    config = scheduler.config
    name = type(scheduler).__name__
    if config.get("clip_sample") or config.get("thresholding"):
        raise UserError(
            f"{name} clips samples, which gives its steps no density; set clip_sample and "
            "thresholding of the folder's scheduler to false"
        )
    if config.get("scale_factors"):
        raise UserError(
            f"{name} makes samples larger on the way, so its states have several shapes; set "
            "scale_factors of the folder's scheduler to null"
        )
    return type(scheduler).from_config(config)


def process(scheduler: Any) -> Process | None:
    """Return the process of a scheduler of consistency models; None: it is a flow, or no such
    scheduler."""
    name, config = type(scheduler).__name__, scheduler.config
    if name == TRIGONOMETRIC:
        return TrigFlow(config.sigma_data)
    if name == DISCRETE:  # its last step ends at the data, whatever alpha is there
        alphas = scheduler.alphas_cumprod.double()
        return Consistent(config.prediction_type, alphas, scaling=config.timestep_scaling)
    return None


def angles(scheduler: Any) -> Tensor | None:
    """Return the times [K + 1] of a scheduler whose timesteps are angles, the last of them 0; None
    for others."""
    if type(scheduler).__name__ != TRIGONOMETRIC:
        return None
    times = scheduler.timesteps.double().cpu() / TrigFlow().end
    if times[0] > 1 + 1e-6:
        raise UserError(
            f"policy option call: max_timesteps must be at most {TrigFlow().end}, the angle of "
            f"pure noise, not {float(scheduler.timesteps[0]):.5g}"
        )
    return torch.where(times > 1 - 1e-6, times.new_ones(()), times)  # rounded by float32


def angle(scheduler: Any, time: Tensor) -> Tensor | None:
    """Return the timestep of a time [*] where timesteps are angles; None for other schedulers."""
    return TrigFlow().end * time if type(scheduler).__name__ == TRIGONOMETRIC else None


def scale(scheduler: Any) -> float:
    """Return the factor on the prepared noise before the first step: where timesteps are angles,
    the deviation of the data."""
    angular = type(scheduler).__name__ == TRIGONOMETRIC
    return float(scheduler.config.sigma_data) if angular else 1.0


def settings(known: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the arguments of a call with ``steps`` steps: the intermediate time that some calls
    set by default is valid for two steps only."""
    return {INTERMEDIATE: None} if INTERMEDIATE in known and steps != 2 else {}


def by_lcm(pipe: Any, place: str, sampler: Sampler) -> None:
    """Replace a pipeline's scheduler by the few-step one, where ``sampler`` is lcm. UserError where
    the folder's scheduler has times that the few-step one lacks."""
    import diffusers

    if sampler == "own" or type(pipe.scheduler).__name__ in (DISCRETE, FLOW):
        return
    current = pipe.scheduler
    if is_modular(place):
        raise UserError(
            f"policy option scheduler: lcm cannot be written into the modular folder {place!r}; "
            "leave it own"
        )
    flow = isinstance(current, diffusers.FlowMatchEulerDiscreteScheduler)
    few = few_step.made(current.config, FLOW if flow else DISCRETE)
    if flow and current.config.get("invert_sigmas"):
        raise UserError(
            f"policy option scheduler: diffusers' {FLOW} adds its noise at the wrong end where a "
            f"folder inverts its times, as {place!r} does (invert_sigmas); leave it own"
        )
    if replay_exploding.explodes(current):
        raise UserError(
            f"policy option scheduler: lcm is for flows, and the states of {place!r} grow with "
            "their noise; leave it own"
        )
    alphas = getattr(current, "alphas_cumprod", None)
    if not flow and (alphas is None or not torch.allclose(alphas.float(), few.alphas_cumprod)):
        raise UserError(
            f"policy option scheduler: lcm is for flows with a FlowMatchEulerDiscreteScheduler and "
            f"for discrete diffusions whose betas {DISCRETE} knows, and {place!r} has "
            f"{type(current).__name__}; leave it own"
        )
    pipe.scheduler = few


def options(steps: int, chosen: dict[str, Any], scheduler: Any, sampler: Sampler) -> dict[str, Any]:
    """Complete the options of a flow policy for a consistency model, by default as diffusers
    samples. UserError for a single step."""
    if steps < 2:
        raise UserError(
            f"policy option steps: {type(scheduler).__name__} adds noise between its steps, so a "
            f"single step is no decision that could be trained; use at least 2 steps, not {steps}"
        )
    if sampler == "lcm":
        return chosen | few_step.OPTIONS
    free = {name: value for name, value in chosen.items() if value is not None}
    return chosen | few_step.OPTIONS | free


def save(scheduler: Any, place: str, folder: Any, sampler: Sampler) -> None:
    """Write the few-step sampler into the export, where it is not the folder's own."""
    if sampler == "lcm":
        few_step.save(place, type(scheduler).__name__, folder)
