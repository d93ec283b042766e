"""Holds what a plug-in's function returns against its contract, where it is called: a tensor of
another shape would broadcast in silence, or fail far away."""

from __future__ import annotations

from torch import Tensor

from mmrl.core.errors import UserError


def returned(value: object, by: str, **shapes: tuple[int, ...]) -> Tensor:
    """Return ``value``, a tensor of one of the ``shapes``; UserError in one sentence otherwise.

    by: the function, in words. shapes: by the names of their axes, ``B_L=(80, 4)`` is [B, L].
    """
    if isinstance(value, Tensor) and value.shape in shapes.values():
        return value
    gave = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    contract = " or ".join(
        f"[{name.replace('_', ', ')}] = {list(shape)}" for name, shape in shapes.items()
    )
    raise UserError(f"{by} must return a tensor {contract}; it returned {gave}")


def called(function: object) -> str:
    """Return the name of a function, or of an object's class, without bound options."""
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)
