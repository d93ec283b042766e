"""Records metrics from inside a loss.

An objective returns only its loss and records any other curve by ``observe``. Outside a training
step the call does nothing, so objectives stay pure functions and short.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mmrl.core import distributed

_listening: list[Meter] = []


def observe(name: str, value: Tensor, mask: Tensor | None = None) -> None:
    """Record the mean and the largest absolute value of a tensor [B, L] where ``mask`` [B, L] is
    true."""
    for meter in _listening:
        meter.add(name, value.detach(), mask)


class Meter:
    """Keeps counts, sums and maxima by name, reduced over all processes when read."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}  # name -> [2] float64: sum and count
        self.tops: dict[str, Tensor] = {}  # name -> [] float64
        self.sizes: dict[str, Tensor] = {}  # name -> [] float64: sum of absolute values

    @contextmanager
    def listening(self) -> Iterator[Meter]:
        _listening.append(self)
        try:
            yield self
        finally:
            _listening.remove(self)

    @contextmanager
    def alone(self) -> Iterator[Meter]:
        """Be the only meter inside: another loss than the policy's is recorded separately."""
        before = _listening[:]
        _listening[:] = [self]
        try:
            yield self
        finally:
            _listening[:] = before

    def mark(self) -> tuple[dict[str, Tensor], ...]:
        """Return the current counts, sums and maxima, for ``restore``."""
        return dict(self.sums), dict(self.tops), dict(self.sizes)

    def restore(self, mark: tuple[dict[str, Tensor], ...]) -> None:
        """Go back to a ``mark``, forgetting what was recorded since."""
        self.sums, self.tops, self.sizes = (dict(part) for part in mark)

    def add(self, name: str, value: Tensor, mask: Tensor | None = None) -> None:
        value = value.double()
        keep = torch.ones_like(value, dtype=torch.bool) if mask is None else mask.expand_as(value)
        masked = torch.where(keep, value, 0.0)
        pair = torch.stack([masked.sum(), keep.sum().double()])
        self.sums[name] = self.sums.get(name, 0) + pair
        self.sizes[name] = self.sizes.get(name, 0) + masked.abs().sum()
        self.tops[name] = torch.maximum(self.tops.get(name, pair.new_zeros(())), masked.abs().max())

    def put(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add ``total`` to a sum and ``count`` to the count that divides it."""
        self.sums[name] = self.sums.get(name, 0) + torch.stack(
            [total.detach().double(), count.double()]
        )

    def mean(self, name: str) -> float:
        """Return the mean over everything observed on all processes, NaN if nothing was; a
        collective call."""
        total, count = distributed.all_sum(
            self.sums.get(name, torch.zeros(2, dtype=torch.float64))
        ).tolist()
        return total / count if count else float("nan")

    def means(self) -> dict[str, float]:
        """Return the mean of every name, as ``mean``, by one collective call and one device
        sync."""
        names = sorted(self.sums)
        if not names:
            return {}
        device = self.sums[names[0]].device
        table = distributed.all_sum(
            torch.stack([self.sums[name].to(device) for name in names])
        ).tolist()
        return {
            name: pair[0] / pair[1] if pair[1] else float("nan")
            for name, pair in zip(names, table, strict=True)
        }

    def size(self, name: str) -> float:
        """Return the mean absolute value of what was observed on all processes, 0 if nothing was; a
        collective call."""
        nothing = torch.zeros(2, dtype=torch.float64)
        pair = (
            torch.stack([self.sizes[name], self.sums[name][1]]) if name in self.sizes else nothing
        )
        total, count = distributed.all_sum(pair).tolist()
        mean: float = total / max(count, 1)
        return mean

    def top(self, name: str) -> float:
        """Return the largest absolute value on any process; a collective call."""
        return float(distributed.all_max(self.tops.get(name, torch.zeros((), dtype=torch.float64))))


class Stopwatch:
    """Sums the seconds of an iteration's parts, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the block's duration to the seconds of ``name``; nothing if it raises."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """Return the seconds as metrics, and reset to zero."""
        seconds = self.seconds
        self.seconds = {}
        self.began = time.perf_counter()
        return {f"time/{name}": value for name, value in seconds.items()}

    def lap_with_share(self, name: str) -> dict[str, float]:
        """Return the lap, and the share of ``name`` in the time since the last lap."""
        share = self.seconds.get(name, 0.0) / (time.perf_counter() - self.began)
        return self.lap() | {f"time/{name}_share": share}
