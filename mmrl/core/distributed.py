"""Reductions over processes that are the identity in a single one."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmrl.core.errors import UserError


def world() -> tuple[int, int]:
    """Return (rank, number of processes); (0, 1) without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def leave() -> None:
    """End this process's part. What still refers to the group goes first: where the interpreter's
    exit takes gloo's threads down, it now and then aborts, and the launcher takes a finished run
    for a failed one."""
    if world()[1] > 1:
        gc.collect()
        dist.destroy_process_group()


def all_sum(x: Tensor) -> Tensor:
    """Sum over processes tensors of one shape, in their own dtype; ``x`` stays as it is."""
    return _reduce(x, dist.ReduceOp.SUM) if world()[1] > 1 else x


def all_max(x: Tensor) -> Tensor:
    """Take the elementwise maximum over processes of tensors of one shape."""
    return _reduce(x, dist.ReduceOp.MAX) if world()[1] > 1 else x


def largest(number: int, device: torch.device | str) -> int:
    """Return the largest of the processes' numbers, for which one process asks no device; a
    collective call."""
    return int(all_max(torch.tensor(number, device=device))) if world()[1] > 1 else number


def all_gather_rows(x: Tensor) -> Tensor:
    """Gather the rows [B_r, *] of every process in order of rank: [B_0 + B_1 + ..., *]; B_r may
    differ and may be 0."""
    size = world()[1]
    if size == 1:
        return x
    local_rows = _placed(x.detach())
    counts = [torch.zeros(1, dtype=torch.long, device=local_rows.device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(local_rows)], device=local_rows.device))
    most = max(int(count) for count in counts)
    # [most, *]
    padded = torch.cat(
        [local_rows, local_rows.new_zeros(most - len(local_rows), *local_rows.shape[1:])]
    ).contiguous()
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)]).to(
        x.device
    )


def all_gather_json(rows: Sequence[Any], device: torch.device | str = "cpu") -> list[Any]:
    """Gather the rows of every process in order of rank, each fit for JSON, through which all of
    them go."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    sent = torch.tensor(list(lines), dtype=torch.uint8, device=device)
    return [
        json.loads(line)
        for line in bytes(all_gather_rows(sent).tolist()).decode().split("\n")
        if line
    ]


def all_gather_plain(value: Any) -> list[Any]:
    """Gather plain data, fit for JSON, of every process in order of rank."""
    return all_gather_json([value])


class StopAll(UserError):
    """Is a UserError that every process raises at the same place, so that they can still act in
    common before they end."""


@contextmanager
def together() -> Iterator[None]:
    """Raise on all processes a UserError that ends this block on one: nobody waits for one that has
    gone.

    Entering and leaving is a collective call; the block itself must make none.
    """
    mistake = ""
    try:
        yield
    except UserError as error:
        if world()[1] == 1:
            raise StopAll(str(error)) from error
        mistake = str(error) or "unknown"
    if float(all_max(torch.tensor(float(bool(mistake))))):
        text = torch.tensor(list(mistake.encode() + b"\0"), dtype=torch.uint8)
        messages = bytes(all_gather_rows(text).tolist()).decode().split("\0")
        raise StopAll("\n".join(dict.fromkeys(message for message in messages if message)))


def _reduce(x: Tensor, op: dist.ReduceOp) -> Tensor:
    total = _placed(x.detach()).clone().contiguous()
    dist.all_reduce(total, op)
    return total.to(x.device)


def _placed(x: Tensor) -> Tensor:
    """Move a tensor to a device the process group can talk about: NCCL alone knows no CPU
    tensors."""
    return x.cuda() if dist.get_backend() == "nccl" and not x.is_cuda else x
