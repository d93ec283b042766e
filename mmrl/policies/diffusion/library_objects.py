"""Overrides members of single objects that diffusers has loaded."""

from __future__ import annotations

from typing import Any


def override(loaded: Any, name: str = "", **members: Any) -> None:
    """Give a pipeline, or a block of one, a class of its own with these members; ``name``: of that
    class. An object that holds it would not do: calls and properties are looked up in the class,
    and diffusers asks what a block is by its class."""
    kind = type(loaded)
    loaded.__class__ = type(name or kind.__name__, (kind,), members)
