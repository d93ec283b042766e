"""Builds cache layers for layers that attend to pictures and to nothing else (Mllama): their keys
and values are those of a prompt's pictures, copied by row, and no token adds to them.

What an answer looks at is what the last token of its prompt looks at, as in transformers' own
``generate``. A prompt without pictures passes these layers by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

CROSS_ATTENTION = ("mllama_text_model",)  # some layers of these attend to pictures alone
# what their towers read
PICTURES = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")


@dataclass(frozen=True)
class Sight:
    """Holds the pictures of B prompts as one layer sees them; of prompts without any, nothing."""

    keys: Tensor | None = None  # [B, heads, V, D]
    values: Tensor | None = None
    mask: Tensor | None = None  # [B, images, tiles]: what answers look at; None: at everything

    def rows(self, rows: Tensor) -> Sight:
        """Copy the sights of these rows."""
        return self._map(lambda x: x.index_select(0, rows))

    def beside(self, other: Sight) -> Sight:
        """Put other rows behind these, of as many pictures each."""
        columns = iter(x for x in (other.keys, other.values, other.mask) if x is not None)
        return self._map(lambda x: torch.cat([x, next(columns)]))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Sight:
        columns = (self.keys, self.values, self.mask)
        return Sight(*(None if x is None else change(x) for x in columns))


class Seen:
    """Records the pictures of prompts, and shows them to answers, with what transformers' layers
    look for in a cache."""

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
        if self.keys is None:  # else a prompt that is computed again for the gradient
            self.keys = key_states
            self.values = value_states
        return key_states, value_states


def layer(sight: Sight | None = None) -> Any:
    """Make a layer of transformers' caches that shows the pictures of prompts, or records them."""
    fresh = _layer()()
    if sight is not None:
        fresh.state = sight
    return fresh


def layers_of(config: Any) -> frozenset[int]:
    """Return the numbers of the layers of a text model that attend to pictures alone."""
    if config.model_type not in CROSS_ATTENTION:
        return frozenset()
    return frozenset(config.cross_attention_layers)


def looking(memory: Sequence[Any], crossed: Tensor | None) -> list[Any]:
    """Say in what layers remember of prompts, whose tokens look at ``crossed`` [P, S, images,
    tiles], what answers look at."""
    if crossed is None:
        return list(memory)
    return [replace(x, mask=crossed[:, -1]) if isinstance(x, Sight) else x for x in memory]


def looked_at(cached: Any, length: int) -> dict[str, Tensor]:
    """Return what a pass of answers of ``length`` tokens behind a cache takes besides: what they
    look at, [B, S + length, images, tiles], with a row for each of the S tokens in the cache too,
    which transformers 5.17 asks for and later releases cut off."""
    for layer in getattr(cached, "layers", ()):  # caches of compiled graphs have none
        if isinstance(layer, Seen) and layer.mask is not None:
            whole = int(cached.get_seq_length()) + length
            return {"cross_attention_mask": layer.mask[:, None].expand(-1, whole, -1, -1)}
    return {}


def skip_cross_attention_without_images(hf: Any) -> None:
    """Let layers that attend to pictures change no token of prompts without any, where they are
    called for their gradient, which is then zero, or since other processes call them."""
    for number in layers_of(hf.config.get_text_config()):
        hf.base_model.language_model.layers[number].register_forward_hook(_unseen, with_kwargs=True)


def _unseen(_: Any, arguments: tuple[Tensor], inputs: dict[str, Any], output: Tensor) -> Tensor:
    """Return a layer's input where it was not told at which pictures its tokens look."""
    if inputs.get("cross_attention_mask") is not None:
        return output
    return arguments[0] + 0 * output


def unseen(hf: Any, picture: dict[str, Tensor], prompts: int) -> dict[str, Tensor]:
    """Return what a pass of so many prompts without pictures takes so that tower, projector and
    the layers that attend to pictures take part: one feature of ``picture``."""
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
