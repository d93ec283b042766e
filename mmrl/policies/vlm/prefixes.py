"""Holds prompts that have been read, for answers that continue them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmrl.policies.vlm import packing
from mmrl.policies.vlm.caches import KV, Memory
from mmrl.policies.vlm.cross_attention_caches import Sight
from mmrl.policies.vlm.states import State


@dataclass(frozen=True)
class Prefix:
    """Holds P prompts that have been read, with all that is needed to continue them."""

    hidden: Tensor  # [P, H] at the last token, from which the first answer token comes
    mask: Tensor  # [P, S] bool, False is padding (on the left)
    following: Tensor  # [P] long: position of the first answer token
    memory: Sequence[Memory]  # keys and values of every layer, its state or its images

    @property
    def key_values(self) -> list[KV]:
        """Return the keys and values of every layer, where all attend to tokens."""
        pairs = [layer for layer in self.memory if not isinstance(layer, (State, Sight))]
        if len(pairs) < len(self.memory):
            raise ValueError("a layer that keeps a state or pictures has no keys of tokens")
        return pairs

    def packed(self) -> packing.Read:
        """Return the prompts packed."""
        key_values = packing.squeeze(self.key_values, self.mask)
        return packing.Read(self.hidden, self.mask.sum(1), self.following, key_values)
