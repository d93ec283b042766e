"""Lets optimizers that need whole weights step on shards (FSDP2): one weight after another is
gathered, stepped, and sharded again.

Optimizer state of the weight's shape stays sharded; the rest (rows and columns, the scales of
blocks) is small, and every process holds it. A step costs a gather of the weight, of its gradient
and of each such state, and for a moment the memory of one weight.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.sharding import extent, is_sharded, like


class WholeSteps(torch.optim.Optimizer):
    """Mixin that makes the optimizer after it in a class's bases step whole weights.

    It is for optimizers that step each weight by itself. Without shards it changes nothing.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step on every weight that has a gradient; a collective call on shards."""
        groups = self.param_groups
        state = self.state
        if not any(is_sharded(p) for group in groups for p in group["params"]):
            return super().step(closure)
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_whole(group, parameter, state[parameter])
        finally:
            self.param_groups = groups
            self.state = state
        return None

    def _step_whole(self, group: dict[str, Any], parameter: Tensor, kept: dict[str, Any]) -> None:
        """Step one weight, and put its shards and those of its state back in place."""
        whole = nn.Parameter(_gathered(parameter), requires_grad=True)
        whole.grad = _gathered(parameter.grad)
        gathered = {name: _gathered(value) for name, value in kept.items()}
        self.param_groups = [{**group, "params": [whole]}]
        self.state = defaultdict(dict, {whole: gathered} if gathered else {})
        super().step()
        _part(parameter).copy_(_cut(whole.detach(), parameter))
        for name, value in self.state[whole].items():
            of_its_shape = isinstance(value, Tensor) and value.shape == parameter.shape
            if of_its_shape and is_sharded(parameter):
                kept[name] = like(parameter, _cut(value, parameter).clone())
            else:
                kept[name] = value


def _gathered(value: Any) -> Any:
    """Return a sharded tensor as a whole, a copy of another tensor, anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.full_tensor() if is_sharded(value) else value.detach().clone()


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor.detach()


def _cut(whole: Tensor, like_this: Tensor) -> Tensor:
    """Return this process's shard of a whole tensor, sharded like the other one."""
    start, size = extent(like_this)
    return whole[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))]
