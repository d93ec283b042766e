"""Reads the arguments that a pipeline passes to its network: the noisy input, its rows, and the
shapes of the outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

STATES = ("hidden_states", "sample", "x")  # what networks call their noisy input
FURTHER = ("audio_hidden_states",)  # what they call the noisy input of a second state
TYPED_AS_STATES = ("timestep_cond",)  # conditions that pipelines make in the type of the latents


def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {str(i): value for i, value in enumerate(args)} | kwargs


def state_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Name the network's noisy input; None where it is the first argument, or unknown."""
    return None if args else next((name for name in STATES if name in kwargs), None)


def noisy_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the network's noisy input, a tensor or a list of them; None: unknown."""
    name = state_name(args, kwargs)
    return args[0] if args else kwargs[name] if name else None


def state_cast(
    args: tuple[Any, ...], kwargs: dict[str, Any], cast: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert the network's noisy input with ``cast``: conditions come in the type that the
    pipeline gives them, and times stay in full precision."""

    def convert(value: Any) -> Any:
        return tree_map_only(Tensor, lambda x: cast(x) if x.is_floating_point() else x, value)

    kwargs = {k: convert(v) if k in TYPED_AS_STATES else v for k, v in kwargs.items()}
    if args:
        return (convert(args[0]), *args[1:]), kwargs
    names = [state_name(args, kwargs), *(name for name in FURTHER if name in kwargs)]
    return args, kwargs | {name: convert(kwargs[name]) for name in names if name is not None}


def row_count(state: Any) -> int:
    return len(state) if isinstance(state, (Tensor, list)) else 0


def plain_settings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Describe what the shapes of a network's outputs depend on besides the number of rows: its
    noisy input and plain settings, but no texts, whose lengths differ by prompt."""
    state = noisy_input(args, kwargs)
    if isinstance(state, Tensor):
        sizes: Any = state.shape[1:]
    elif isinstance(state, list):
        sizes = [x.shape for x in tree_flatten(state[:1])[0] if isinstance(x, Tensor)]
    else:
        sizes = [x.shape for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    plain = (bool, int, str, type(None))
    settings = [(k, v) for k, v in named(args, kwargs).items() if isinstance(v, plain)]
    return str((sizes, settings))


class Shapes(NamedTuple):
    """Describes what a network returns, for any number of rows."""

    output: Any  # a nest of tensors on no device
    device: torch.device | None
    rows: int

    @classmethod
    def of(cls, output: Any, rows: int) -> Shapes:
        """Describe an output for ``rows`` rows."""
        tensors = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor)]
        described = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), output)
        return cls(described, tensors[0].device if tensors else None, rows)

    def zeros(self, rows: int) -> Any:
        """Make such an output for another number of rows, of zeros."""

        def blank(leaf: Any) -> Any:
            if isinstance(leaf, list):  # a tensor for every row
                return [blank(leaf[0][None])[0] for _ in range(rows)]
            if not isinstance(leaf, Tensor):
                return leaf
            many = leaf.ndim and len(leaf) == self.rows
            shape = (rows, *leaf.shape[1:]) if many else leaf.shape
            return torch.zeros(shape, dtype=leaf.dtype, device=self.device)

        def by_row(nest: Any) -> bool:
            return isinstance(nest, list) and len(nest) == self.rows > 0

        return tree_map(blank, self.output, is_leaf=by_row)
