"""Gives modular pipelines that step their latents themselves a scheduler, so that a replay can
replace it.

Echo's blocks predict the data and add fresh noise in each step, like a flow consistency model: the
same as FlowMatchLCMScheduler with the velocity (x - x_0) / sigma.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor, cat

from mmrl.policies.diffusion.library_objects import override

LOOP = "EchoDenoiseLoopStep"  # sets the sigmas
STEP = "EchoLoopAfterDenoiser"  # computes the next latents from the predicted data
SOUND_SCHEDULER = "audio_scheduler"
# latents, the data predicted from them, the scheduler that steps them
STATES = (
    ("latents", "predicted_video_x0", "scheduler"),
    ("audio_latents", "predicted_audio_x0", SOUND_SCHEDULER),
)


def by_scheduler(pipe: Any, blocks: list[Any]) -> None:
    """Make the blocks of a pipeline without a scheduler use one, where they are supported."""
    from diffusers import FlowMatchLCMScheduler

    by_name = {type(block).__name__: block for block in blocks}
    if getattr(pipe, "scheduler", None) is not None or not {LOOP, STEP} <= set(by_name):
        return
    pipe.__dict__["scheduler"] = FlowMatchLCMScheduler()
    override(by_name[LOOP], __call__=_with_times(type(by_name[LOOP])))
    override(by_name[STEP], __call__=_step)


def _with_times(cls: Any) -> Any:
    """Make the call of a loop that sets the schedulers' times and reads its own from them."""

    def call(block: Any, pipe: Any, state: Any) -> Any:
        sigmas = [float(sigma) for sigma in block.get_block_state(state).sigmas]
        place = state.get("latents").device
        pipe.__dict__[SOUND_SCHEDULER] = deepcopy(pipe.scheduler)
        for _, _, name in STATES:
            getattr(pipe, name).set_timesteps(sigmas=sigmas[:-1], device=place)
        state.set("sigmas", pipe.scheduler.sigmas.tolist())
        return cls.__call__(block, pipe, state)

    return call


def _step(block: Any, pipe: Any, block_state: Any, i: int, sigma: float) -> Any:
    """Step the latents by the schedulers, except those of a fixed first frame."""
    for name, predicted, scheduler_name in STATES:
        held = block_state.first_frame_token_count if name == "latents" else 0
        latents: Tensor = getattr(block_state, name)
        later = latents[:, held:]
        velocity = (later - getattr(block_state, predicted)[:, held:]) / sigma
        scheduler = getattr(pipe, scheduler_name)
        stepped = scheduler.step(velocity, scheduler.timesteps[i], later, return_dict=False)[0]
        setattr(block_state, name, cat([latents[:, :held], stepped], 1))
    return pipe, block_state
