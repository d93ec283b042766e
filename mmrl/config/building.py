"""Objects from their specifications: ``name`` or ``{name: {options}}``, dataclasses, and weighted rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..registry import REWARDS, Registry, UserError
from .schema import BAD, Resolved, construct, convert, resolve, resolve_call
from .values import Place, show


@dataclass(frozen=True)
class Weighted:
    """A reward function and its weight in the sum."""

    reward: Callable
    weight: float


def raise_all(problems: Sequence[str]) -> None:
    if len(problems) > 1:
        raise UserError(f"{len(problems)} problems:\n" + "\n".join(problems))
    if problems:
        raise UserError(problems[0])


def build(spec: Any, registry: Registry, where: str | Place = "", **context: Any) -> Any:
    """The object that ``name`` or ``{name: {options}}`` stands for: an instance of a class, or a function with its
    options bound. ``context`` are arguments supplied by code. Raises UserError naming every option that is wrong."""
    problems: list[str] = []
    found = resolve(spec, registry, Place.of(where), problems, context)
    raise_all(problems)
    return construct(found, **context)


def build_dataclass(cls: type, mapping: Any, where: str | Place = "") -> Any:
    """An instance of a dataclass from a mapping of its fields."""
    problems: list[str] = []
    found = resolve_call(cls, mapping, Place.of(where), problems)
    raise_all(problems)
    return construct(found)


def build_rewards(spec: Any, registry: Registry = REWARDS, where: str | Place = "reward") -> dict[str, Weighted]:
    """Rewards by name: ``name``, ``[names]``, or ``{name: weight}`` and ``{name: {weight: w, option: value}}``."""
    problems: list[str] = []
    found = resolve_rewards(spec, registry, Place.of(where), problems)
    raise_all(problems)
    return {name: Weighted(construct(reward), weight) for name, (reward, weight) in found.items()}


def resolve_rewards(
    spec: Any, registry: Registry, place: Place, problems: list[str]
) -> dict[str, tuple[Resolved, float]]:
    if isinstance(spec, str):
        spec = {spec: 1.0}
    if isinstance(spec, list) and all(isinstance(name, str) for name in spec):
        spec = dict.fromkeys(spec, 1.0)
    if not isinstance(spec, Mapping):
        problems.append(place.say(f"expected rewards, {{name: weight}}, got {show(spec)}"))
        return {}
    found = {}
    for name, chosen in spec.items():
        chosen = {"weight": chosen} if not isinstance(chosen, Mapping) else dict(chosen)
        weight = chosen.pop("weight", None)
        weight = convert(1.0 if weight is None else weight, float, place / name / "weight", problems)
        reward = resolve({name: chosen}, registry, place, problems)
        if reward is not BAD:
            found[name] = (reward, weight)
    return found
