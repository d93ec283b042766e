"""Says what an option or plug-in of an earlier version is called now: one table for all
messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {  # section -> old name -> new names
    "train": {
        "prompts": ("prompts_per_iteration",),
        "copies": ("group_size",),
        "batch_size": ("train_batch_size",),
        "micro_batch": ("micro_batch_size",),
        "warmup": ("warmup_steps",),
        "schedule": ("lr_schedule",),
        "keep": ("save_total_limit",),
        "checkpoint_every": ("save_every",),
        "ema_every": ("ema_update_interval",),
        "reduction": ("loss_agg_mode",),
        "constant": ("loss_denominator",),
        "truncated": ("mask_truncated_completions",),
        "lengths": ("max_new_tokens_schedule",),
        "resample": ("dynamic_sampling_rounds",),
        "reuse": ("replay_buffer",),
        "truth": ("ground_truth_rollout",),
        "gate": ("logprob_tolerance",),
        "overlap": ("reward_overlap_chunks",),
        "max_failures": ("max_reward_failure_rate",),
    },
    "evaluate": {"copies": ("num_samples",)},
    "policy": {
        "r": ("rank",),  # peft's names, within ``lora``
        "lora_alpha": ("alpha",),
        "target_modules": ("targets",),
        "sde": ("noise_window",),
        "kernel": ("sde_type",),
        "grid": ("timestep_schedule",),
        "eta": ("noise_level",),
        "shared_noise": ("same_initial_noise",),
        "score": ("logprob_type",),
        "logp_dist": ("logprob_guidance",),
        "reduction": ("logprob_reduction",),
        "flash": ("flash_step_ratio",),
        "storage": ("trajectory_dtype",),
        "offload": ("offload_trajectory",),
        "memory": ("sampling_memory_gib",),
        "width": ("fixed_batch_rows",),
        "guidance": ("guidance_scale",),
        "guidance_2": ("guidance_scale_2",),
        "embedded": ("embedded_guidance",),
        "text_encoders": ("text_encoder_placement",),
        "tokens": ("max_new_tokens",),
        "greedy": ("greedy_evaluation",),
        "certainty": ("record_self_certainty",),
        "share": ("prefix_sharing",),
        "packed": ("remove_padding",),
        "coords": ("coordinate_space",),
    },
    "objective": {
        "clip": ("clip_range",),
        "kl_form": ("kl.form",),
        "fraction": ("timestep_fraction",),
        "pick": ("timestep_selection",),
        "weigh": ("timestep_weighting",),
        "low": ("clip_low", "floor"),
        "high": ("clip_high", "cap"),
        "dual": ("dual_clip",),
        "draws": ("num_noise_draws",),
        "times": ("timestep_sampler",),
        "behaviour": ("behavior_policy",),
        "importance": ("importance_sampling",),
        "beyond": ("mode",),
        "lag_first": ("old_decay_min",),
        "lag": ("old_decay_rate",),
        "lag_most": ("old_decay_max",),
    },
    "advantage": {"of": ("base",), "flat": ("zero_variance_groups",)},
    "data": {"fields": ("columns",)},
}

PLUG_INS: dict[str, dict[str, str]] = {  # kind of plug-in -> old name -> new name
    "advantage": {"dance": "dance_grpo", "focused": "focal", "shared": "tree_mean"},
    "objective": {
        "guard": "grpo_guard",
        "text": "policy_gradient",
        "grpo": "policy_gradient",
    },
}

METHODS = {"right_answer": "ground_truth"}  # of a user's own plug-ins: old name -> new name

DEFAULTS = {  # old plug-in -> options whose defaults differed
    "grpo": "; where they were not written, write clip_range: 1e-4 and advantage_clip: 5.0",
}

KINDS = {  # of ``mmrl list``
    "kernels": "sde_types",
    "grids": "timestep_schedules",
    "windows": "noise_windows",
    "times": "timestep_samplers",
}

VALUES: dict[str, dict[Any, Any]] = {  # option -> old value -> new value
    "loss_agg_mode": {
        "decision": "token_mean",
        "row": "seq_mean_token_mean",
        "every_row": "seq_mean_token_mean_all",
        "constant": "seq_mean_token_sum_norm",
        "sum": "token_sum",
    },
    "mask_truncated_completions": {"keep": "false", "mask": "true"},
    "zero_variance_groups": {"zero": "keep"},
}


def option(path: Sequence[Any], key: Any, known: Collection[str]) -> str:
    """Return the full name that the unknown option ``key`` at ``path`` has now, empty where it
    never existed."""
    name = former_options(path, known).get(str(key))
    return ".".join([*map(str, path), name]) if name else ""


def former_options(path: Sequence[Any], known: Collection[str]) -> dict[str, str]:
    """Map old names to the options ``known`` at ``path`` that have them no more."""
    section = OPTIONS.get(str(path[0]), {}) if path else {}
    present = {
        old: [name for name in names if name.partition(".")[0] in known]
        for old, names in section.items()
    }
    return {old: names[0] for old, names in present.items() if names}


def former_plug_ins(kind: str, known: Collection[str]) -> dict[str, str]:
    """Map old names to the ``known`` plug-ins of a kind that have them no more."""
    return {old: name for old, name in PLUG_INS.get(kind, {}).items() if name in known}


def former_values(path: Sequence[Any], known: Collection[Any]) -> dict[str, Any]:
    """Map old values of an option to the ``known`` ones that stand for them now."""
    values = VALUES.get(str(path[-1]), {}) if path else {}
    return {old: new for old, new in values.items() if new in known}


def plug_in(kind: str, name: Any) -> str:
    """Say what the unknown plug-in ``name`` is called now, empty where it never existed."""
    renamed = PLUG_INS.get(kind, {}).get(name) if isinstance(name, str) else None
    return f"{kind} {name!r} is now {renamed!r}{DEFAULTS.get(name, '')}" if renamed else ""


def method(plug_in: object, name: str) -> str:
    """Say that a user's plug-in has the method ``name`` under its old name, empty where not."""
    old = [key for key, new in METHODS.items() if new == name and hasattr(plug_in, key)]
    return f"its method {old[0]} is now called {name}" if old else ""


def value(path: Sequence[Any], written: Any) -> str:
    """Say what the value ``written`` of an option is called now, empty where it never existed."""
    values = VALUES.get(str(path[-1]), {}) if path else {}
    renamed = values.get(written) if isinstance(written, str) else None
    return f"{written} is now {renamed}" if renamed else ""
