"""Shared by image models on a transformers decoder: prefill, decoding, scoring and gradient
checkpointing."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.sharding import whole_blocks
from mmrl.policies.image_tokens.network import ImageNet, Inputs, widened
from mmrl.policies.vlm import caches


@dataclass
class State:
    """Holds the decoding state of B rows."""

    cache: Any
    mask: Tensor | None  # [B, S]; None: nothing is padded
    place: Tensor  # [B] position of the next token
    count: int = 0  # image tokens so far


class CausalImageNet(ImageNet):
    """Wraps an image model of transformers, whose decoder reads tokens from left to right."""

    def __init__(self, hf: Any):
        super().__init__()
        self.hf = hf
        # accelerate wraps these one by one
        self._no_split_modules = whole_blocks(hf)

    @property
    def config(self) -> Any:
        return self.hf.config

    @property
    @abstractmethod
    def decoder(self) -> Any: ...

    @property
    def layers(self) -> int:
        layers: int = self.config.text_config.num_hidden_layers
        return layers

    def begin(self, inputs: Inputs, rows: Tensor) -> tuple[Tensor, State]:
        return read(self.decoder, inputs, rows, self.layers)

    moves = True  # the state's position is that of the next token; False: of the end of the text

    def columns(self, count: int) -> int:
        """Return how many tokens the decoder reads for ``count`` of the image."""
        return count

    def extend(self, ids: Tensor, state: State) -> Tensor:
        state.count = len(self.turns) - 1
        return advance(self.decoder, ids[:, :-1], state, every=True)

    def back(self, state: State, rows: slice | Tensor, count: int, ids: Tensor) -> State:
        gone = self.columns(len(self.turns) - 1) - self.columns(count)
        length = state.cache.layers[0].length - gone
        mask = None if state.mask is None else state.mask[rows, : state.mask.shape[1] - gone]
        place = state.place[rows] - (gone if self.moves else 0)
        return State(caches.shortened(state.cache, rows, length), mask, place, count)

    def enable_gradient_checkpointing(self) -> None:
        caches.recompute(self.decoder)


def read(decoder: nn.Module, inputs: Inputs, rows: Tensor, layers: int) -> tuple[Tensor, State]:
    """Read the prompts of ``rows`` [B], each once; returns hidden states [B, 1, H] after them. Ids
    and mask are padded on the left."""
    cache = caches.recorded(layers)
    places = positions(inputs["mask"])
    hidden = decoder(
        input_ids=inputs["ids"],
        attention_mask=inputs["mask"],
        position_ids=places,
        **caches.cache_kwargs(cache),
    ).last_hidden_state[:, -1:]
    mask = None if bool(inputs["mask"].all()) else inputs["mask"][rows]
    return hidden[rows], State(
        caches.growing(caches.key_values(cache), rows), mask, places[rows, -1] + 1
    )


def advance(
    decoder: nn.Module,
    ids: Tensor,
    state: State,
    places: Tensor | None = None,
    every: bool = False,
) -> Tensor:
    """Return hidden states [B, 1, H] after the tokens ``ids`` [B, n], or [B / m, n] repeated m
    times; or [B, n, H] after each of them.

    ``places`` [3, B, n]: positions of the tokens, for families where ``state.place`` is the end of
    the text only.
    """
    ids, length = widened(ids, len(state.place)), ids.shape[1]
    state.mask = None if state.mask is None else F.pad(state.mask, (0, length), value=1)
    given_places = places is not None
    if not given_places:
        places = state.place[:, None] + ids.new_ones(ids.shape).cumsum(1) - 1
    hidden: Tensor = decoder(
        input_ids=ids,
        attention_mask=state.mask,
        position_ids=places,
        **caches.cache_kwargs(state.cache),
    ).last_hidden_state
    state.place = state.place if given_places else state.place + length
    return hidden if every else hidden[:, -1:]


def positions(mask: Tensor) -> Tensor:
    """Number the tokens [B, S], not counting the padding on the left."""
    return (mask.long().cumsum(1) - 1).clamp_min(0)


def padded(cond: list[Inputs], pad: int, least: int = 0) -> Inputs:
    """Join prompts to ids and mask [P, S], padded on the left to the longest, or to ``least``."""
    longest = max(least, *(prompt["ids"].shape[1] for prompt in cond))
    short = [longest - prompt["ids"].shape[1] for prompt in cond]
    ids = [F.pad(prompt["ids"], (n, 0), value=pad) for prompt, n in zip(cond, short)]
    mask = [
        F.pad(prompt["ids"].new_ones(prompt["ids"].shape), (n, 0)) for prompt, n in zip(cond, short)
    ]
    return {"ids": torch.cat(ids), "mask": torch.cat(mask)}
