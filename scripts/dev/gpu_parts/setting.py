"""Holds what the parts of gpu_check.py share: sizes, repetitions, remaining time."""

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
SHARE = 0.6  # share of a part's seconds after which nothing is repeated


class NotInstalled(Exception):
    """Signals that a part lacks a package, which is not a failure."""


@dataclass
class Setting:
    """Holds the options of one part. seconds: its time limit."""

    scale: models.Scale
    out: Path
    small: bool = False
    repeats: int = 3
    seconds: float = 600.0
    start: float = field(default_factory=time.perf_counter, init=False)

    def times(self, work: Callable[[], Any]) -> list[float]:
        """Measure the seconds of ``work``, once and then as often as requested and time allows."""
        seconds = [measuring.seconds(work)]
        while len(seconds) < self.repeats and self.has_time():
            seconds.append(measuring.seconds(work))
        return seconds

    def has_time(self) -> bool:
        """Tell whether there is time for another measurement."""
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
    """Build mmrl's trainer for this work, with a reward that needs no model."""
    return bench.mmrl_trainer(policy, work, bench.brightness)


def peak_of(work: Callable[[], Any]) -> int:
    """Run ``work`` once; return the peak bytes on the device, for a CPU those allocated."""
    if not torch.cuda.is_available():
        return measuring.peak_bytes(work)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def free() -> None:
    """Free unreferenced memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its name if it has none."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
