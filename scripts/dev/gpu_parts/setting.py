"""Holds what the parts of gpu_check.py share: sizes, how often to repeat, how much time is left."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_iteration as bench
import measuring
import random_models as models
import torch

from mmrl.train.trainer import Trainer

Report = dict[str, Any]
SHARE = 0.6  # of a part's seconds after which nothing is repeated


class NotInstalled(Exception):
    """Says that a part lacks a package, which is no failure."""


@dataclass
class Setting:
    """Holds the options of one part. seconds: that it may take in all."""

    scale: models.Scale
    out: Path
    small: bool = False
    repeats: int = 3
    seconds: float = 600.0
    start: float = field(default_factory=time.perf_counter, init=False)

    def times(self, work: Callable[[], Any]) -> list[float]:
        """Measure the seconds of ``work``, once and then as often as was asked and time allows."""
        seconds = [measuring.seconds(work)]
        while len(seconds) < self.repeats and self.has_time():
            seconds.append(measuring.seconds(work))
        return seconds

    def has_time(self) -> bool:
        """Tell whether there is time to measure one thing more."""
        return time.perf_counter() - self.start < SHARE * self.seconds

    def work(self, rows: int = 8, **options: Any) -> bench.Work:
        """Describe two prompts, one optimizer step, passes of ``rows``."""
        copies = options.pop("copies", self.scale.copies)
        size = min(rows, 2 * copies)
        plain = {
            "prompts": 2,
            "copies": copies,
            "updates": 1,
            "plain_rows": size,
            "micro_batch": size,
            "precision": "bf16",
        }
        return bench.Work(**plain | options)


def trainer_of(policy: Any, work: bench.Work) -> Trainer:
    """Make a trainer of mmrl's for this work, by the reward that needs no model."""
    return bench.mmrl_trainer(policy, work, bench.brightness)


def peak_of(work: Callable[[], Any]) -> int:
    """Run ``work`` once; return the most bytes on the device, of a CPU those that were made."""
    if not torch.cuda.is_available():
        return measuring.peak_bytes(work)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def free() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its name where it says nothing."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
