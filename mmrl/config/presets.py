"""Presets make the implicit choices of other code bases and papers explicit as configuration.

The table is ``presets.yaml``. ``preset: trl/dapo`` fills ``advantage``, ``objective`` and
``train``, and for flow models sampling options of ``policy``, unless set in the configuration. For
a given objective it fills the options that the objective has; an incompatible one is refused
(``unreached``). Those of TRL and verl are tested against losses and gradients of the published
functions (TRL 1.16, verl).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mmrl.config.yamltext import read
from mmrl.core.errors import UserError, suggest
from mmrl.policies.capabilities import capabilities_of

Sections = dict[str, Any]


SECTIONS = ("policy", "advantage", "objective", "train")
KINDS = {
    "categorical": "models that write tokens",
    "gaussian": "flow and diffusion models",
    "masked": "masked diffusion models",
    "any": "all models",
}

# objectives with the options surrogate and kl of policy_gradient
SURROGATE_TAKERS = ("policy_gradient", "masked", "unified", "clip_cov")


@cache
def presets() -> dict[str, Sections]:
    """Read the table, only when a preset is named, since it is slow."""
    file = Path(__file__).with_suffix(".yaml")
    table: dict[str, Sections] = read(file.read_text(encoding="utf-8"), file.name)[0]
    return table


def unreached(plain: Mapping[Any, Any], name: str) -> str | None:
    """Say why the preset ``name`` has no effect on the configured objective; None if it has."""
    (preset_objective,) = presets()[name]["objective"]
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
        if preset_objective == "policy_gradient"
        else preset_objective
    )
    return (
        f"preset {name} says how the objective {preset_objective} is computed and would leave "
        f"{objective} as it was: write "
        f"objective: {able}; or remove the preset"
    )


def described(name: str) -> tuple[str, str]:
    """Return (for which models, what it sets) of a preset, to show in tables."""
    preset = presets()[name]
    sections = (f"{key}: {_inline(preset[key])}" for key in SECTIONS if key in preset)
    return KINDS[preset["decisions"]], "\n".join(sections)


def _inline(value: Any) -> str:
    """Write YAML of one line."""
    if not isinstance(value, Mapping):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return "{" + ", ".join(f"{key}: {_inline(item)}" for key, item in value.items()) + "}"


def unsuited_preset(name: str, policy: Any) -> str | None:
    """Say why a preset is not for this policy, an object or a class; None if it is."""
    from mmrl.policies.contracts import Remasks

    can = capabilities_of(policy)
    wants = presets()[name]["decisions"]
    if can is None:
        return None
    kinds = (*(["masked"] if Remasks.kept_by(policy) else []), can.decisions)
    if wants in (*kinds, "any"):
        return None
    fit = [preset for preset, entry in presets().items() if entry["decisions"] == kinds[0]]
    return (
        f"{name} is for {KINDS[wants]}, which the policy is not: remove it, or take another, "
        f"such as {', '.join(fit[:3])}"
    )


def _takes(objective: str, preset_objective: str) -> bool:
    return preset_objective == "policy_gradient" and objective in SURROGATE_TAKERS


def filled(plain: Mapping[Any, Any], name: Any) -> dict[Any, Any]:
    """Return the configuration with the preset ``name`` applied; existing values are kept."""
    if not isinstance(name, str) or name not in presets():
        raise UserError(f"unknown preset {name!r}; {suggest(str(name), presets())}")
    preset = copy.deepcopy(presets()[name])
    sections = dict(plain)
    for section in ("advantage", "objective"):
        sections[section] = _merged(preset[section], plain.get(section))
    policy = plain.get("policy")
    if "policy" in preset and isinstance(policy, Mapping) and len(policy) == 1:
        ((family, options),) = policy.items()
        if isinstance(options, Mapping):
            sections["policy"] = {family: {**preset["policy"], **options}}
    train = plain.get("train")
    sections["train"] = (
        preset["train"] | train if isinstance(train, Mapping) else train or preset["train"]
    )
    return sections


def _merged(preset: Any, given: Any) -> Any:
    """Merge options of the preset's plug-in under those given for it, or for another plug-in that
    has them."""
    (name, options) = next(iter(preset.items())) if isinstance(preset, Mapping) else (preset, {})
    if given is None or given == name:
        return preset
    written = {given: {}} if isinstance(given, str) else given
    if isinstance(written, Mapping) and len(written) == 1:
        (chosen_name, chosen) = next(iter(written.items()))
        if (chosen_name == name or _takes(chosen_name, name)) and isinstance(chosen or {}, Mapping):
            return {chosen_name: {**_without_clip(options, chosen or {}), **(chosen or {})}}
    return given


def _without_clip(options: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset's options, its surrogate without a clip if ``chosen`` says clip_range."""
    surrogate = options.get("surrogate")
    if "clip_range" not in chosen or not isinstance(surrogate, Mapping):
        return dict(options)
    bare = {
        name: {key: value for key, value in inner.items() if not key.startswith("clip_")}
        for name, inner in surrogate.items()
    }
    return {**options, "surrogate": bare}
