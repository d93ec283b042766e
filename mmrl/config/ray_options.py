"""Defines the ``ray`` section of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Share = Annotated[float, Ge(0)]


@dataclass(frozen=True)
class RayOptions:
    """Holds the options of ``ray``: what ``mmrl train --engine ray`` places on a cluster. The
    workers of a reward are set beside it (``place: ray``)."""

    # of a running cluster, host:port; null: RAY_ADDRESS, else one of this machine alone is begun
    address: str | None = None
    trainers: Count = 1  # processes that train together, as torchrun would start them
    # copies of the model (ddp), or a part of it in each trainer (fsdp2), as accelerate makes them
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    cpus_per_trainer: Share = 1
    gpus_per_trainer: Share = 0
    rollout_workers: Natural = 0  # processes that only sample; 0: the trainers sample
    cpus_per_rollout_worker: Share = 1
    gpus_per_rollout_worker: Share = 0
    # updates that the weights which sample may be behind those that are trained; 0: none
    staleness: Natural = 0
    max_restarts: Natural = 3  # of the run, from its last checkpoint, when a trainer is lost
    timeout: Annotated[float, Gt(0)] = 60.0  # seconds to wait for a cluster, a place or a worker
