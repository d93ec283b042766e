"""KV cache for a known number of tokens: preallocated and written in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KV = tuple[Tensor, Tensor]  # of one layer, [B, heads, S, D] each
# where new tokens go: a slice, or [n] long for passes whose shapes never change
Place = slice | Tensor


@dataclass
class Rooms:
    """Holds the key-value caches of all layers, for B rows of S tokens; ``length`` are written
    already."""

    layers: list[KV]
    length: int

    @classmethod
    def after(cls, read: Sequence[KV], rows: Tensor, size: int) -> Rooms:
        """Allocate ``size`` tokens, the first of which are those ``read`` of the prompts of
        ``rows`` [B]."""
        length = read[0][0].shape[2]
        return cls([(_wide(k, rows, size), _wide(v, rows, size)) for k, v in read], length)

    @property
    def rows(self) -> int:
        return len(self.layers[0][0])

    def __iter__(self) -> Iterator[KV]:
        return iter(self.layers)

    def back(self, rows: slice | Tensor, length: int) -> Rooms:
        """Return these rows, truncated to ``length`` tokens; a slice shares memory."""
        return Rooms([(k[rows], v[rows]) for k, v in self.layers], length)

    def causal_mask(self, place: slice, padding: Tensor | None) -> Tensor:
        """Mask what each of the tokens at ``place`` may attend to, [B or 1, 1, n, S] bool."""
        device = self.layers[0][0].device
        whole = torch.ones(place.stop - place.start, place.stop, dtype=torch.bool, device=device)
        past = whole.tril(place.start)[None, None]
        if padding is None:
            return past
        keys = torch.nn.functional.pad(
            padding.bool(), (0, place.stop - padding.shape[1]), value=True
        )
        return past & keys[:, None, None]

    def next(self, count: int, fixed: bool = False) -> Place:
        """Reserve the next ``count`` tokens and return where they go."""
        first = self.length
        self.length = self.length + count
        if fixed:
            torch.compiler.cudagraph_mark_step_begin()
            return torch.arange(first, self.length, device=self.layers[0][0].device)
        return slice(first, self.length)

    def attention_mask(self, place: Place, padding: Tensor | None) -> Tensor | None:
        """Mask what a token at ``place`` may attend to, [B or 1, 1, 1, S] bool; None: every key
        passed.

        ``padding`` [B, n] bool is False where one of the first n tokens of a row is padding.
        """
        size = self.layers[0][0].shape[2]
        if isinstance(place, slice):
            size = place.stop
        elif padding is None:
            return (torch.arange(size, device=place.device) <= place[-1])[None, None, None]
        if padding is None:
            return None
        whole = torch.nn.functional.pad(padding.bool(), (0, size - padding.shape[1]), value=True)
        if not isinstance(place, slice):
            whole = whole & (torch.arange(size, device=place.device) <= place[-1])
        return whole[:, None, None]


def put(room: KV, k: Tensor, v: Tensor, place: Place) -> KV:
    """Write [B, heads, n, D] each at ``place`` and return the keys and values to attend to: up to
    there, or the whole buffer."""
    if isinstance(place, slice):
        room[0][:, :, place], room[1][:, :, place] = k, v
        return room[0][:, :, : place.stop], room[1][:, :, : place.stop]
    room[0].index_copy_(2, place, k.to(room[0].dtype))
    room[1].index_copy_(2, place, v.to(room[1].dtype))
    return room


def _wide(read: Tensor, rows: Tensor, size: int) -> Tensor:
    """Append zeros: a masked weight of 0 times uninitialised memory may be NaN."""
    wide = read.new_zeros(len(rows), read.shape[1], size, read.shape[3])
    wide[:, :, : read.shape[2]] = read[rows]
    return wide
