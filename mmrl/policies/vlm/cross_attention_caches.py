"""Builds caches for cross-attention layers, which attend to images only (Mllama): their keys and
values are those of a prompt's images, copied by row, and no token adds to them.

An answer attends to what the last token of its prompt attends to, as in transformers' own
``generate``. A prompt without images skips these layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

CROSS_ATTENTION = ("mllama_text_model",)  # some layers of these attend to images only
# inputs of their vision towers
PICTURES = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")


@dataclass(frozen=True)
class Sight:
    """Holds the images of B prompts as one layer sees them; nothing for prompts without any."""

    keys: Tensor | None = None  # [B, heads, V, D]
    values: Tensor | None = None
    mask: Tensor | None = None  # [B, images, tiles]: what answers attend to; None: everything

    def rows(self, rows: Tensor) -> Sight:
        """Copy the images of these rows."""
        return self._map(lambda x: x.index_select(0, rows))

    def beside(self, other: Sight) -> Sight:
        """Append other rows, with as many images each."""
        columns = iter(x for x in (other.keys, other.values, other.mask) if x is not None)
        return self._map(lambda x: torch.cat([x, next(columns)]))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Sight:
        columns = (self.keys, self.values, self.mask)
        return Sight(*(None if x is None else change(x) for x in columns))


class Seen:
    """Records the images of prompts, and provides them to answers, with the interface of a
    transformers cache."""

    keys: Tensor | None
    values: Tensor | None
    is_initialized: bool
    mask: Tensor | None = None

    @property
    def state(self) -> Sight:
        return Sight(self.keys, self.values, self.mask)

    @state.setter
    def state(self, sight: Sight) -> None:
        self.keys = sight.keys
        self.values = sight.values
        self.mask = sight.mask
        self.is_initialized = sight.keys is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if self.keys is None:  # else a prompt that is recomputed for the gradient
            self.keys = key_states
            self.values = value_states
        return key_states, value_states


def layer(sight: Sight | None = None) -> Any:
    """Make a transformers cache layer that provides the images of prompts, or records them."""
    fresh = _layer()()
    if sight is not None:
        fresh.state = sight
    return fresh


def layers_of(config: Any) -> frozenset[int]:
    """Return the indices of a text model's cross-attention layers."""
    if config.model_type not in CROSS_ATTENTION:
        return frozenset()
    return frozenset(config.cross_attention_layers)


def looking(memory: Sequence[Any], crossed: Tensor | None) -> list[Any]:
    """Set in the layers' caches what answers attend to, for prompts whose tokens attend to
    ``crossed`` [P, S, images, tiles]."""
    if crossed is None:
        return list(memory)
    return [replace(x, mask=crossed[:, -1]) if isinstance(x, Sight) else x for x in memory]


def looked_at(cached: Any, length: int) -> dict[str, Tensor]:
    """Return the extra inputs of a pass of answers of ``length`` tokens after a cache: their
    cross-attention mask [B, S + length, images, tiles], with a row for each of the S cached tokens
    too, which transformers 5.17 needs and later releases cut off."""
    for layer in getattr(cached, "layers", ()):  # caches of compiled graphs have none
        if isinstance(layer, Seen) and layer.mask is not None:
            whole = int(cached.get_seq_length()) + length
            return {"cross_attention_mask": layer.mask[:, None].expand(-1, whole, -1, -1)}
    return {}


def skip_cross_attention_without_images(hf: Any) -> None:
    """Let cross-attention layers change no token of prompts without images, where they are called
    for a (zero) gradient, or because other processes call them."""
    for number in layers_of(hf.config.get_text_config()):
        hf.base_model.language_model.layers[number].register_forward_hook(_unseen, with_kwargs=True)


def _unseen(_: Any, arguments: tuple[Tensor], inputs: dict[str, Any], output: Tensor) -> Tensor:
    """Return a layer's input unchanged where it got no cross-attention mask."""
    if inputs.get("cross_attention_mask") is not None:
        return output
    return arguments[0] + 0 * output


def unseen(hf: Any, picture: dict[str, Tensor], prompts: int) -> dict[str, Tensor]:
    """Return what a pass of that many prompts without images takes so that tower, projector and
    cross-attention layers take part: one feature of ``picture``."""
    base = hf.base_model
    features = base.multi_modal_projector(base.vision_model(**picture).last_hidden_state)
    first = features.flatten(0, -2)[:1]
    return {"cross_attention_states": first.expand(prompts, 1, -1)}


@cache
def _layer() -> Any:
    """Make the class above a layer of transformers' caches; inside a function since transformers is
    heavy to import."""
    from transformers.cache_utils import DynamicLayer

    return type(Seen.__name__, (Seen, DynamicLayer), {})
