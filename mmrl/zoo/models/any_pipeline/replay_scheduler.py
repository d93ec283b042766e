"""Replaces a pipeline's scheduler by one that sets the times and leaves the steps to a replay."""

from __future__ import annotations

from copy import deepcopy
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.policies.diffusion.minimax_h3 import is_h3
from mmrl.zoo.models.any_pipeline import replay_consistency, replay_exploding
from samplers.processes import Diffusion, Flow, Process

CONSISTENCY = ("TCDScheduler", "CMStochasticIterativeScheduler")
PREDICTIONS = ("epsilon", "v_prediction", "sample")


class Timetable(NamedTuple):
    """Lists a pipeline's times, and the timesteps that its network is given."""

    times: Tensor  # [K + 1] float64, 1 is noise, 0 is data
    timesteps: Tensor  # [K]


def drive(scheduler: Any, replay: Any, number: int = 0) -> Any:
    """Return a scheduler with the times of ``scheduler`` whose steps are those of ``replay``:
    ``replay.timetabled(scheduler)`` is called when times are set, ``replay.stepped(output,
    sample, number)`` for every step. A copy of it steps another state, ``replay.copied()``.

    Solvers with a history are replaced by the deterministic one-step form of the same schedule:
    Euler for flows, DDIM for models of noise, v or the sample. Samplers of consistency models keep
    theirs, with the noise that ``replay.fresh(number)`` gives. UserError for schedules without one.
    """
    from diffusers.schedulers.scheduling_utils import SchedulerOutput

    form = one_step_form(scheduler)
    base = type(form)
    is_flow = isinstance(process_of(form), Flow)
    edm = replay_exploding.is_edm(form)
    asks_first = replay_exploding.asks_for_data(replay.function)

    @wraps(form.set_timesteps)
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        base.set_timesteps(form, *args, **kwargs)
        form.step_number = 0
        replay.timetabled(form)

    def step(
        model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any
    ) -> SchedulerOutput | tuple[Tensor, ...]:
        if str(form.config.get("variance_type")).startswith("learned"):
            model_output = model_output[:, : sample.shape[1]]  # the variance follows
        if edm:
            clean = kwargs.get("pred_original_sample")
            if clean is None:
                clean = replay_exploding.clean_of(form, model_output, sample)
                if asks_first:
                    form._step_index = 1  # which the pipeline counts down
                    return sample, clean
            model_output = replay_exploding.noise_of(form, clean, sample)
        state = _stepped(replay, form, model_output, sample)
        if state is None:
            with replay.fresh(number):
                state = _own_step(form, base, model_output, timestep, sample)
        form.step_number += 1
        # schedulers of consistency models return the predicted data too, which is the last state
        states = (state, state) if form.renews else (state,)
        return SchedulerOutput(state) if kwargs.get("return_dict", True) else states

    def copied(memo: Any) -> Any:
        twin = drive(form, replay, replay.copied())
        left_out = (*driven, "number")
        settings = {name: value for name, value in form.__dict__.items() if name not in left_out}
        twin.__dict__ |= deepcopy(settings, memo)
        return twin

    # of the object, as pipelines ask whether its class is FlowMatchEulerDiscreteScheduler itself
    driven = {"set_timesteps": set_timesteps, "step": step, "__deepcopy__": copied}
    if edm:
        driven["scale_model_input"] = lambda state, _: replay_exploding.shown(form, state)
    form.__dict__ |= driven
    form.number = number
    form.packed = is_h3(form)
    form.inverted = form.packed or bool(form.config.get("invert_sigmas"))
    form.renews = replay_consistency.renews(form)
    form.explodes = replay_exploding.explodes(form)
    form.prepared_scale = (
        replay_exploding.first_scale(form) if form.explodes else replay_consistency.scale(form)
    )
    form.is_flow = is_flow
    form.step_number = 0
    return form


