"""Defines the options that every reward has, implemented in ``mmrl.scoring.handling``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from mmrl.core.errors import UserError


@dataclass(frozen=True)
class Handling:
    """Holds the common options of rewards; a reward's own option of the same name takes
    precedence."""

    device: str | None = None  # device of its networks and samples; null: unchanged
    # precision of autocast; null: float32 without autocast
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    batch_size: Annotated[int, Ge(1)] | None = None  # samples per call; null: all
    # concurrent calls of batch_size samples, for a reward that is an async function
    concurrency: Annotated[int, Ge(1)] = 16
    offload: bool = False  # keep its networks on the CPU while the policy samples and trains
    # seconds that one call may take, else its samples have no value; null: no limit
    timeout: Annotated[float, Gt(0)] | None = None
    # cache values by the content of sample and prompt
    cache: Literal["memory", "disk"] | None = None
    cache_entries: Annotated[int, Ge(1)] = 65536  # values in memory, least recently used dropped
    # where it is computed: by workers of a Ray cluster; null: in the training process
    place: Literal["ray"] | None = None
    workers: Annotated[int, Ge(1)] = (
        1  # with place: number of workers, shared by the training processes
    )
    worker_cpus: Annotated[float, Ge(0)] = 1.0  # with place: cores reserved for each
    worker_gpus: Annotated[float, Ge(0)] = 0.0  # with place: GPUs reserved for each

    def __post_init__(self) -> None:
        plain = (self.workers, self.worker_cpus, self.worker_gpus) == (1, 1.0, 0.0)
        if self.place is None and not plain:
            raise UserError(
                "workers, worker_cpus and worker_gpus are those of a reward elsewhere: add "
                "`place: ray`, or leave them out"
            )
        if self.place is not None and self.offload:
            raise UserError(
                "offload makes room on the policy's device, where a reward with place: ray never "
                "is: leave it out"
            )

    def of_worker(self) -> Handling:
        """Return the options that a remote worker handles; the rest stays with the caller."""
        return Handling(
            device=self.device,
            dtype=self.dtype,
            batch_size=self.batch_size,
            concurrency=self.concurrency,
        )

    def of_caller(self) -> Handling:
        """Return the options that the caller of a worker handles."""
        return Handling(timeout=self.timeout, cache=self.cache, cache_entries=self.cache_entries)
