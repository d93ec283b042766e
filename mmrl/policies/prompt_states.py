"""Turns a prompt's condition into a vector, for value models and prompt similarity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmrl.core.errors import UserError

BUCKETS = 1024  # of ids, such as classes or tokens


def pooled(cond: Any) -> Tensor:
    """Return one vector [1, H] of the condition of one prompt, a nest of tensors [1, *]: for floats
    the mean over positions, for ids their frequencies (hashed). The empty prompt's condition is
    left out."""
    parts = [
        ids_counted(leaf) if not leaf.is_floating_point() else over_places(leaf)
        for leaf in leaves(cond)
    ]
    if not parts:
        raise UserError(
            "the policy knows nothing of a prompt by which its reward could be predicted"
        )
    return torch.cat(parts, 1)


def leaves(cond: Any) -> Iterator[Tensor]:
    """Yield the tensors of a condition, except masks, in a fixed order."""
    if isinstance(cond, Tensor):
        if cond.dtype != torch.bool:
            yield cond
    elif isinstance(cond, dict):
        for name in sorted(cond):
            if name != "uncond" and not str(name).endswith("mask"):
                yield from leaves(cond[name])
    elif isinstance(cond, (list, tuple)):
        for item in cond:
            yield from leaves(item)


def over_places(leaf: Tensor) -> Tensor:
    """Take the mean [1, H] over all dimensions between the first and the last."""
    flat = leaf.float().reshape(1, -1, leaf.shape[-1] if leaf.ndim > 1 else 1)
    return flat.mean(1)


def ids_counted(leaf: Tensor) -> Tensor:
    """Return the share of the ids [1, *] that falls in each bucket, [1, BUCKETS]."""
    ids = leaf.long().flatten() % BUCKETS
    return F.one_hot(ids, BUCKETS).float().mean(0)[None]
