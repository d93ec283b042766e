"""Reductions over processes that are the identity in a single one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> tuple[int, int]:
    """(rank, number of processes); (0, 1) without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def all_sum(x: Tensor) -> Tensor:
    """The sum over processes of tensors of one shape, in their own dtype; ``x`` stays as it is."""
    return _reduce(x, dist.ReduceOp.SUM) if world()[1] > 1 else x


def all_max(x: Tensor) -> Tensor:
    """The elementwise maximum over processes of tensors of one shape."""
    return _reduce(x, dist.ReduceOp.MAX) if world()[1] > 1 else x


def all_gather_rows(x: Tensor) -> Tensor:
    """[B_0 + B_1 + ..., *] the rows [B_r, *] of every process in order of rank; B_r may differ and may be 0."""
    size = world()[1]
    if size == 1:
        return x
    mine = _placed(x.detach())
    counts = [torch.zeros(1, dtype=torch.long, device=mine.device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(mine)], device=mine.device))
    most = max(int(count) for count in counts)
    padded = torch.cat([mine, mine.new_zeros(most - len(mine), *mine.shape[1:])]).contiguous()  # [most, *]
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)]).to(x.device)


def _reduce(x: Tensor, op: dist.ReduceOp) -> Tensor:
    total = _placed(x.detach()).clone().contiguous()
    dist.all_reduce(total, op)
    return total.to(x.device)


def _placed(x: Tensor) -> Tensor:
    """On a device the process group can talk about: NCCL alone knows no CPU tensors."""
    return x.cuda() if dist.get_backend() == "nccl" and not x.is_cuda else x