def one_step_form(scheduler: Any) -> Any:
    """Return a new scheduler of the same schedule whose step needs only the state."""
    import diffusers

    name, config = type(scheduler).__name__, scheduler.config
    if name in CONSISTENCY:
        raise UserError(
            f"{name} is a sampler of consistency models whose steps are no step of a flow or a "
            "diffusion; LCMScheduler and SCMScheduler are such samplers that can be trained"
        )
    if replay_consistency.renews(scheduler):
        return replay_consistency.form(scheduler)
    if isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler) or is_h3(scheduler):
        return type(scheduler).from_config(config)
    if name.startswith("FlowMatch"):
        return diffusers.FlowMatchEulerDiscreteScheduler.from_config(config)
    if config.get("prediction_type") == "flow_prediction" or config.get("use_flow_sigmas"):
        return type(scheduler).from_config(config)
    if replay_exploding.is_edm(scheduler) and (edm := replay_exploding.edm_form(scheduler)):
        return edm
    discrete = hasattr(scheduler, "alphas_cumprod") and hasattr(scheduler, "timesteps")
    if not discrete or config.get("prediction_type", "epsilon") not in PREDICTIONS:
        raise UserError(
            f"{name} has no one-step form that is known here: it is neither a flow with sigmas "
            "from 1 to 0 nor a discrete diffusion of noise, v or the sample"
        )
    if config.get("timestep_type") == "continuous":
        raise UserError(f"{name} has continuous timesteps, and its models no discrete diffusion")
    form = diffusers.CogVideoXDDIMScheduler if "CogVideoX" in name else diffusers.DDIMScheduler
    unset = {} if "clip_sample" in config else {"clip_sample": False}
    ddim = form.from_config(config, **unset)
    if ddim.config.clip_sample or ddim.config.get("thresholding"):
        raise UserError(
            f"{name} clips samples, which gives its steps no density; set clip_sample and "
            "thresholding of the folder's scheduler to false"
        )
    return ddim


def process_of(scheduler: Any) -> Process:
    """Return the process whose steps the one-step form takes."""
    if (known := replay_consistency.process(scheduler)) is not None:
        return known
    if not hasattr(scheduler, "final_alpha_cumprod"):
        return Flow()
    final = float(scheduler.final_alpha_cumprod)
    return Diffusion(scheduler.config.prediction_type, scheduler.alphas_cumprod.double(), final)


def timetable(scheduler: Any) -> Timetable:
    """Read the times that a scheduler has set.

    Flows: its sigmas, from exactly 1, since solvers in log(alpha / sigma) begin a little below,
    where an SDE has far too much noise. Discrete diffusions: (timestep + 1) / T, then 0.
    """
    steps = scheduler.timesteps
    if (angles := replay_consistency.angles(scheduler)) is not None:
        return Timetable(angles, steps)
    if scheduler.explodes:
        return Timetable(*replay_exploding.times(scheduler))
    if not scheduler.is_flow:
        times = (steps.double().cpu() + 1) / len(scheduler.alphas_cumprod)
        return Timetable(torch.cat([times, times.new_zeros(1)]), steps)
    times = torch.as_tensor(scheduler.sigmas).double().cpu()
    times = 1 - times if scheduler.inverted and not scheduler.packed else times
    if times[0] > 0.99:
        times = torch.cat([times.new_ones(1), times[1:]])
    return Timetable(times, steps)


def timestep_of(scheduler: Any, time: Tensor) -> Tensor:
    """Return the network's timestep at a time [*] that is not one of the pipeline's."""
    if (angle := replay_consistency.angle(scheduler, time)) is not None:
        return angle
    if scheduler.explodes:
        return replay_exploding.timestep(scheduler, time)
    if not scheduler.is_flow:
        return (time.double() * len(scheduler.alphas_cumprod)).round().long() - 1
    return (1 - time if scheduler.inverted else time) * _count(scheduler)


def time_of(scheduler: Any, timestep: Tensor) -> Tensor:
    """Return the time [*] of a flow network's timestep, the inverse of ``timestep_of``."""
    time = timestep / _count(scheduler)
    return 1 - time if scheduler.inverted else time


def _count(scheduler: Any) -> int:
    return int(scheduler.config.get("num_train_timesteps", 1))


def _stepped(replay: Any, scheduler: Any, output: Tensor, sample: Tensor) -> Tensor | None:
    """Delegate a step to a replay, whose states have a row for each sample."""
    number = scheduler.number
    if not scheduler.packed:
        state: Tensor | None = replay.stepped(output, sample, number)
        return state
    rows = replay.stepped(output[None], sample[None], number)  # the batch is one sample
    return None if rows is None else rows[0]


def _own_step(scheduler: Any, base: Any, output: Tensor, timestep: Any, sample: Tensor) -> Tensor:
    """Take the scheduler's own step if it is a one-step one; for a multistep solver Euler's, on its
    sigmas."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    if replay_exploding.is_edm(scheduler):
        return replay_exploding.euler(scheduler, output, sample)
    euler = issubclass(base, FlowMatchEulerDiscreteScheduler) or scheduler.packed
    if not scheduler.is_flow or scheduler.renews or euler:
        state: Tensor = base.step(scheduler, output, timestep, sample, return_dict=False)[0]
        return state
    times = timetable(scheduler).times.to(sample)
    k = int(scheduler.step_number)
    return sample + output * (times[k + 1] - times[k])
