"""Saves and restores the state of advantages for checkpoints, also of those nested in others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from mmrl.core.errors import UserError

LEAVES = (str, bytes, int, float, type, FunctionType, ModuleType, Tensor, nn.Module)


def capture(advantage: Any) -> dict[str, Any]:
    """Collect the states of an advantage and of all nested in it, by place: ``""`` is its own,
    ``base.base`` two below.

    Fit for JSON if every ``state_dict`` is. An advantage that wraps another only has to keep it in
    an attribute, or bound by ``functools.partial``.
    """
    return {place: part.state_dict() for place, part in stateful(advantage)}


def restore(advantage: Any, states: dict[str, Any]) -> None:
    """Hand captured states back to an advantage of the same configuration.

    Raises:
        UserError: an advantage has no state there.
    """
    for place, part in stateful(advantage):
        if place not in states:
            where = f"advantage {type(part).__name__}" + (f" (at {place})" if place else "")
            raise UserError(
                f"the checkpoint holds no memory of the {where}: it was written with "
                f"another advantage or by an older "
                "version of mmrl; set the advantage it was written with, or begin a new run"
            )
        part.load_state_dict(states[place])


def stateful(advantage: Any) -> Iterator[tuple[str, Any]]:
    """Walk over bound options, attributes and containers; yield (place, part) for each part with a
    state, once."""
    yield from _walk(advantage, "", set())


def _walk(value: Any, place: str, visited: set[int]) -> Iterator[tuple[str, Any]]:
    if value is None or isinstance(value, LEAVES) or id(value) in visited:
        return
    visited.add(id(value))
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        yield place, value
    for name, inner in _inside(value):
        yield from _walk(inner, f"{place}.{name}" if place else str(name), visited)


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield names and parts of what may hold an advantage: a bound function, a container, a
    callable object."""
    if isinstance(value, partial):
        yield from [("func", value.func), *enumerate(value.args), *value.keywords.items()]
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif callable(value):
        yield from getattr(value, "__dict__", {}).items()
