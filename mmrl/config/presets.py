"""Presets: the choices other code bases and the papers make without saying so, written out as
configuration.

``preset: trl/dapo`` fills ``advantage``, ``objective`` and ``train`` where the configuration says
nothing itself. Of an objective that is written it fills the options, where that objective has them;
another one is refused (``unreached``). What each sets is locked by tests to losses and gradients of
the published functions (TRL 1.16, verl).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from mmrl.core.errors import UserError, suggest

Sections = dict[str, Any]


def _text(
    surrogate: str,
    advantage: Any,
    loss_agg_mode: str,
    more: Mapping[str, Any] | None = None,
    **chosen: Any,
) -> Sections:
    """Sections of one surrogate with these options; ``more``: other options of the objective."""
    objective = {"surrogate": {surrogate: chosen}, **(more or {})}
    return {
        "advantage": advantage,
        "objective": {"text": objective},
        "train": {"loss_agg_mode": loss_agg_mode},
    }


def _with(sections: Sections, **train: Any) -> Sections:
    return sections | {"train": sections["train"] | train}


def _trl() -> dict[str, Sections]:
    """TRL 1.16's loss types, rewards scaled by the group's std as by default; KL off,
    bias-corrected k3 if it is on."""
    grpo = {"grpo": {"std": "group", "eps": 1e-4}}
    kl = {"kl": {"weight": 0.0, "form": "k3", "corrected": True}}
    clipped = {"clip_low": 0.2, "clip_high": 0.2}
    return {
        "grpo": _text("ppo", grpo, "seq_mean_token_mean_all", kl, **clipped),
        # TRL's name for a mean over tokens; the advantage of the paper BNPO (Xiao et al. 2025) is
        # another and not here
        "bnpo": _text("ppo", grpo, "token_mean", kl, **clipped),
        "dr_grpo": _text("ppo", grpo, "seq_mean_token_sum_norm", kl, **clipped),
        "dapo": _text("ppo", grpo, "token_mean", kl, **clipped),
        "sapo": _text("sapo", grpo, "seq_mean_token_mean_all", kl, positive=1.0, negative=1.05),
        "vespo": _text("vespo", grpo, "token_mean", kl, positive=[2.0, 3.0], negative=[3.0, 2.0]),
        "cispo": _text("cispo", grpo, "token_mean", kl, cap=5.0),
        "gspo": _text("gspo", grpo, "seq_mean_token_mean_all", kl, **clipped),
        "luspo": _text("luspo", grpo, "seq_mean_token_mean_all", kl, **clipped),
        "rloo": _text(
            "rloo",
            "rloo",
            "seq_mean_token_mean_all",
            {"kl": {"weight": 0.05, "where": "reward"}},
            **clipped,
        ),
    }


def _verl() -> dict[str, Sections]:
    """verl: dual clip of 3 on, eps 1e-6, token mean, fully masked rows not counted, KL k3 with its
    bounds if on."""
    grpo = {"grpo": {"std": "group", "eps": 1e-6}}
    kl = {"kl": {"weight": 0.0, "form": "k3", "bounded": True}}
    ppo = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    rough = {"advantage": grpo, "train": {"loss_agg_mode": "token_mean"}}
    return {
        "grpo": _text("ppo", grpo, "token_mean", kl, **ppo),
        "dr_grpo": _text("ppo", "dr_grpo", "token_sum", kl, **ppo),
        "dapo": _with(
            _text("ppo", grpo, "token_mean", kl, clip_low=0.2, clip_high=0.28, dual_clip=10.0),
            dynamic_sampling_rounds=10,
        ),
        "gspo": _text("gspo_token", grpo, "seq_mean_token_mean", kl, clip_low=3e-4, clip_high=4e-4),
        "gmpo": _text("gmpo", grpo, "seq_mean_token_mean_all", kl, clip_low=0.2, clip_high=0.2),
        "sapo": _text("sapo", grpo, "seq_mean_token_mean", kl, positive=1.0, negative=1.05),
        "cispo": _text("cispo", grpo, "token_mean", kl, clip_low=0.2, clip_high=0.2),
        "gpg": _text("reinforce", {"gpg": {"count": "rewards"}}, "token_mean", kl),
        "clip_cov": rough
        | {"objective": {"clip_cov": {"share": 2e-4, "low": 1.0, "high": 5.0, **kl}}},
        "kl_cov": rough | {"objective": {"kl_cov": {"share": 2e-4, "weight": 1.0, **kl}}},
        "rloo": _text("ppo", "rloo", "token_mean", kl, **ppo),
        "opo": _text("ppo", "opo", "token_mean", kl, **ppo),
        "reinforce_pp": _text(
            "ppo", {"reinforce_pp": {"weigh": "tokens"}}, "token_mean", kl, **ppo
        ),
        "reinforce_pp_baseline": _text(
            "ppo", {"reinforce_pp": {"baseline": True, "weigh": "tokens"}}, "token_mean", kl, **ppo
        ),
        "pass_at_k": _text("ppo", {"pass_at_k": {"eps": 1e-6}}, "token_mean", kl, **ppo),
    }


def _paper() -> dict[str, Sections]:
    """As the papers write it, with their numbers."""
    grpo = {"grpo": {"std": "group", "eps": 1e-8}}
    whitened = {"reinforce_pp": {"weigh": "tokens"}}
    penalty = {"kl": {"weight": 0.001, "where": "reward"}}
    return {
        "grpo": _text(
            "ppo", grpo, "seq_mean_token_mean", {"kl": {"weight": 0.04, "form": "k3"}}, clip_low=0.2
        ),
        "dr_grpo": _text("ppo", "dr_grpo", "seq_mean_token_sum_norm", clip_low=0.2),
        "dapo": _with(
            _text("ppo", grpo, "token_mean", clip_low=0.2, clip_high=0.28),
            dynamic_sampling_rounds=10,
        ),
        "gspo": _text("gspo", grpo, "seq_mean_token_mean", clip_low=3e-4, clip_high=4e-4),
        "gspo_token": _text(
            "gspo_token", grpo, "seq_mean_token_mean", clip_low=3e-4, clip_high=4e-4
        ),
        "gmpo": _text("gmpo", grpo, "seq_mean_token_mean", clip_low=0.4, clip_high=0.4),
        "cispo": _text("cispo", grpo, "token_mean", cap=5.0),
        "sapo": _text("sapo", grpo, "seq_mean_token_mean", positive=1.0, negative=1.05),
        "gpg": _text("reinforce", {"gpg": {"count": "groups"}}, "token_mean"),
        "rloo": _with(
            _text(
                "reinforce",
                "rloo",
                "seq_mean_token_sum_norm",
                {"kl": {"weight": 0.05, "where": "reward"}},
            ),
            loss_denominator=1,
        ),
        "reinforce_pp": _text("ppo", whitened, "token_mean", penalty, clip_low=0.2),
        "opo": _with(_text("reinforce", "opo", "seq_mean_token_sum_norm"), loss_denominator=1),
    }


PRESETS: dict[str, Sections] = {
    f"{base}/{name}": sections
    for base, known in (("trl", _trl()), ("verl", _verl()), ("paper", _paper()))
    for name, sections in known.items()
}


# objectives with the options surrogate and kl of text
SURROGATE_TAKERS = ("text", "masked", "unified", "clip_cov")


def unreached(plain: Mapping[Any, Any], name: str) -> str | None:
    """Say why the preset ``name`` leaves the objective that the configuration has as it was; None
    if it does not."""
    (preset_objective,) = PRESETS[name]["objective"]
    written = plain.get("objective")
    objective = next(iter(written), None) if isinstance(written, Mapping) else written
    if (
        objective == preset_objective
        or not isinstance(objective, str)
        or _takes(objective, preset_objective)
    ):
        return None
    able = (
        (f"{', '.join(SURROGATE_TAKERS)} (for models that write tokens)")
        if preset_objective == "text"
        else preset_objective
    )
    return (
        f"preset {name} says how the objective {preset_objective} is computed and would leave "
        f"{objective} as it was: write "
        f"objective: {able}; or remove the preset"
    )


def _takes(objective: str, preset_objective: str) -> bool:
    return preset_objective == "text" and objective in SURROGATE_TAKERS


def filled(plain: Mapping[Any, Any], name: Any) -> dict[Any, Any]:
    """The configuration with what the preset ``name`` adds; whatever is written already stays."""
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; {suggest(str(name), PRESETS)}")
    preset = copy.deepcopy(PRESETS[name])
    sections = dict(plain)
    for section in ("advantage", "objective"):
        sections[section] = _merged(preset[section], plain.get(section))
    train = plain.get("train")
    sections["train"] = (
        preset["train"] | train if isinstance(train, Mapping) else train or preset["train"]
    )
    return sections


def _merged(preset: Any, given: Any) -> Any:
    """Options of the preset's plug-in under those given for it, or for another that takes them as
    well."""
    (name, options) = next(iter(preset.items())) if isinstance(preset, Mapping) else (preset, {})
    if given is None or given == name:
        return preset
    written = {given: {}} if isinstance(given, str) else given
    if isinstance(written, Mapping) and len(written) == 1:
        (chosen_name, chosen) = next(iter(written.items()))
        if (chosen_name == name or _takes(chosen_name, name)) and isinstance(chosen or {}, Mapping):
            return {chosen_name: {**options, **(chosen or {})}}
    return given
