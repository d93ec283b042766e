"""Shares what policies of two tasks need: which rows draw, their decisions, results in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.sharding import sharded
from mmrl.core.types import Prompt, Rollout
from mmrl.zoo.models.unified.prompts import task_of


def drawing(prompts: list[Prompt]) -> list[bool]:
    """Tell of each prompt whether it is drawn; the others are answered."""
    return [task_of(prompt) == "generate" for prompt in prompts]


def columns(x: Tensor, part: slice) -> Tensor:
    """Take these decisions of x, [B, 1 or K, *]."""
    return x if x.shape[1] == 1 else x[:, part]


def in_order(
    draws: Iterable[bool], images: Iterable[Tensor], text: Callable[[int], Any]
) -> list[Any]:
    """List what rows came to: the next of ``images`` for those that draw, ``text`` of their number
    for the others."""
    pictures = iter(images)
    return [next(pictures) if drawn else text(i) for i, drawn in enumerate(draws)]


def in_places(samples: Sequence[Rollout], places: Sequence[Tensor]) -> Rollout:
    """Join samples of the two kinds to one rollout, each row in its place."""
    return Rollout.cat(list(samples))[torch.cat(list(places)).argsort()]


def check_shards(net: nn.Module, writes: bool, draws: bool, device: torch.device) -> None:
    """Raise UserError where a batch with both kinds of passes meets sharded weights: processes
    would make unlike passes, and wait for each other forever. A collective call then."""
    if not sharded(net):
        return
    kinds = torch.tensor([writes, draws], dtype=torch.float32, device=device)
    if bool(distributed.all_max(kinds).all()):
        raise UserError(
            "a batch that both writes and draws needs whole weights on every process, not shards: "
            "launch copies (--multi_gpu), or train prompts of one task"
        )
