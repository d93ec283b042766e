"""Predicts the reward of a prompt by the policy's network and a head: Prompt Curriculum Learning
draws prompts by it, and A-LoL subtracts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from mmrl.core import distributed
from mmrl.core.numbers import Count, Natural, Positive
from mmrl.core.sharding import in_step, is_sharded, like
from mmrl.core.types import Prompt
from mmrl.core.weights import block, local
from mmrl.policies.base import Policy, unwrapped
from mmrl.policies.contracts import Replays
from samplers.batching import chunks
from samplers.noise import Rng

SNAPSHOT = "value"  # the weights of the value model's network
BETAS = (0.9, 0.999)  # of Adam
ROWS = 8  # prompts of a pass where the policy does not set it

Slots = dict[str, Tensor]  # by the name of a parameter


@dataclass
class ValueOptions:
    """Options of the value model, described in ``PromptValues``."""

    base: Literal["frozen", "trained"] = "frozen"
    width: Natural = 256
    start: float = 0.0
    lr: Positive = 1e-3
    base_lr: Positive = 1e-5
    steps: Count = 1


class ValueNetwork:
    """Predicts the mean reward of prompts: a head on the policy network's hidden states of them
    (``Replays.prompt_states``).

    The network's weights are a snapshot of the policy's initial ones, frozen or trained with the
    head; the policy's weights are never changed. ``predict``, ``of`` and ``learn`` are collective
    calls, and the weights are the same on all processes.
    """

    def __init__(self, policy: Policy, options: ValueOptions, seed: int):
        self.policy = Replays.of(policy)
        self.options = options
        self.rng = Rng.of(seed, "prompt_value")
        policy.weights.keep(SNAPSHOT)
        self.head: nn.Sequential | None = None  # made when the size of a state is known
        self.first: Slots = {}  # moving averages of Adam
        self.second: Slots = {}
        self.step = 0

    @torch.no_grad()
    def predict(self, prompts: Sequence[Prompt]) -> list[float]:
        """Predict the rewards of prompts, the same ones on all processes."""
        rank, size = distributed.world()
        share = -(-len(prompts) // size)
        values = self.of(prompts[rank * share : (rank + 1) * share], prompts[0])
        every: list[float] = distributed.all_gather_rows(values).tolist()
        return every

    @torch.no_grad()
    def of(self, prompts: Sequence[Prompt], idle: Prompt | None = None) -> Tensor:
        """Predict the rewards [n] float64 of this process's prompts; ``idle`` is the padding for
        passes in which it has none."""
        with self._in_force():
            parts = [self._values(part)[:count] for part, count in self._passes(prompts, idle)]
        return torch.cat(parts).double()

    def learn(
        self, prompts: Sequence[Prompt], rewards: Sequence[float], idle: Prompt | None = None
    ) -> float:
        """Take ``steps`` steps on the mean squared error over the prompts of all processes; return
        the error before the first. ``idle``: as of ``of``."""
        targets = torch.tensor(rewards, dtype=torch.float64, device=self.policy.device)
        total = float(distributed.all_sum(torch.tensor(float(len(prompts)), device=targets.device)))
        error = 0.0
        with torch.enable_grad(), self._in_force():
            for number in range(self.options.steps if total else 0):
                loss = self._accumulated(prompts, targets, total, idle)
                error = error if number else loss
        return error

    def state_dict(self) -> dict[str, Tensor]:
        """Return head, network and moving averages, sharded as the policy's weights are."""
        weights = self.policy.weights
        tensors = {f"weight/base/{name}": t for name, t in weights.stored(SNAPSHOT).items()}
        if self.head is None:
            return tensors
        tensors |= {f"weight/head/{n}": p.detach() for n, p in self.head.named_parameters()}
        sharded = {f"base/{name}": p for name, p in weights.parameters().items()}
        for slot, averages in (("first", self.first), ("second", self.second)):
            for name, average in averages.items():
                tensors[f"{slot}/{name}"] = like(sharded.get(name, average), average)
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor], step: int) -> None:
        weights = self.policy.weights
        base = weights.parameters()
        for name, p in base.items():
            stored = weights.saved[SNAPSHOT][name]
            stored.copy_(block(tensors, f"weight/base/{name}", p))
        self.step = step
        heads = {name.removeprefix("weight/head/") for name in tensors if "weight/head/" in name}
        if heads:
            head = self._head(tensors["weight/head/0.weight"].shape[1])
            head.load_state_dict({name: tensors[f"weight/head/{name}"] for name in heads})
        for slot, averages in (("first", self.first), ("second", self.second)):
            averages.clear()
            for name in (key.partition("/")[2] for key in tensors if key.startswith(f"{slot}/")):
                key = f"{slot}/{name}"
                like_p = base.get(name.removeprefix("base/"))
                part = tensors[key] if like_p is None else block(tensors, key, like_p)
                averages[name] = part.to(self.policy.device, copy=True)

    def _head(self, size: int) -> nn.Sequential:
        """Return the head, initialised from the seed; its last layer starts at 0, so all prompts
        have the value ``start``."""
        if self.head is None:
            width = self.options.width
            sizes = [size, width, 1] if width else [size, 1]
            layers: list[nn.Module] = []
            for number, (before, after) in enumerate(zip(sizes, sizes[1:], strict=False)):
                layer = nn.Linear(before, after, device=self.policy.device, dtype=self.policy.dtype)
                noise = self.rng.fold(number).normal(torch.arange(after), (before,))
                scale = 0.0 if after == 1 else before**-0.5
                with torch.no_grad():
                    layer.weight.copy_(noise.to(layer.weight) * scale)
                    layer.bias.fill_(self.options.start if after == 1 else 0.0)
                layers += [layer, nn.GELU()]
            self.head = nn.Sequential(*layers[:-1])
        return self.head

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        """Swap in the value model's weights, for passes that bypass the trainer's wrapper."""
        with unwrapped(self.policy), self.policy.weights.using(SNAPSHOT):
            yield

    def _passes(
        self, prompts: Sequence[Prompt], idle: Prompt | None = None
    ) -> Iterator[tuple[Sequence[Prompt], int]]:
        """Yield the prompts of each pass and how many of them count; every process makes equally
        many."""
        rows = self.policy.pass_sizes.rows or ROWS
        parts = (prompts[part] for part in chunks(len(prompts), rows))
        filler = prompts[:1] if idle is None else [idle]
        for part, counts in in_step(parts, filler, self.policy.device):
            yield part, len(part) if counts else 0

    def _values(self, prompts: Sequence[Prompt]) -> Tensor:
        """Predict the rewards [n] of prompts under the active weights."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.options.base == "trained"):
            states = self.policy.prompt_states(list(prompts)).to(self.policy.dtype)
        # large states are scaled to unit size; small ones, such as labels, stay as they are
        states = states / (states.square().mean(-1, keepdim=True) + 1).sqrt()
        values: Tensor = self._head(states.shape[-1])(states)[:, 0]
        return values

    def _accumulated(
        self, prompts: Sequence[Prompt], targets: Tensor, total: float, idle: Prompt | None
    ) -> float:
        """Take one step on the gradient of all passes; return the mean squared error."""
        gradients: Slots = {}
        error = torch.zeros((), dtype=torch.float64, device=targets.device)
        start = 0
        for part, count in self._passes(prompts, idle):
            values = self._values(part)
            gaps = values[:count] - targets[start : start + count].to(values)
            start += count
            loss = gaps.square().sum() / total + 0 * values.sum()
            error += loss.detach().double()
            for name, gradient in self._gradients(loss).items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        self._adam(gradients)
        return float(distributed.all_sum(error))

    def _trained(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Return the parameters of the head and those of the network that are trained, by name."""
        assert self.head is not None
        head = {f"head/{name}": p for name, p in self.head.named_parameters()}
        if self.options.base == "frozen":
            return head, {}
        base = {f"base/{name}": p for name, p in self.policy.weights.parameters().items()}
        return head, base

    def _gradients(self, loss: Tensor) -> Slots:
        """Return the gradients of a pass, summed over processes; those of the network bypass the
        hooks that wrappers put on its parameters."""
        head, base = self._trained()
        size = distributed.world()[1]
        if any(is_sharded(p) for p in base.values()):
            (loss * size).backward()  # FSDP2 takes the mean over processes
            gradients = {name: local(p.grad) for name, p in base.items() if p.grad is not None}
            for p in base.values():
                p.grad = None
            for name, p in head.items():
                assert p.grad is not None
                gradients[name] = distributed.all_sum(p.grad / size)
                p.grad = None
            return gradients
        parameters = head | base
        every = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        known = zip(parameters.items(), every, strict=True)
        return {
            name: distributed.all_sum(torch.zeros_like(p) if gradient is None else gradient)
            for (name, p), gradient in known
        }

    @torch.no_grad()
    def _adam(self, gradients: Slots) -> None:
        """Take a step of Adam (Kingma and Ba 2015), with a rate for the head and one for the
        network."""
        self.step += 1
        head, base = self._trained()
        for name, p in (head | base).items():
            if name not in gradients:
                continue
            rate = self.options.base_lr if name in base else self.options.lr
            gradient = gradients[name]
            first = self.first.setdefault(name, torch.zeros_like(gradient))
            second = self.second.setdefault(name, torch.zeros_like(gradient))
            first.lerp_(gradient, 1 - BETAS[0])
            second.lerp_(gradient.square(), 1 - BETAS[1])
            mean = first / (1 - BETAS[0] ** self.step)
            spread = (second / (1 - BETAS[1] ** self.step)).sqrt()
            local(p).sub_(rate * mean / (spread + 1e-8))
