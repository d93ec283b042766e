"""Overrides members of single objects that diffusers has loaded."""

from __future__ import annotations

from typing import Any


def override(loaded: Any, name: str = "", **members: Any) -> None:
    """Give a pipeline, or a block of one, a subclass with these members; ``name``: of that class. A
    wrapper would not do: calls and properties are looked up in the class, and diffusers identifies
    blocks by class."""
    kind = type(loaded)
    loaded.__class__ = type(name or kind.__name__, (kind,), members)
