"""Defines the sections of a configuration that are plain options: log, alarms, ray; ``train`` and
``evaluate`` are in ``mmrl.config.options``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from mmrl.config.options import EvaluateOptions, TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.numbers import Count, Natural, Share

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]


@dataclass(frozen=True)
class LogOptions:
    """Holds ``log:`` of a configuration. ``metrics.jsonl`` always has every iteration."""

    tensorboard: bool = True  # event files in the run folder
    wandb: bool = False  # short for report_to: [wandb]
    report_to: Sequence[Tracker] = ()  # trackers of the run
    # tracker -> arguments of its own init
    init_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)
    project: str = "mmrl"  # project (MLflow: experiment) in the trackers
    every: Annotated[int, Ge(1)] = 1  # iterations between points in the trackers
    # iterations between texts kept for the report; 0: none
    rollouts: Annotated[int, Ge(0)] = 10

    def __post_init__(self) -> None:
        if unused := sorted(set(self.init_kwargs) - set(self.trackers())):
            raise UserError(
                f"log.init_kwargs: {', '.join(unused)} is not in log.report_to, which names the "
                f"trackers of a run"
            )

    def trackers(self) -> list[str]:
        """Return the trackers of a run; ``tensorboard`` and ``wandb`` are shorthands for two of
        them."""
        switches = {"tensorboard": self.tensorboard, "wandb": self.wandb}
        return list(dict.fromkeys([n for n, on in switches.items() if on] + [*self.report_to]))


@dataclass(frozen=True)
class AlarmOptions:
    """Holds ``alarms:`` of a configuration. An alarm is an event and a line on the terminal; it has
    no effect, unless ``stop`` ends a run that cannot learn."""

    enabled: bool = True  # watch the run at all
    # iterations in a row with nothing to learn from, after which there is an alarm
    patience: Annotated[int, Ge(1)] = 2
    stop: bool = False  # that alarm ends the run, saved, with exit status 3
    # window of the trend tests in iterations; also 4 and 16 times as many
    window: Annotated[int, Ge(20)] = 40
    z: Annotated[float, Gt(0)] = 5.0  # standard errors of a significant trend
    # share of the first diversity below which there is an alarm
    diversity: Annotated[float, Gt(0), Lt(1)] = 0.5
    contrast: Annotated[float, Gt(0), Lt(1)] = 0.5  # the same of the first contrast
    # rise of the share of clipped pixel values since the start
    clipped: Annotated[float, Gt(0), Lt(1)] = 0.2
    # rise or fall of the share of dark pixels since the start
    dark: Annotated[float, Gt(0), Lt(1)] = 0.3
    # share of the first colour below which there is an alarm; also above its inverse
    colour: Annotated[float, Gt(0), Lt(1)] = 0.5
    edges: Annotated[float, Gt(0), Lt(1)] = 0.5  # the same of the first edges
    # share of the first entropy of colours below which there is an alarm
    colour_entropy: Annotated[float, Gt(0), Lt(1)] = 0.6


@dataclass(frozen=True)
class RayOptions:
    """Holds the options of ``ray``: what ``mmrl train --engine ray`` places on a cluster. The
    workers of a reward are set in its options (``place: ray``)."""

    # of a running cluster, host:port; null: RAY_ADDRESS, else one of this machine alone is begun
    address: str | None = None
    trainers: Count = 1  # processes that train together, as torchrun would start them
    # copies of the model (ddp), or a part of it in each trainer (fsdp2), as accelerate makes them
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    cpus_per_trainer: Share = 1  # cores that each reserves
    gpus_per_trainer: Share = 0  # GPUs that each reserves
    rollout_workers: Natural = 0  # processes that only sample; 0: the trainers sample
    cpus_per_rollout_worker: Share = 1  # cores that each reserves
    gpus_per_rollout_worker: Share = 0  # GPUs that each reserves
    # updates that the weights which sample may be behind those that are trained; 0: none
    staleness: Natural = 0
    max_restarts: Natural = 3  # of the run, from its last checkpoint, when a trainer is lost
    timeout: Annotated[float, Gt(0)] = 60.0  # seconds to wait for a cluster, a place or a worker


SECTIONS = {
    "train": TrainOptions,
    "evaluate": EvaluateOptions,
    "log": LogOptions,
    "alarms": AlarmOptions,
    "ray": RayOptions,
}
