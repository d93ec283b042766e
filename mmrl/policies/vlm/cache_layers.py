"""Holds keys and values of one layer of a transformers model; imported late, since transformers is
heavy to import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

KV = tuple[Tensor, Tensor]  # keys and values of one layer, [B, heads, S, D] each
ROOM = 32  # steps a growing cache reserves at once


class Recorded(DynamicLayer):
    """Records a prompt: keeps what is computed first, and returns the same when it is recomputed
    for the gradient."""

    keys: Tensor | None
    values: Tensor | None

    def get_seq_length(self) -> int:
        return 0  # nothing stands before a prompt

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> KV:
        if self.keys is None:
            self.keys = key_states
            self.values = value_states
        return key_states, value_states


class Continued(DynamicLayer):
    """Continues prompts with answers scored in one pass: nothing is kept, so the pass can be
    repeated for the gradient."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor):
        super().__init__()
        self.keys = keys
        self.values = values
        self.is_initialized = True
        self.length: int = keys.shape[-2]  # tokens that are written already

    def get_seq_length(self) -> int:
        return self.length

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> KV:
        return torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)


class Growing(Continued):
    """Grows with sampled answers: written in place, with room for steps to come."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> KV:
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self.keys, self.values = (
                _roomy(x, self.length, end + max(ROOM, end // 4)) for x in self.kv()
            )
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = (
            key_states,
            value_states,
        )
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def kv(self) -> KV:
        return self.keys, self.values


def _roomy(x: Tensor, length: int, room: int) -> Tensor:
    wide = x.new_empty(*x.shape[:2], room, x.shape[-1])
    wide[:, :, :length] = x[:, :, :length]
    return wide
