"""Measures how well a run uses its devices: samples and tokens a second, shares of an iteration,
and model FLOPs utilization (MFU)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mmrl.core.cards import Card, card_of
from mmrl.policies.contracts import Compiles
from mmrl.train.trainer import Trainer

# phase -> the names that its seconds are logged under; what an engine's copy of the weights takes
PHASES = {
    "rollout": ("time/rollout", "time/demonstrate"),
    "reward": ("time/reward",),
    "sync": ("time/sync",),
    "update": ("time/update", "time/old_log_prob"),
}


class ThroughputMeter:
    """Counts the FLOPs of a run's first iteration, and scales them for later ones by the rows
    through the network. For cards that are not in the table nothing is counted."""

    def __init__(self, card: Card | None = None):
        known = torch.cuda.is_available()
        self.card = card or (card_of(torch.cuda.get_device_name()) if known else None)
        self.flops_per_forward: float | None = None

    def iterate(self, trainer: Trainer) -> dict[str, float]:
        """Run an iteration; the first one under torch's FLOP counter."""
        counter: Any = None
        counting: AbstractContextManager[Any] = nullcontext()
        # the counter would break its graphs
        compiled = isinstance(trainer.policy, Compiles) and trainer.policy.compiled
        if self.card is not None and self.flops_per_forward is None and not compiled:
            from torch.utils.flop_counter import FlopCounterMode

            counting = counter = FlopCounterMode(display=False)
        with counting:
            metrics = trainer.iterate()
        if counter is not None and metrics.get("forwards"):
            self.flops_per_forward = counter.get_total_flops() / metrics["forwards"]
        return metrics

    def rates(self, metrics: Mapping[str, float], trainer: Trainer) -> dict[str, float]:
        """Return the rates of an iteration, each of one device."""
        seconds = metrics["seconds"]
        if not seconds > 0:
            return {}
        rows = trainer.plan.rows_per_process
        rates = {"throughput/samples": rows / seconds}
        length = metrics.get("answer/tokens")
        if length is not None:
            rates["throughput/tokens"] = rows * length / seconds
        for phase, names in PHASES.items():
            spent = [metrics[name] for name in names if name in metrics]
            if spent:
                rates[f"share/{phase}"] = sum(spent) / seconds
        if self.card is not None and self.flops_per_forward is not None:
            flops = self.flops_per_forward * metrics.get("forwards", 0.0)
            rates["throughput/mfu"] = flops / seconds / self.card.half
        return rates
