"""Structs of arrays: tensors with equally many rows that are indexed, joined and moved together.

The records of ``mmrl.core.types`` build on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from mmrl.core.host import sent


def tree_map(fn: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``fn`` to every tensor in a nest of dicts, lists and tuples; leave everything else
    unchanged."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: tree_map(fn, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(tree_map(fn, item) for item in value)
    return value


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Holds a struct of arrays of equally many rows; a field may be such a struct itself."""

    def row_fields(self) -> dict[str, Tensor | Fields]:
        """Return the fields that have rows, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cond"}
        return {name: v for name, v in values.items() if isinstance(v, (Tensor, Fields))}

    def row_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that have rows, also those of nested fields, by field name."""
        tensors: dict[str, Tensor] = {}
        for name, value in self.row_fields().items():
            tensors |= {name: value} if isinstance(value, Tensor) else value.row_tensors()
        return tensors

    def map(self, fn: Callable[[Tensor], Any]) -> Self:
        """Apply ``fn`` to every row tensor, not to ``cond``."""
        changed = {
            n: v.map(fn) if isinstance(v, Fields) else fn(v) for n, v in self.row_fields().items()
        }
        return replace(self, **changed)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Join rows that share their prompts (one ``cond`` for all)."""
        joined = {}
        for name, value in parts[0].row_fields().items():
            columns = [getattr(part, name) for part in parts]
            joined[name] = (
                type(value).cat(columns) if isinstance(value, Fields) else torch.cat(columns)
            )
        return replace(parts[0], **joined)

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Rows(Fields):
    """Holds a struct of arrays. Indexing takes rows; ``cond`` stays whole, since ``group`` still
    indexes it."""

    group: Tensor  # [B] long: which prompt the row answers, an index into cond and prompts
    cond: Any = None  # nest of tensors [P, *], the policy's encoding of a prompt

    def __len__(self) -> int:
        return len(self.group)

    def to(self, device: torch.device | str) -> Self:
        moved = self.map(lambda tensor: tensor.to(device))
        return replace(moved, cond=tree_map(lambda tensor: tensor.to(device), self.cond))

    def __getitem__(self, index: Tensor | slice) -> Self:
        if isinstance(index, slice):
            return self.map(lambda tensor: tensor[index])
        # one sync, not one per tensor
        rows = index.nonzero()[:, 0] if index.dtype == torch.bool else index
        places = {rows.device: rows}

        def taken(tensor: Tensor) -> Tensor:
            if tensor.device not in places:  # paths may be stored off the device
                places[tensor.device] = sent(rows, tensor.device)
            return tensor[places[tensor.device]]

        return self.map(taken)

    def split(self, size: int) -> Iterator[Self]:
        return (self[i : i + size] for i in range(0, len(self), size))

    def repeat(self, n: int) -> Self:
        return self.map(lambda tensor: tensor.repeat_interleave(n, dim=0))
