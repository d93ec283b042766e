"""Makes the list of runs of ``mmrl compare``, and checks all of it before any training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.apps.compare.settings import Setting, overrides_of
from mmrl.config import Config
from mmrl.core.errors import UserError
from mmrl.core.paths import find_config
from mmrl.core.registry import DATA
from mmrl.data.prompts import development_and_test
from mmrl.experiment.build import classes, read, rewarded, short_names

EVALUATED = ("prompts", "num_samples", "seed", "split")  # options of evaluate:, the same for all


@dataclass(frozen=True)
class Plan:
    """Holds all runs: every setting with every seed."""

    settings: list[Setting]
    seeds: tuple[int, ...]
    budget: dict[str, float]
    primary: str  # the measure that the verdict is about
    trained_on: list[str]  # measures that are training rewards
    compared: list[str]  # measures that all settings have
    note: str = ""  # why the primary measure is not the trained reward


def plan(settings: list[Setting], seeds: int, budget: dict[str, float]) -> Plan:
    """Check every run as ``mmrl train`` does before it builds a model, and that all are evaluated
    alike; choose the primary measure."""
    configurations = [
        read(find_config(s.config), overrides_of(s, budget, seed=0)) for s in settings
    ]
    _different(settings, configurations)
    _evaluated_alike(settings, configurations)
    rewards = [_sections(configuration) for configuration in configurations]
    trained = [names[("reward",)] for names in rewards]
    measured = [[name for names in sections.values() for name in names] for sections in rewards]
    common = [name for name in measured[0] if all(name in names for names in measured)]
    compared = list(dict.fromkeys(common))
    numbers = tuple(range(seeds))
    if all(c.plain["reward"] == configurations[0].plain["reward"] for c in configurations):
        return Plan(settings, numbers, budget, "reward", trained[0], ["reward", *compared])
    judges = [name for name in compared if not any(name in names for names in trained)]
    if not judges:
        raise UserError(
            "the configurations train on different rewards and share no judge: give all of them "
            "the same evaluate.reward, such as evaluate.reward.clip_score=1.0"
        )
    note = f"The rewards that are trained on differ, so the judge {judges[0]} decides."
    on = sorted({name for names in trained for name in names})
    return Plan(settings, numbers, budget, judges[0], on, compared, note)


def _sections(configuration: Config) -> dict[tuple[str, ...], list[str]]:
    """List the rewards of every section that names some, as curves call them."""
    return {
        section: list(short_names(classes(configuration, section)).values())
        for section in rewarded(configuration)
    }


def _different(settings: Sequence[Setting], configurations: Sequence[Config]) -> None:
    """Refuse two settings that would train the same runs."""
    for i, setting in enumerate(settings):
        for earlier, configuration in zip(settings[:i], configurations, strict=False):
            if configuration.plain == configurations[i].plain:
                raise UserError(
                    f"{setting.label} is the same configuration as {earlier.label}: its changes "
                    f"are the values that are there already; change a value"
                )


def _evaluated_alike(settings: Sequence[Setting], configurations: Sequence[Config]) -> None:
    first = configurations[0].plain
    texts = None
    for setting, configuration in zip(settings, configurations, strict=True):
        plain = configuration.plain
        for key in EVALUATED:
            values = [(p.get("evaluate") or {}).get(key) for p in (first, plain)]
            if values[0] != values[1]:
                raise UserError(
                    f"{settings[0].label} has evaluate.{key}={values[0]}, {setting.label} "
                    f"{values[1]}: add evaluate.{key}=... for all, so that they can be paired"
                )
        if plain["data"] != first["data"]:
            texts = texts or _tested(configurations[0])
            if _tested(configuration) != texts:
                raise UserError(
                    f"{setting.label} holds out other prompts than {settings[0].label}: give both "
                    f"the same held-out prompts in data:, so that they can be paired"
                )


def _tested(configuration: Config) -> list[Any]:
    source = configuration.build("data", DATA)
    prompts = list(source.held_out) or list(source.train)
    return [str(prompt.get("text", "")) for prompt in development_and_test(prompts)[1]]
