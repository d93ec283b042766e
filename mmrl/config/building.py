"""Builds objects from their specifications: ``name`` or ``{name: {options}}``, dataclasses, and
weighted rewards."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from mmrl.config.identity import identity
from mmrl.config.schema import (
    BAD,
    Resolved,
    construct,
    convert,
    resolve,
    resolve_call,
    resolve_named,
)
from mmrl.config.values import Place, show
from mmrl.core.errors import UserError, a_or_an
from mmrl.core.handling import Handling
from mmrl.core.registry import REWARDS, Registry, options

if TYPE_CHECKING:
    from mmrl.core.types import Reward

# places where rewards may be computed -> the module with Placed, check_version and check_card
PLACEMENTS = {"ray": "mmrl.apps.ray.rewards"}


@dataclass(frozen=True)
class Weighted:
    """Holds a reward function and its weight in the sum."""

    reward: Reward
    weight: float


def raise_all(problems: Sequence[str]) -> None:
    if len(problems) > 1:
        raise UserError(f"{len(problems)} problems:\n" + "\n".join(problems))
    if problems:
        raise UserError(problems[0])


def build(spec: Any, registry: Registry, where: str | Place = "", **context: Any) -> Any:
    """Build the object of ``name`` or ``{name: {options}}``: an instance of a class, or a function
    with its options bound. ``context`` are arguments supplied by code. Raises UserError naming
    every option that is wrong."""
    problems: list[str] = []
    resolved = resolve(spec, registry, Place.of(where), problems, context)
    raise_all(problems)
    return construct(resolved, **context)


def build_dataclass(cls: type, mapping: Any, where: str | Place = "") -> Any:
    """Build an instance of a dataclass from a mapping of its fields."""
    problems: list[str] = []
    resolved = resolve_call(cls, mapping, Place.of(where), problems)
    raise_all(problems)
    return construct(resolved)


def build_rewards(
    spec: Any, registry: Registry = REWARDS, where: str | Place = "reward"
) -> dict[str, Weighted]:
    """Build rewards by name: ``name``, ``[names]``, or ``{name: weight}`` and ``{name: {weight: w,
    option: value}}``.

    ``{name: {monitor: true}}`` is measured and has weight 0.

    With ``{fast: {use: remote, ...}, slow: {use: remote, ...}}`` the names are arbitrary, and a
    reward can be used twice.
    """
    problems: list[str] = []
    entries = resolve_rewards(spec, registry, Place.of(where), problems)
    raise_all(problems)
    return {
        name: Weighted(_handled(name, entry, registry), entry.weight)
        for name, entry in entries.items()
    }


def _handled(name: str, entry: Chosen, registry: Registry = REWARDS) -> Reward:
    """Wrap the reward with its ``Handling`` if any of those options is set."""
    from mmrl.scoring.handling import Handled
    from mmrl.scoring.signatures import by_signature

    try:
        handling = construct(entry.handling)
        if handling.place is not None:
            return _placed(name, entry, handling)
    except UserError as error:
        raise UserError(entry.handling.place.say(str(error))) from error
    reward: Reward = construct(entry.reward)
    if entry.reward.entry not in registry.values():  # a user's reward
        reward = by_signature(reward, name)
    if handling == Handling():
        return reward
    try:
        return Handled(reward, handling, name, identity(entry.reward))
    except UserError as error:
        raise UserError(entry.handling.place.say(str(error))) from error


def placement(name: str | None) -> Any:
    """Import the module that builds and computes rewards at a place."""
    return importlib.import_module(PLACEMENTS[str(name)])


def _placed(name: str, entry: Chosen, handling: Handling) -> Reward:
    """Build and compute the reward on workers of a Ray cluster."""
    from mmrl.scoring.handling import Handled
    from rewards.card import card_with

    card = card_with(entry.reward.entry, entry.reward.options)
    spec = (name, entry.reward, handling.of_worker())
    placed = placement(handling.place).Placed(
        name, card, (of_worker, spec), handling, plug_ins_in(entry.reward)
    )
    return Handled(placed, handling.of_caller(), name, identity(entry.reward))


def plug_ins_in(value: Any) -> Iterator[Any]:
    """Yield the classes and functions that a specification names, at any depth."""
    if isinstance(value, Resolved):
        yield value.entry
        yield from plug_ins_in(value.options)
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from plug_ins_in(item)


def of_worker(spec: tuple[str, Resolved, Handling]) -> Reward:
    """Build a reward on a remote worker."""
    from mmrl.scoring.handling import Handled

    name, reward, handling = spec
    return Handled(construct(reward), handling, name)


def unplaceable(name: str, entry: Chosen) -> Iterator[str]:
    """Say what is wrong with a reward's ``place``, before anything is built."""
    try:
        handling = construct(entry.handling)
        if handling.place is not None:
            from rewards.card import card_with

            place = placement(handling.place)
            place.check_version()
            place.check_card(name, card_with(entry.reward.entry, entry.reward.options))
    except UserError as error:
        yield entry.handling.place.say(str(error))


