"""Trains a snapshot of the weights beside the policy, by an objective and an optimizer of its own:
the model of the student's samples in distribution matching."""

from __future__ import annotations

from dataclasses import replace

import torch

from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter, Stopwatch
from mmrl.core.types import Rollout
from mmrl.objectives.base import Critic
from mmrl.policies.base import Policy
from mmrl.train.batch import Batch
from mmrl.train.device import Device, MakeOptimizer
from mmrl.train.update import Update
from samplers.noise import Rng


class SnapshotUpdate:
    """Takes the optimizer steps of a snapshot. ``inner`` counts them and holds the optimizer."""

    def __init__(
        self,
        critic: Critic,
        policy: Policy,
        make: MakeOptimizer,
        options: TrainOptions,
        device: Device,
    ):
        if device.scales_loss:
            raise UserError(
                f"train.precision fp16: the snapshot {critic.snapshot} learns with an optimizer of "
                f"its own, and the loss scale is the policy's; use bf16"
            )
        self.critic = critic
        self.policy = policy
        optimizer = device.optimizer_of(policy, make)
        if critic.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = critic.lr
        # it keeps no average; a schedule over the policy's steps would end too early
        alike = replace(options, ema=None, lr_schedule="constant")
        self.inner = Update(policy, critic.objective, optimizer, alike, device, Stopwatch())

    def improve(self, batch: Batch, rollout: Rollout, rng: Rng, meter: Meter) -> None:
        """Take its steps on the rows of one step of the policy."""
        learnt = Meter()
        with self.policy.weights.using(self.critic.snapshot), learnt.alone():
            for number in range(self.critic.steps):
                key = rng.fold(self.critic.snapshot, number)
                self.inner.improve(batch, rollout, key, False, learnt)
        for name in ("error", "grad_norm"):
            total, count = learnt.sums.get(name, torch.zeros(2, dtype=torch.float64))
            meter.put(f"{self.critic.snapshot}/{name}", total, count)
