"""Separates prompts by image size, if the data have several: a rollout has images of one size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from mmrl.core.types import Prompt
from mmrl.policies.base import Policy
from mmrl.policies.contracts import size_of

T = TypeVar("T")


class Part(NamedTuple, Generic[T]):
    """Holds the result for the prompts of one size, and their positions among all."""

    places: list[int]
    outcome: T


def by_size(
    policy: Policy, prompts: Sequence[Prompt], work: Callable[[list[Prompt]], T]
) -> list[Part[T]]:
    """Do ``work`` for the prompts of each size, in the order of first occurrence, which is the same
    on every process."""
    groups: dict[tuple[int, int] | None, list[int]] = {}
    for place, prompt in enumerate(prompts):
        groups.setdefault(size_of(policy, prompt), []).append(place)
    return [Part(places, work([prompts[i] for i in places])) for places in groups.values()]
