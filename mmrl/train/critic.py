"""Trains a snapshot of the weights along with the policy, with its own objective and optimizer: in
distribution matching, the model of the student's samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter, Stopwatch
from mmrl.core.types import Rollout
from mmrl.objectives.base import Critic, Head
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
        if critic.head is not None and device.sharded:
            raise UserError(
                "objective.dmd.gan: the discriminator reads hidden states between layers whose "
                "weights FSDP2 gathers and frees; launch copies, or leave it out"
            )
        kind: Callable[..., Update] = Update
        if critic.head is not None:
            kind = partial(HeadedUpdate, head=critic.head, make=make)
        self.inner = kind(policy, critic.objective, optimizer, alike, device, Stopwatch())

    def improve(self, batch: Batch, rollout: Rollout, rng: Rng, meter: Meter) -> None:
        """Take the snapshot's steps on the rows of one step of the policy."""
        learnt = Meter()
        if isinstance(self.inner, HeadedUpdate):
            self.inner.prepare(batch, rng)
        with self.policy.weights.using(self.critic.snapshot), learnt.alone():
            for number in range(self.critic.steps):
                key = rng.fold(self.critic.snapshot, number)
                self.inner.improve(batch, rollout, key, False, learnt)
        names = ("error", "grad_norm", *(("gan", "gan_right") if self.critic.head else ()))
        for name in names:
            total, count = learnt.sums.get(name, torch.zeros(2, dtype=torch.float64))
            meter.put(f"{self.critic.snapshot}/{name}", total, count)

    def head_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state of the head and its optimizer: tensors, and the rest as plain data."""
        assert isinstance(self.inner, HeadedUpdate)
        return self.inner.head_state()

    def load_head_state(self, tensors: Mapping[str, Tensor], plain: dict[str, Any]) -> None:
        """Restore what ``head_state`` returned."""
        assert isinstance(self.inner, HeadedUpdate)
        self.inner.load_head_state(tensors, plain)


class HeadedUpdate(Update):
    """Takes the optimizer steps of a snapshot and of its head, which has its own optimizer with the
    snapshot's learning rate."""

    def __init__(self, *of_update: Any, head: Head, make: MakeOptimizer):
        super().__init__(*of_update)
        self.head = head
        self.make = make
        self.of_head: torch.optim.Optimizer | None = None  # created with the head's weights

    def prepare(self, batch: Batch, rng: Rng) -> None:
        """Create the head's weights before its first step."""
        if self.of_head is None:
            self.head.measure(self.policy, self.passes.idle(batch, rng))
            self._make()

    def _make(self) -> None:
        self.of_head = self.make(list(self.head.module.parameters()))

    def _accumulate(self, *arguments: Any, **named: Any) -> None:
        assert self.of_head is not None
        self.of_head.zero_grad()  # also of an attempt that had too little memory
        super()._accumulate(*arguments, **named)

    def _descend(self, meter: Meter) -> bool:
        assert self.of_head is not None
        parameters = list(self.head.module.parameters())
        self.device.average_gradients(parameters)
        finite = super()._descend(meter)
        limit = self.options.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        for group in self.of_head.param_groups:
            group["lr"] = self.optimizer.param_groups[0]["lr"]
        if finite and bool(norm.isfinite()):
            self.of_head.step()
        self.of_head.zero_grad()
        return finite

    def head_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"weight/{name}": x for name, x in self.head.module.state_dict().items()}
        if self.of_head is None:
            return {}, {}
        state = self.of_head.state_dict()
        plain: dict[str, Any] = {"groups": state["param_groups"], "values": {}}
        for number, slots in state["state"].items():
            for slot, value in slots.items():
                key = f"{number}/{slot}"
                if isinstance(value, Tensor):
                    tensors[f"state/{key}"] = value
                else:
                    plain["values"][key] = value
        return tensors, plain

    def load_head_state(self, tensors: Mapping[str, Tensor], plain: dict[str, Any]) -> None:
        weights = {k.removeprefix("weight/"): tensors[k] for k in tensors if k[:7] == "weight/"}
        if not weights:
            return
        self.head.restore(self.policy, weights)
        self._make()
        assert self.of_head is not None
        slots = {k.removeprefix("state/"): tensors[k] for k in tensors if k[:6] == "state/"}
        state: dict[int, dict[str, Any]] = {}
        for key, value in {**slots, **plain["values"]}.items():
            number, _, slot = key.partition("/")
            state.setdefault(int(number), {})[slot] = value
        self.of_head.load_state_dict({"state": state, "param_groups": plain["groups"]})
