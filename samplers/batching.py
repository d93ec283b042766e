"""Fits batches into memory: chunks of rows, the peak bytes of a forward pass, and results that do
not depend on the chunk size."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only


def chunks(count: int, size: int) -> Iterator[slice]:
    """Return slices of at most ``size`` rows that cover 0..count - 1 in order."""
    if size < 1:
        raise ValueError(f"a chunk needs at least 1 row, not {size}")
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def peak_bytes(fn: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Return the peak bytes of the tensors that ``fn`` creates, on top of what existed before.

    On a CUDA device the allocator counts, which includes the workspaces of kernels; elsewhere every
    storage that an operation returns is counted until it is freed, without the scratch space inside
    one operation.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        fn()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    tally = _Tally()
    with tally:
        fn()
    return tally.peak


class _Tally(TorchDispatchMode):
    """Counts storages from the operation that returns them first until nothing refers to them any
    more."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.live = self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        known = {
            t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)
        }
        output = func(*args, **kwargs)
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known:
                self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        size = storage.nbytes()
        if address in self.alive:
            return

        def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self.alive[address]
            self.live -= size

        self.alive[address] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)


def rows_that_fit(
    forward: Callable[[int], Any], budget: int, most: int, device: torch.device | str = "cpu"
) -> int:
    """Return the largest number of rows in 1..most whose ``forward(rows)`` stays within ``budget``
    bytes.

    Runs one row and two rows and assumes that memory grows linearly. ValueError if even one row is
    too many.
    """
    if most < 1:
        raise ValueError(f"the largest number of rows must be at least 1, not {most}")
    first = peak_bytes(lambda: forward(1), device)
    if first > budget:
        raise ValueError(
            f"one row needs {first:,} bytes, the budget is {budget:,}: raise the budget or "
            f"use a smaller size"
        )
    if most == 1:
        return 1
    each = peak_bytes(lambda: forward(2), device) - first
    return most if each <= 0 else min(most, 1 + (budget - first) // each)


class Attempt:
    """Makes one attempt at work in passes of at most ``rows`` rows. As a context manager it gives
    ``rows``, and notes an out-of-memory error of its block instead of raising it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.error: str | None = None

    def __enter__(self) -> int:
        return self.rows

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, torch.OutOfMemoryError):
            return False
        self.error = str(error).partition("\n")[0]
        return True


def attempts(size: int, least: int = 1) -> Iterator[Attempt]:
    """Yield an attempt at ``size`` rows a pass, and then with half as many, as long as the device
    runs out of memory. The block must start over in every attempt.

    Raises torch.OutOfMemoryError if ``least`` rows do not fit either.
    """
    while True:
        attempt = Attempt(size)
        yield attempt
        if attempt.error is None:
            return
        if size // 2 < least:
            raise torch.OutOfMemoryError(
                f"{size} rows a pass, and fewer than {least} cannot be: {attempt.error}"
            )
        size //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def at_width(fn: Callable[..., Any], width: int, *batches: Any) -> Any:
    """Compute ``fn(*batches)`` at exactly ``width`` rows, for nests of tensors [B, *] with B <=
    width.

    Row 0 is repeated as padding, and the padding is removed from the result (a nest of tensors
    [width, *]) and from the gradient. A matmul of few rows may round differently from one of many;
    at constant width the result of a row does not depend on how many rows its chunk has. It may
    still depend, in the last place, on the row's place in the chunk.
    """
    rows = {len(tensor) for tensor in tree_iter(batches) if isinstance(tensor, Tensor)}
    if len(rows) != 1:
        raise ValueError(f"at_width needs tensors of one number of rows, got {sorted(rows)}")
    (count,) = rows
    if not 1 <= count <= width:
        raise ValueError(f"{count} rows do not fit a width of {width}: need 1 to {width}")
    if count == width:
        return fn(*batches)
    wide = tree_map_only(
        Tensor, lambda x: torch.cat([x, x[:1].expand(width - count, *x.shape[1:])]), batches
    )
    return tree_map_only(Tensor, lambda x: x[:count], fn(*wide))
