"""Builds cache layers for transformers' layers that keep a state instead of keys and values, such
as gated delta nets and short convolutions: many rows continue the state of one prompt.

A state is as large after one token as after a thousand, so it is copied by row where keys and
values would be shared. A state cannot be rolled back to an earlier token, so nothing here is
shortened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Named = dict[int, Tensor]  # states of one layer by their number


@dataclass(frozen=True)
class State:
    """Holds a layer's state for B rows: the last columns [B, channels, K] that its convolutions
    read, and its recurrent states [B, *]."""

    conv: Named
    recurrent: Named

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        return State(
            {i: change(x) for i, x in self.conv.items()},
            {i: change(x) for i, x in self.recurrent.items()},
        )

    def rows(self, rows: Tensor) -> State:
        """Copy the states of these rows."""
        return self.map(lambda x: x.index_select(0, rows))

    def beside(self, other: State) -> State:
        """Append other rows."""
        return State(
            {i: torch.cat([x, other.conv[i]]) for i, x in self.conv.items()},
            {i: torch.cat([x, other.recurrent[i]]) for i, x in self.recurrent.items()},
        )


class Kept:
    """Holds a state with the methods that transformers' layers call; subclasses define what an
    update changes."""

    conv_states: dict[int, Tensor | None]
    recurrent_states: dict[int, Tensor | None]
    has_previous_state: dict[int, bool]

    @property
    def state(self) -> State:
        return State(_present(self.conv_states), _present(self.recurrent_states))

    @state.setter
    def state(self, state: State) -> None:
        self.conv_states = {**self.conv_states, **state.conv}
        self.recurrent_states = {**self.recurrent_states, **state.recurrent}
        self.has_previous_state = dict.fromkeys(self.has_previous_state, True)


class RecordedState(Kept):
    """Records a prompt: keeps the states that are computed first, and starts again when the prompt
    is recomputed for the gradient."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        columns = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        if self.conv_states[state_idx] is None:
            self.conv_states[state_idx] = columns[..., -size:]
        return columns

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: Any
    ) -> Tensor:
        if self.recurrent_states[state_idx] is None:
            self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class ContinuedState(Kept):
    """Continues prompts with answers scored in one pass: nothing changes, so gradient checkpointing
    can repeat the pass."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        before = self.conv_states[state_idx]
        assert before is not None
        return torch.cat([before, conv_states], -1)

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: Any
    ) -> Tensor:
        return recurrent_states


class GrowingState(ContinuedState):
    """Follows sampled answers token by token."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        before = self.conv_states[state_idx]
        columns = super().update_conv_state(conv_states, state_idx)
        assert before is not None
        self.conv_states[state_idx] = columns[..., -before.shape[-1] :]
        return columns

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


def layer(behaviour: type, state: State | None = None) -> Any:
    """Make a layer of transformers' caches that behaves so, with a state or none yet."""
    fresh = _layer(behaviour)()
    if state is not None:
        fresh.state = state
    return fresh


def keeps_state(kind: type) -> bool:
    """Tell whether a layer of transformers' own caches keeps states and nothing else."""
    from transformers.cache_utils import LinearAttentionLayer

    return kind is LinearAttentionLayer


@cache
def _layer(behaviour: type) -> Any:
    """Make one of the classes above a layer of transformers' caches; inside a function since
    transformers is heavy to import."""
    from transformers.cache_utils import LinearAttentionLayer

    return type(behaviour.__name__, (behaviour, LinearAttentionLayer), {})


def _present(states: dict[int, Tensor | None]) -> Named:
    return {i: x for i, x in states.items() if x is not None}
