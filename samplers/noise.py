"""Draws random numbers keyed by their use, so that samples do not depend on batch split, world size
or resume.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), a counter-based
generator, in plain torch integer arithmetic: the same numbers on every device, for a row alone or
in any batch, and no state to save.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int] | tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Compute ten rounds of Philox. Counter words and results are int64 tensors of one shape
    holding 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # wraps modulo 2^64, both halves stay right
        a = c0 * _MULTIPLY[0]
        b = c2 * _MULTIPLY[1]
        c0 = (b >> 32 & _LOW) ^ c1 ^ k0
        c1 = b & _LOW
        c2 = (a >> 32 & _LOW) ^ c3 ^ k1
        c3 = a & _LOW
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


@dataclass(frozen=True)
class Rng:
    """Draws from a named random stream. ``fold`` derives another one; draws do not change it, so
    order does not matter."""

    # 64 bits in two words; tensors [B, 1] for rows of several streams, which cannot fold
    key: tuple[int, int] | tuple[Tensor, Tensor]
    offset: int = 0  # position of this process's first prompt in the whole iteration
    first_row: int = 0  # and of its first row, if prompts have different numbers of samples

    @classmethod
    def of(cls, *names: int | str) -> Rng:
        """Return the stream with these names, for instance ``Rng.of(seed, "rollout",
        iteration)``."""
        digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
        return cls((int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")))

    def fold(self, *names: int | str) -> Rng:
        return replace(self, key=Rng.of(*self.key, *names).key)

    def rows(self, prompts: int, copies: int | Sequence[int]) -> Tensor:
        """Return the ids of the rows [B] of this process's prompts, copies adjacent: ``copies`` of
        each, or one number per prompt."""
        if isinstance(copies, int):
            return torch.arange(self.offset * copies, (self.offset + prompts) * copies)
        return torch.arange(self.first_row, self.first_row + sum(copies))

    def after(self, copies: int | Sequence[int], prompts: int) -> Rng:
        """Return the stream of the prompts that come after the first ``prompts``."""
        rows = 0 if isinstance(copies, int) else sum(copies[:prompts])
        return replace(self, offset=self.offset + prompts, first_row=self.first_row + rows)

    def bits(self, rows: Tensor, count: int, step: int = 0) -> Tensor:
        """Draw [B, count] int64 holding 32 random bits each, keyed by row and step."""
        blocks = -(-count // 4)
        block = torch.arange(blocks, device=rows.device)
        c0, row = torch.broadcast_tensors(block[None, :], rows.long()[:, None])
        words = philox((c0, row & _LOW, row >> 32 & _LOW, torch.full_like(c0, step)), self.key)
        return torch.stack(words, -1).flatten(1)[:, :count]

    def uniform(self, rows: Tensor, shape: tuple[int, ...] = (), step: int = 0) -> Tensor:
        """Draw [B, *shape] float64 in (0, 1), 32 random bits each, never 0 or 1."""
        count = math.prod(shape)
        return ((self.bits(rows, count, step).double() + 0.5) / 2**32).view(len(rows), *shape)

    def normal(
        self,
        rows: Tensor,
        shape: tuple[int, ...] = (),
        step: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Draw [B, *shape] standard normal, by Box and Muller in float64, then rounded to
        ``dtype``."""
        count = math.prod(shape)
        u = self.uniform(rows, (2 * -(-count // 2),), step).view(len(rows), -1, 2)
        radius = (-2 * u[..., 0].log()).sqrt()
        angle = 2 * math.pi * u[..., 1]
        normals = torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(1)[
            :, :count
        ]
        return normals.to(dtype).view(len(rows), *shape)

    def permutation(self, n: int, step: int = 0) -> Tensor:
        """Draw a random order of 0..n-1, [n] long."""
        words = self.bits(torch.arange(n), 2, step)
        return torch.argsort(words[:, 0] << 31 ^ words[:, 1], stable=True)
