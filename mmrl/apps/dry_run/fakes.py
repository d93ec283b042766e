"""Builds networks of true size without memory: every weight is a fake tensor, which has a shape, a
dtype and a device, but no values.

Operations on fake tensors run torch's own code for shapes. Small tensors that control the
computation (masks, times, ids) stay real, so that the rehearsed code can read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map_only

LARGE = 2**27  # maximum elements of a real tensor that rehearsed code may expand from a small one


class Fakes:
    """Creates the fake tensors of one rehearsal; those of two cannot be mixed."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Make a contiguous fake tensor on the CPU."""
        with self.mode:
            return torch.empty(shape, dtype=dtype)

    def like(self, tensor: Tensor) -> Tensor:
        """Make a fake tensor of the same shape, strides and type, on the CPU."""
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def fill(self, net: nn.Module) -> None:
        """Replace every tensor of a network, mostly one on the meta device, in place. Tied weights
        stay tied."""
        stand_ins: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in stand_ins:
                stand_in = self.like(tensor)
                if isinstance(tensor, nn.Parameter):
                    stand_in = nn.Parameter(stand_in, tensor.requires_grad)
                stand_ins[id(tensor)] = stand_in
            return stand_ins[id(tensor)]

        for module in net.modules():
            tables: tuple[Any, ...] = (module._parameters, module._buffers, vars(module))
            for table in tables:
                for name, value in list(table.items()):
                    if _is_plain(value):
                        table[name] = fake(value)
                    elif isinstance(value, (list, tuple)) and tree_any(_is_plain, value):
                        table[name] = tree_map_only(Tensor, fake, value)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let code index fake tensors by real masks, and evaluate a fake tensor as a bool."""
        with _Answers(self):
            yield


def faked_where_large(mode: FakeTensorMode, tensor: Tensor, times: Sequence[int]) -> Tensor:
    """Return a tensor to be repeated ``times`` times, as a fake if the result would be large."""
    if isinstance(tensor, FakeTensor) or tensor.numel() * math.prod(times) <= LARGE:
        return tensor
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)


class _Answers(TorchFunctionMode):
    """Answers questions that need the values of a tensor.

    A real mask is read; a fake one counts as true everywhere, the worst case. A mask that would be
    expanded to tokens x tokens is fake from there on.
    """

    def __init__(self, fakes: Fakes):
        super().__init__()
        self.fakes = fakes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and len(args) > 1:
            args = (args[0], _without_masks(args[1]), *args[2:])
        elif func in (Tensor.__bool__, Tensor.all, Tensor.any) and isinstance(args[0], FakeTensor):
            if func is Tensor.__bool__:
                return True
        elif func is Tensor.repeat and _is_plain(args[0]):
            times = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
            args = (faked_where_large(self.fakes.mode, args[0], times), *args[1:])
        elif func is Tensor.item and isinstance(args[0], FakeTensor):
            return True if args[0].dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))


def _without_masks(index: Any) -> Any:
    """Replace bool masks in an index by the indices where they are true."""
    if isinstance(index, tuple):
        parts: list[Any] = []
        for part in index:
            replaced = _without_masks(part)
            masked = isinstance(part, Tensor) and part.dtype == torch.bool and part.ndim > 0
            parts += [*replaced] if masked else [replaced]
        return tuple(parts)
    if not isinstance(index, Tensor) or index.dtype != torch.bool or index.ndim == 0:
        return index
    if isinstance(index, FakeTensor):
        holds = torch.ones(index.shape, dtype=torch.bool)
        return holds.nonzero(as_tuple=True)
    return index.nonzero(as_tuple=True)
