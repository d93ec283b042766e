"""Holds prompts that have been read, for the answers that continue them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.core.host import sent
from mmrl.policies.vlm import packing
from mmrl.policies.vlm.caches import KV, Memory
from mmrl.policies.vlm.cpu_attention import Kept
from mmrl.policies.vlm.sights import Sight
from mmrl.policies.vlm.states import State


@dataclass(frozen=True)
class Prefix:
    """Holds P prompts that have been read: all that is needed to continue them."""

    hidden: Tensor  # [P, H] at the last token, from which the first answer token comes
    mask: Tensor  # [P, S] bool, False is padding (on the left)
    following: Tensor  # [P] long: position of the first answer token
    memory: Sequence[Memory]  # keys and values of every layer, its state or its pictures

    @property
    def key_values(self) -> list[KV]:
        """Return the keys and values of every layer, where all attend to tokens."""
        pairs = [layer for layer in self.memory if not isinstance(layer, (State, Sight))]
        if len(pairs) < len(self.memory):
            raise ValueError("a layer that keeps a state or pictures has no keys of tokens")
        return pairs

    @property
    def tensors(self) -> list[Tensor]:
        """Return what gradients go back through."""
        return [self.hidden, *(tensor for pair in self.key_values for tensor in pair)]

    def packed(self) -> packing.Read:
        """Return the prompts with their tokens one after another."""
        key_values = packing.squeeze(self.key_values, self.mask)
        return packing.Read(self.hidden, self.mask.sum(1), self.following, key_values)

    def detached(self) -> Prefix:
        """Return the prompts without their graph."""
        pairs = [(k.detach(), v.detach()) for k, v in self.key_values]
        return replace(self, hidden=self.hidden.detach(), memory=pairs)

    def leaves(self) -> Prefix:
        """Return the prompts as leaves of graphs to come, where they have a graph."""
        leaves = self.detached()
        for leaf, tensor in zip(leaves.tensors, self.tensors, strict=True):
            leaf.requires_grad_(tensor.requires_grad)
        return leaves

    def chosen(self, prompts: list[int], width: int) -> Prefix:
        """Return some of the prompts, filled up on the left to ``width`` columns."""
        padding = width - self.mask.shape[1]
        if prompts == list(range(len(self.mask))) and not padding:
            return self
        at = sent(torch.tensor(prompts), self.mask.device)
        return Prefix(
            self.hidden.index_select(0, at),
            F.pad(self.mask[at], (padding, 0)),
            self.following[at],
            [
                (F.pad(k.index_select(0, at), wide), F.pad(v.index_select(0, at), wide))
                for wide in [(0, 0, padding, 0)]
                for k, v in self.key_values
            ],
        )

    @staticmethod
    def joined(parts: Sequence[Prefix]) -> Prefix:
        """Join prompts of as many columns."""
        layers = zip(*(part.key_values for part in parts), strict=True)
        return Prefix(
            torch.cat([part.hidden for part in parts]),
            torch.cat([part.mask for part in parts]),
            torch.cat([part.following for part in parts]),
            [
                (torch.cat([k for k, _ in pairs]), torch.cat([v for _, v in pairs]))
                for pairs in layers
            ],
        )


@dataclass(frozen=True)
class Known:
    """Holds what sampling computed of B answers, for a pass that scores them."""

    prefix: Prefix  # of their prompts
    rows: Tensor  # [B] long: the prompt of each
    store: Kept | None = None  # what they attended to
