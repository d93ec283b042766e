"""Reads ``scheduler_config.json`` of model folders for all families: which classes and keys are
honoured, which must have one value, and the times that the folder's pipeline would set.

Whatever is not in the tables raises UserError; nothing is reinterpreted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.libraries import find_class, library_class
from mmrl.policies.diffusion import diffusers_folder, few_step
from mmrl.policies.diffusion.flow_policy import Grid
from samplers.processes import Diffusion, Flow, Process

FLOW = "FlowMatchEulerDiscreteScheduler"
SHIFTS = {
    "shift",
    "use_dynamic_shifting",
    "base_shift",
    "max_shift",
    "base_image_seq_len",
    "max_image_seq_len",
    "shift_terminal",
    "time_shift_type",
}
SPACINGS = {"use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"}
BETAS = {"beta_start", "beta_end", "beta_schedule", "trained_betas"}
# keys read only by multistep solvers, which Euler's or DDIM's step replaces
SOLVER = {
    "solver_order",
    "solver_type",
    "algorithm_type",
    "lower_order_final",
    "euler_at_final",
    "lambda_min_clipped",
    "variance_type",
    "predict_x0",
    "disable_corrector",
    "solver_p",
    "predictor_order",
    "corrector_order",
    "tau_func",
    "skip_prk_steps",
    "interpolation_type",
}
CLIPPING = {"clip_sample_range", "sample_max_value", "dynamic_thresholding_ratio"}
LEARNED = ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log", None)


class Known(NamedTuple):
    """For a scheduler class: keys that are honoured or have no effect, and required values of the
    others."""

    keys: set[str]
    fixed: dict[str, tuple[Any, ...]]


TRAINED = {"num_train_timesteps": (1000,)}  # the time scale of flow networks
EULER = Known(
    SHIFTS | SPACINGS, TRAINED | {"invert_sigmas": (False,), "stochastic_sampling": (False,)}
)
FLOW_LCM = Known(
    SHIFTS | SPACINGS | {"stochastic_sampling"},  # fresh noise in every step, as lcm
    TRAINED | {"invert_sigmas": (False,), "scale_factors": (None,), "upscale_mode": ("bicubic",)},
)
FLOW_SOLVER = Known(
    SHIFTS
    | SPACINGS
    | BETAS
    | SOLVER
    | CLIPPING
    | {"flow_shift", "timestep_spacing", "steps_offset", "use_lu_lambdas"}
    | {"rescale_betas_zero_snr", "sigma_min", "sigma_max"},
    TRAINED
    | {
        "use_flow_sigmas": (True,),
        "prediction_type": ("flow_prediction",),
        "thresholding": (False,),
        "final_sigmas_type": ("zero",),
    },
)
DISCRETE = Known(
    BETAS
    | SPACINGS
    | SOLVER
    | CLIPPING
    | {"num_train_timesteps", "timestep_spacing", "steps_offset", "set_alpha_to_one"}
    | {"rescale_betas_zero_snr", "snr_shift_scale", "use_lu_lambdas", "final_sigmas_type"}
    | {"sigma_min", "sigma_max", "flow_shift", "use_dynamic_shifting", "time_shift_type"}
    | {"original_inference_steps", "timestep_scaling", "shift_terminal"},
    {
        "prediction_type": ("epsilon", "v_prediction", "sample"),
        "clip_sample": (False,),
        "thresholding": (False,),
        "use_flow_sigmas": (False,),
        "timestep_type": ("discrete",),
        "variance_type": LEARNED,
    },
)
SOLVERS = (
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "DEISMultistepScheduler",
    "SASolverScheduler",
)
FLOWS = {FLOW: EULER, **dict.fromkeys(SOLVERS, FLOW_SOLVER)}
# sampled by DDIM of the same settings
DISCRETES = dict.fromkeys(
    (
        "DDIMScheduler",
        "DDPMScheduler",
        "PNDMScheduler",
        "EulerDiscreteScheduler",
        "EulerAncestralDiscreteScheduler",
        "HeunDiscreteScheduler",
        "LMSDiscreteScheduler",
        "KDPM2DiscreteScheduler",
        "KDPM2AncestralDiscreteScheduler",
        "CogVideoXDDIMScheduler",
        "CogVideoXDPMScheduler",
        *SOLVERS,
    ),
    DISCRETE,
)
CONSISTENT = ("LCMScheduler", "TCDScheduler")
FEW = {"FlowMatchLCMScheduler": FLOW_LCM, **dict.fromkeys(CONSISTENT, DISCRETE)}
LCM = "set policy option scheduler to lcm, which samples so"
ELSEWHERE = "policy: pipeline trains such a folder where its own pipeline can sample it"


def read(place: str) -> dict[str, Any]:
    """Read the file of a folder's or hub id's scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return diffusers_folder.load_config(FlowMatchEulerDiscreteScheduler, place, "scheduler")


