"""Tells whether FSDP2 shards a module or tensor, and keeps the processes that share its weights in
step. FSDP2 is not imported for this, which would take a second: without it nothing is sharded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from mmrl.core import distributed

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


def sharded(net: nn.Module) -> bool:
    """Tell whether forward passes of the network are collective calls."""
    return any(shards(module) for module in net.modules())


def in_step(
    parts: Iterable[T], idle: T, device: torch.device | str, waits: bool = True
) -> Iterator[tuple[T, bool]]:
    """Yield the parts of this process's work, each with the same forward passes, and whether they
    count: all do; if passes are collective, ``idle`` parts follow to match the process with the
    most parts.

    The only place that decides their number; a collective call before the first, if it ``waits``.
    """
    work = list(parts)
    most = distributed.largest(len(work), device) if waits else len(work)
    yield from ((part, True) for part in work)
    yield from ((idle, False) for _ in range(most - len(work)))


def whole_blocks(net: Any) -> list[str]:
    """Name the classes of a network's modules that FSDP2 wraps one by one, as accelerate reads
    them."""
    return list(getattr(net, "_no_split_modules", None) or ())


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Tell whether a tensor is a DTensor."""
    return _is(tensor, "torch.distributed.tensor", "DTensor")


def shards(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Tell whether FSDP2 gathers and frees this module's parameters."""
    return _is(module, "torch.distributed.fsdp", "FSDPModule")


def extent(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (start, size) of this process's shard in the whole tensor."""
    if not is_sharded(tensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    size, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(start), tuple(size)


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """Wrap this process's ``part`` as a tensor sharded like ``tensor``; return ``part`` if that is
    not sharded."""
    if not is_sharded(tensor):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _is(thing: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(thing, kind)
