"""Reduces and gathers tensors over all processes; the identity if there is only one.

With context parallelism, neighbouring processes share their rows, each computing a part of every
sequence: sums and gathers then count each row once, over one process of each group.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmrl.core import peers
from mmrl.core.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Describes which processes hold the same rows: ``width`` neighbours each. ``same_rows`` is
    this process's group of them, ``other_rows`` the group of processes at the same position in
    theirs."""

    width: int
    same_rows: Any  # torch has a special type for processes outside a group
    other_rows: Any


_layouts: dict[tuple[int, int], Layout] = {}  # by the default process group, and width
_layout: list[Layout] = []  # the current one; empty: every process has its own rows


def share_rows(width: int) -> None:
    """Make every ``width`` neighbouring processes hold the same rows; 1: each its own.

    A collective call. ``width`` divides the number of processes.
    """
    _layout.clear()
    if width == 1:
        return
    rank, size = process()
    key = (id(dist.group.WORLD), width)
    if key not in _layouts:
        firsts = range(0, size, width)
        same = [dist.new_group(list(range(first, first + width))) for first in firsts]
        across = [dist.new_group(list(range(place, size, width))) for place in range(width)]
        _layouts[key] = Layout(width, same[rank // width], across[rank % width])
    _layout.append(_layouts[key])


_lone: list[bool] = []  # whether the others are gone


def be_alone() -> None:
    """Make this process the only one, after another has died and collective calls are
    impossible."""
    _layout.clear()
    _lone.append(True)


def process() -> tuple[int, int]:
    """Return (rank, number) of processes, regardless of their rows; (0, 1) without
    torch.distributed."""
    if _lone or not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def is_main() -> bool:
    """Tell whether this is the process that writes files and logs."""
    return process()[0] == 0


def world() -> tuple[int, int]:
    """Return (rank, number) of the shares of the rows: those of processes, unless several hold the
    same rows; (0, 1) without torch.distributed."""
    rank, size = process()
    width = _layout[0].width if _layout else 1
    return rank // width, size // width


def leave() -> None:
    """Destroy the process group at the end of a run. References to it are garbage-collected first:
    otherwise gloo's threads sometimes abort at the interpreter's exit, and the launcher reports a
    finished run as failed."""
    spoken = peers.leave()
    if process()[1] > 1 and spoken:
        _layout.clear()
        _layouts.clear()
        gc.collect()
        dist.destroy_process_group()


def leads() -> bool:
    """Tell whether this is the first of the processes that hold the same rows."""
    return not _layout or process()[0] % _layout[0].width == 0


def of_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the named tensors of the first of the processes that hold the same rows, on the CPU if
    there are several; those of the others are ignored. A collective call."""
    from safetensors.torch import load, save

    if not _layout:
        return dict(tensors)
    content = save({n: x.detach().cpu().contiguous() for n, x in tensors.items()})
    size = _agreed(torch.tensor([len(content)]))
    buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    sent = buffer if leads() else torch.zeros(int(size), dtype=torch.uint8)
    return load(_agreed(sent).numpy().tobytes())


def _agreed(x: Tensor) -> Tensor:
    """Broadcast the first process's ``x`` to all that hold the same rows, of one shape and
    dtype."""
    first = _placed(x.detach()).clone().contiguous()
    dist.broadcast(first, group=_layout[0].same_rows, group_src=0)
    return first.to(x.device)


class _Joined(torch.autograd.Function):
    """The identity, whose backward sums gradients over the processes that hold the same rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = _placed(gradients[0]).clone().contiguous()
        dist.all_reduce(total, group=_layout[0].same_rows)
        return total.to(gradients[0].device)


def joined_gradient(x: Tensor) -> Tensor:
    """Return ``x``, whose gradient is the sum of those of the processes that hold the same rows,
    each of which computes a part of the sequence."""
    joined: Tensor = _Joined.apply(x) if _layout else x
    return joined


def all_sum(x: Tensor) -> Tensor:
    """Sum tensors of one shape over processes, in their dtype; ``x`` is unchanged."""
    return _reduce(x, dist.ReduceOp.SUM, _others()) if world()[1] > 1 else x


def all_max(x: Tensor) -> Tensor:
    """Take the elementwise maximum over processes of tensors of one shape."""
    return _reduce(x, dist.ReduceOp.MAX) if process()[1] > 1 else x


def largest(number: int, device: torch.device | str) -> int:
    """Return the maximum over processes, without a device sync if there is only one; a collective
    call."""
    return int(all_max(torch.tensor(number, device=device))) if process()[1] > 1 else number


def any_of(flag: bool) -> bool:
    """Tell whether a flag is set on any process; a collective call."""
    return bool(all_max(torch.tensor(float(flag))))


def all_gather_rows(x: Tensor) -> Tensor:
    """Gather the rows [B_r, *] of all processes in order of rank: [B_0 + B_1 + ..., *]; B_r may
    differ and may be 0."""
    return _gathered(x, _others(), world()[1])


def _gathered(x: Tensor, group: dist.ProcessGroup | None, size: int) -> Tensor:
    """Gather rows over the ``size`` processes of a group; None: over all."""
    if size == 1:
        return x
    local_rows = _placed(x.detach())
    counts = [torch.zeros(1, dtype=torch.long, device=local_rows.device) for _ in range(size)]
    own_count = torch.tensor([len(local_rows)], device=local_rows.device)
    dist.all_gather(counts, own_count, group)
    most = max(int(count) for count in counts)
    # [most, *]
    padded = torch.cat(
        [local_rows, local_rows.new_zeros(most - len(local_rows), *local_rows.shape[1:])]
    ).contiguous()
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)]).to(
        x.device
    )