def flow(place: str, few: bool = False) -> Any:
    """Return the folder's flow scheduler; ``few``: its few-step counterpart. UserError where its
    times or steps are not supported."""

    config = read(place)
    name = config.get("_class_name")
    if few:
        _check(place, config, FLOWS | FEW | {FLOW: FLOW_LCM}, FLOW)
        return few_step.made(config, few_step.BY_CLASS[FLOW])
    _check(place, config, FLOWS, FLOW)
    return library_class("diffusers", str(name)).from_config(config)


def discrete(place: str, kind: str, **settings: Any) -> Any:
    """Return the scheduler ``kind`` of diffusers, DDIM's or LCM's, with the settings of the
    folder's own; ``settings`` are those that the pipeline changes. UserError for models trained on
    another process."""

    config = read(place) | settings
    if "clip_sample" not in _parameters_of(config["_class_name"]):
        config.setdefault("clip_sample", False)
    known = DISCRETES | (FEW if kind == "LCMScheduler" else {})
    _check(place, config, known, "DDIMScheduler")
    noise = config.get("prediction_type", "epsilon") == "epsilon"
    if config.get("rescale_betas_zero_snr") and noise:
        raise UserError(
            f"{_file(place)}: rescale_betas_zero_snr makes paths begin in pure noise, where "
            "prediction_type epsilon says nothing of the data; set prediction_type to what the "
            "network was trained for (v_prediction), or rescale_betas_zero_snr to false"
        )
    return library_class("diffusers", kind).from_config(config)


def flow_grid(scheduler: Any, handed: Callable[[int, Any], dict[str, Any]]) -> Grid:
    """Return the times that a pipeline sets, from its arguments to ``set_timesteps`` for a number
    of steps and the scheduler's configuration.

    Solvers in log(alpha / sigma) start slightly below 1; exactly 1 is used here.
    """
    name = type(scheduler).__name__

    def grid(steps: int) -> Tensor:
        if steps < 1:
            raise ValueError(f"a time grid needs at least 1 step, not {steps}")
        try:
            scheduler.set_timesteps(**handed(steps, scheduler.config))
        except (AssertionError, TypeError, ValueError) as error:
            reason = str(error).strip() or "it takes other settings than the pipeline hands to it"
            raise UserError(
                f"the folder's {name} cannot set the times of this pipeline, in diffusers neither: "
                f"{reason.splitlines()[0]}; use one that can, such as {FLOW}"
            ) from error
        times = torch.as_tensor(scheduler.sigmas, dtype=torch.float64)
        if name in SOLVERS:
            times = torch.cat([times.new_ones(1), times[1:-1], times.new_zeros(1)])
        falling = bool((times[:-1] > times[1:]).all() and times[0] <= 1 and times[-1] == 0)
        if not falling:
            shown = ", ".join(f"{t:.3g}" for t in times.tolist()[:6])
            raise ValueError(f"{steps} steps of the folder's {name} have no falling times: {shown}")
        return times

    return grid


def stepwise(steps: int, **more: Any) -> dict[str, Any]:
    """Return the arguments of pipelines that set the times 1 ... 1 / steps themselves."""
    return {"sigmas": torch.linspace(1, 1 / steps, steps, dtype=torch.float64).numpy(), **more}


def own_spacing(steps: int, handed: dict[str, Any]) -> dict[str, Any]:
    """Leave the times before the shift to a scheduler that computes flow sigmas itself."""
    return {"num_inference_steps": steps, "mu": handed["mu"]}


def shift_of(tokens: int, config: Any) -> float:
    """Return ``mu``, the logarithm of the shift at a number of tokens, by linear interpolation."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, most = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (most - base) / (high - low)
    return float(tokens * slope + base - slope * low)


def discrete_process(scheduler: Any) -> Diffusion:
    """Return the process of one of diffusers' DDIM schedulers."""
    final = float(scheduler.final_alpha_cumprod)
    return Diffusion(scheduler.config.prediction_type, scheduler.alphas_cumprod.double(), final)


