"""Reads tensors block by block from safetensors files, which may hold shards of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

OFFSETS = "DCP_SHARDING_INFO"  # header key: offsets of the shards in the whole tensors


class Block(NamedTuple):
    """Locates one file's block of a tensor."""

    file: Path
    start: tuple[int, ...]  # its offset in the whole tensor
    size: tuple[int, ...]


class Part(Mapping[str, Tensor]):
    """Reads the tensors of one part of a checkpoint on demand, whole or a block of each."""

    def __init__(self, files: Sequence[Path]):
        from safetensors import safe_open

        self.files: dict[Path, Any] = {file: safe_open(file, framework="pt") for file in files}
        self.blocks: dict[str, list[Block]] = {}
        for file, content in self.files.items():
            names = content.keys()
            starts = json.loads((content.metadata() or {}).get(OFFSETS, "{}"))
            for name in names:
                size = tuple(content.get_slice(name).get_shape())
                start = tuple(starts[name]["saved_offsets"]) if name in starts else (0,) * len(size)
                self.blocks.setdefault(name, []).append(Block(file, start, size))

    def __iter__(self) -> Iterator[str]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, name: str) -> Tensor:
        """Read the whole tensor."""
        shape = self.shape(name)
        return self.block(name, (0,) * len(shape), shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        ends = [[a + n for a, n in zip(block.start, block.size)] for block in self.blocks[name]]
        return tuple(map(max, zip(*ends)))

    def block(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read only the block of ``size`` that begins at ``start`` of the whole tensor."""
        joined: Tensor | None = None
        for block in self.blocks[name]:
            first = [max(a, b) for a, b in zip(start, block.start)]
            last = [min(a + n, b + m) for a, n, b, m in zip(start, size, block.start, block.size)]
            if any(end <= begin for begin, end in zip(first, last)) and 0 not in size:
                continue
            if tuple(start) == block.start and tuple(size) == block.size:
                whole: Tensor = self.files[block.file].get_tensor(name)
                return whole
            ranges = zip(first, last, block.start)
            within = tuple(slice(a - o, max(a, b) - o) for a, b, o in ranges)
            piece: Tensor = self.files[block.file].get_slice(name)[within]
            if tuple(piece.shape) == tuple(size):
                return piece
            joined = torch.empty(tuple(size), dtype=piece.dtype) if joined is None else joined
            joined[tuple(slice(a - o, b - o) for a, b, o in zip(first, last, start))] = piece
        assert joined is not None  # the files' blocks cover the tensor
        return joined