@dataclass(frozen=True)
class Chosen:
    """Holds one entry of ``reward:``, checked and not yet built."""

    reward: Resolved
    weight: float
    handling: Resolved


def weighed(spec: Any) -> Any:
    """Give rewards given by name, one or a list, the weight 1; others are unchanged."""
    names = [spec] if isinstance(spec, str) else spec
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return dict.fromkeys(names, 1.0)
    return spec


def resolve_rewards(
    spec: Any, registry: Registry, place: Place, problems: list[str]
) -> dict[str, Chosen]:
    """Resolve rewards by their key: a reward's name, or any name, with ``use`` naming the
    reward."""
    spec = weighed(spec)
    if not isinstance(spec, Mapping):
        problems.append(place.say(f"expected rewards, {{name: weight}}, got {show(spec)}"))
        return {}
    entries = {}
    for name, chosen in spec.items():
        entry = _resolve_reward(name, chosen, registry, place, problems)
        if entry is not None:
            entries[name] = entry
    return entries


def _resolve_reward(
    name: Any, chosen: Any, registry: Registry, place: Place, problems: list[str]
) -> Chosen | None:
    if not isinstance(name, str) or not name:
        problems.append(
            (place / name).say(f"expected the name of {a_or_an(registry.kind)}, got {show(name)}")
        )
        return None
    chosen = {"weight": chosen} if not isinstance(chosen, Mapping) else dict(chosen)
    weight = _weight(chosen, place / name, problems)
    use = chosen.pop("use", name)
    if not isinstance(use, str):
        problems.append(
            (place / name / "use").say(
                f"expected the name of {a_or_an(registry.kind)}, got {show(use)}"
            )
        )
        return None
    reward, handling = _split_options(use, chosen, registry, place / name, problems)
    return None if BAD in (reward, handling) else Chosen(reward, weight, handling)


def _weight(chosen: dict[str, Any], place: Place, problems: list[str]) -> Any:
    """Return ``weight``, 1 by default; 0 with ``monitor: true``: measured, never optimised."""
    weight = chosen.pop("weight", None)
    monitor = chosen.pop("monitor", None)
    monitor = convert(monitor is not None and monitor, bool, place / "monitor", problems)
    if monitor is True and weight not in (None, 0):
        problems.append(
            (place / "weight").say(
                "a reward with `monitor: true` is only measured; leave its weight away"
            )
        )
    standard = 0.0 if monitor is True else 1.0
    return convert(standard if weight is None else weight, float, place / "weight", problems)


def _split_options(
    use: str, chosen: dict[str, Any], registry: Registry, place: Place, problems: list[str]
) -> tuple[Any, Any]:
    """Separate the reward with its own options from ``Handling`` with the common ones."""
    try:
        reward_options = options(registry.find(use))
    except Exception:  # resolving it below reports what is wrong
        reward_options = {}
    common = [
        field.name
        for field in fields(Handling)
        if field.name in chosen and field.name not in reward_options
    ]
    handling = resolve_call(Handling, {key: chosen.pop(key) for key in common}, place, problems)
    return resolve_named(use, chosen, registry, place, problems), handling