def discrete_grid(scheduler: Any) -> Grid:
    """Return the scheduler's own timesteps as a time grid."""

    def grid(steps: int) -> Tensor:
        scheduler.set_timesteps(steps)
        times = (scheduler.timesteps.double() + 1) / len(scheduler.alphas_cumprod)
        return torch.cat([times, times.new_zeros(1)])

    return grid


def notes(place: str, process: Process) -> tuple[str, ...]:
    """Report for the log where the sampler differs from the folder's own."""
    config = read(place)
    name = str(config.get("_class_name"))
    flows = isinstance(process, Flow)
    if name in FEW or name in (FLOW, "DDIMScheduler", "CogVideoXDDIMScheduler"):
        return ()
    kind = "Euler's steps on its times" if flows else "DDIM's steps of its settings"
    unread = [] if flows else sorted(key for key in SPACINGS if config.get(key))
    left = f", without {', '.join(unread)}" if unread else ""
    return (f"the steps of the folder's {name} have no density; sampled is by {kind}{left}",)


def _check(place: str, config: Mapping[str, Any], known: Mapping[str, Known], usual: str) -> None:
    """Raise UserError for an unsupported class or key."""
    name = str(config.get("_class_name"))
    if name not in known:
        raise UserError(f"{_file(place)}: {_unfit(name, known, usual)}")
    keys, fixed = known[name]
    defaults = _parameters_of(name)
    for key, value in {**defaults, **config}.items():
        value = tuple(value) if isinstance(value, list) else value
        default = defaults.get(key)
        if key in fixed and key in defaults | {"clip_sample": 0}:
            if value not in fixed[key]:
                raise UserError(f"{_file(place)}: {_unfit_value(name, key, value, fixed[key])}")
        elif key not in keys and key in defaults and value != default:
            raise UserError(
                f"{_file(place)}: {key} of {name} is not understood here; leave it out "
                f"({default!r}). {ELSEWHERE}"
            )
        elif not key.startswith("_") and key not in defaults and key not in _words():
            raise UserError(
                f"{_file(place)}: {key!r} is a key of no scheduler of diffusers; take it out. "
                f"Keys of {name}: {', '.join(sorted(defaults))}"
            )


def _unfit(name: str, known: Mapping[str, Known], usual: str) -> str:
    if name in FEW and (name in CONSISTENT) == (usual != FLOW):
        return f"the steps of {name} add fresh noise to predicted data; {LCM}"
    if name.startswith("EDM"):
        why = f"{name} is of EDM's process, whose states grow with their noise"
    elif usual == FLOW:
        why = f"{name} has no times of a flow that are known here"
    else:
        why = f"{name} is no discrete diffusion of noise, v or the sample"
    return f"{why}; known are {', '.join(k for k in known if k not in FEW)}. {ELSEWHERE}"


def _unfit_value(name: str, key: str, value: Any, allowed: tuple[Any, ...]) -> str:
    if key == "stochastic_sampling":
        return f"stochastic_sampling of {name} adds fresh noise in every step; {LCM}"
    if key in ("clip_sample", "thresholding"):
        return f"{name} clips samples ({key}), which gives no density; set {key} to false"
    shown = " or ".join(map(repr, (a for a in allowed if a is not None)))
    return f"{key} {value!r} of {name} is not known here; it must be {shown}. {ELSEWHERE}"


def _file(place: str) -> str:
    return f"{place}/scheduler/scheduler_config.json"


def _parameters_of(name: str) -> dict[str, Any]:

    return _parameters(find_class("diffusers", name))


@cache
def _parameters(cls: Any) -> dict[str, Any]:
    """Return the keys of a scheduler's class with their defaults."""
    if cls is None:
        return {}
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in ("self", "kwargs")}


@cache
def _words() -> frozenset[str]:
    """Return the keys of all classes: files may keep keys of an earlier class, which diffusers
    ignores too."""

    names = {*FLOWS, *DISCRETES, *FEW, "EDMDPMSolverMultistepScheduler", "EDMEulerScheduler"}
    return frozenset(key for name in names for key in _parameters(library_class("diffusers", name)))
