"""The rows of a pass through a policy's network: as configured, measured, or as fit the device's
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.sharding import in_step, sharded
from samplers import batching
from samplers.batching import Attempt


class PassSizes:
    """Holds the sizes of a policy's passes.

    rows: of every pass, so that log-probs are reproducible (docs/architecture.md); None: as many as
    there are. memory_gib: GiB that a sampling pass may allocate; it then has as many rows as fit.
    warnings: collects notes that passes became smaller.
    """

    max_micro_batch: int | None = None  # rows that fitted the memory, or were fastest; None: any
    multiple: int = 1  # of rows in sampling passes: rows that share work are sampled together

    def __init__(
        self,
        net: nn.Module,
        warnings: list[str],
        rows: int | None = None,
        memory_gib: float | None = None,
    ):
        self.net = net
        self.warnings = warnings
        self.rows = rows
        self.memory_gib = memory_gib
        self.rows_that_fit: int | None = None  # the memory budget, measured once

    @property
    def device(self) -> torch.device:
        return next(self.net.parameters()).device

    def most(self, rows: int) -> int:
        """Return how many of ``rows`` rows a pass may have."""
        return min(self.rows or rows, self.max_micro_batch or rows)

    def to_sample(self, rows: int, forward: Callable[[int], Any]) -> int:
        """Choose how many of ``rows`` rows are sampled at once; ``forward(n)`` is one pass of n
        rows, run once to measure what it allocates."""
        if self.memory_gib is None:
            size = self.most(rows)
        else:
            self.rows_that_fit = self.rows_that_fit or self._measured(rows, forward)
            size = min(self.rows_that_fit, rows, self.max_micro_batch or rows)
        return max(self.multiple, size // self.multiple * self.multiple)

    def _measured(self, rows: int, forward: Callable[[int], Any]) -> int:
        assert self.memory_gib is not None
        most = distributed.largest(rows, self.device)  # all measure with the same passes
        budget = int(self.memory_gib * 2**30)
        try:
            fitting = batching.rows_that_fit(forward, budget, most, self.device)
        except ValueError as error:
            raise UserError(
                f"policy option sampling_memory_gib = {self.memory_gib:g} GiB: {error}"
            ) from error
        # the same number of passes on all processes
        return -int(distributed.all_max(torch.tensor(-fitting)))

    def chunks(self, rows: int, size: int) -> Iterator[tuple[slice, bool]]:
        """Split rows into chunks of at most ``size``, for network passes, and tell which count:
        where weights are sharded, a process with fewer chunks makes dummy passes of its first row.
        A collective call there."""
        return in_step(batching.chunks(rows, size), slice(0, 1), self.device, sharded(self.net))

    def attempts(self, size: int, least: int = 1) -> Iterator[Attempt]:
        """Yield attempts with passes of at most ``size`` rows; after an out-of-memory error, with
        half as many. From then on no pass is larger, and all are padded to that width, which keeps
        log-probs equal. UserError where even ``least`` rows do not fit."""
        # processes would no longer make the same number of passes
        alone = distributed.process()[1] == 1
        width = self.rows
        rows = size
        try:
            for attempt in batching.attempts(size, least if alone else size):
                rows = attempt.rows
                # or passes would be padded to a width that did not fit
                if rows < size and width:
                    self.rows = min(width, rows)
                yield attempt
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory: {error}. Try train.gradient_checkpointing=true, "
                f"policy.lora, a smaller "
                "train.micro_batch_size, or a smaller size; `mmrl train CONFIG --dry-run` "
                "estimates what is needed"
            ) from error
        if rows < size:
            self.max_micro_batch = rows
            self.warnings.append(
                f"out of memory: passes now have at most {rows} rows; "
                f"train.micro_batch_size={rows} begins so"
            )

    def fix(self, rows: int) -> None:
        """Limit every pass to ``rows`` rows from now on, and pad all to that width."""
        self.rows = self.max_micro_batch = rows

    def width(self) -> int:
        """Return the number of rows to which every pass is padded; 0 (none) with a memory
        budget."""
        return 0 if self.memory_gib is not None else self.rows or 0
