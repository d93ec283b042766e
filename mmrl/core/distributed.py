"""Reduces and gathers tensors over all processes; the identity where there is only one."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
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
    """Destroy the process group at the end of a run. Whatever still refers to it is collected
    first: otherwise the interpreter's exit, which takes gloo's threads down, now and then aborts,
    and the launcher takes a finished run for a failed one."""
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
    """Return the largest of the processes' numbers, without waiting for the device if there is one
    process; a collective call."""
    return int(all_max(torch.tensor(number, device=device))) if world()[1] > 1 else number


def any_of(flag: bool) -> bool:
    """Tell whether a flag is set on any process; a collective call."""
    return bool(all_max(torch.tensor(float(flag))))


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
    """Gather every process's rows as JSON, in order of rank."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    sent = torch.tensor(list(lines), dtype=torch.uint8, device=device)
    return [
        json.loads(line)
        for line in bytes(all_gather_rows(sent).tolist()).decode().split("\n")
        if line
    ]


def all_gather_plain(value: Any) -> list[Any]:
    """Gather every process's plain data, fit for JSON, in order of rank."""
    return all_gather_json([value])


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
    """Tells the user's mistake on every process at the same place, so that they can still make
    collective calls before they end."""


@contextmanager
def together() -> Iterator[None]:
    """Raise on all processes a UserError that ends this block on one, so that no process waits for
    one that has gone.

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


def _reduce(x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    total = _placed(x.detach()).clone().contiguous()
    dist.all_reduce(total, op)
    return total.to(x.device)


def _placed(x: Tensor) -> Tensor:
    """Move a tensor to a device that the process group supports: NCCL alone knows no CPU
    tensors."""
    return x.cuda() if dist.get_backend() == "nccl" and not x.is_cuda else x