def all_gather_json(rows: Sequence[Any], device: torch.device | str = "cpu") -> list[Any]:
    """Gather every process's rows as JSON, in order of rank."""
    return _gathered_json(rows, _others(), world()[1], device)


def _gathered_json(
    rows: Sequence[Any],
    group: dist.ProcessGroup | None,
    size: int,
    device: torch.device | str = "cpu",
) -> list[Any]:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    sent = torch.tensor(list(lines), dtype=torch.uint8, device=device)
    return [
        json.loads(line)
        for line in bytes(_gathered(sent, group, size).tolist()).decode().split("\n")
        if line
    ]


def all_gather_plain(value: Any) -> list[Any]:
    """Gather every process's JSON-ready data, in order of rank, also of those that hold the same
    rows."""
    return _gathered_json([value], None, process()[1])


def all_gather_tensors(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Gather every process's tensors by name, of any shapes, on the CPU, in order of rank."""
    from safetensors.torch import load, save

    if world()[1] == 1:
        return [dict(tensors)]
    content = save({n: tensor.detach().cpu().contiguous() for n, tensor in tensors.items()})
    sizes: list[int] = all_gather_rows(torch.tensor([len(content)])).tolist()
    every = all_gather_rows(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return [load(part.numpy().tobytes()) for part in every.split(sizes)]


class StopAll(UserError):
    """Raises a UserError on every process at the same place, so that they can still make collective
    calls before they end."""


@contextmanager
def together() -> Iterator[None]:
    """Raise on all processes a UserError that one raises in this block, so that none waits for a
    process that has ended.

    Entering and leaving is a collective call; the block itself must make none.
    """
    mistake = ""
    try:
        yield
    except UserError as error:
        if process()[1] == 1:
            raise StopAll(str(error)) from error
        mistake = str(error) or "unknown"
    if float(all_max(torch.tensor(float(bool(mistake))))):
        text = torch.tensor(list(mistake.encode() + b"\0"), dtype=torch.uint8)
        every = _gathered(text, None, process()[1])
        messages = bytes(every.tolist()).decode().split("\0")
        raise StopAll("\n".join(dict.fromkeys(message for message in messages if message)))


def _others() -> dist.ProcessGroup | None:
    """Return the group that counts each row once; None: all processes."""
    return _layout[0].other_rows if _layout else None


def _reduce(
    x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
) -> Tensor:
    total = _placed(x.detach()).clone().contiguous()
    dist.all_reduce(total, op, group)
    return total.to(x.device)


def _placed(x: Tensor) -> Tensor:
    """Move a tensor to a device that the process group supports: NCCL has no CPU tensors."""
    return x.cuda() if dist.get_backend() == "nccl" and not x.is_cuda else x
