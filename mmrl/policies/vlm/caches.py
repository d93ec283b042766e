"""Builds transformers caches in which many rows continue one prompt: keys and values of attention,
recurrent states (``states.py``), and the images of cross-attention layers
(``cross_attention_caches.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmrl.policies.vlm import cross_attention_caches, states
from mmrl.policies.vlm.cross_attention_caches import Seen, Sight
from mmrl.policies.vlm.states import Kept, State

KV = tuple[Tensor, Tensor]  # keys and values of one layer, [B, heads, S, D] each
Memory = KV | State | Sight  # what one layer keeps
# the forward argument for the cache: transformers renamed it
RENAMED = tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24)
NAME = "cache" if RENAMED else "past_key_values"
ROOM = 32  # steps a growing cache reserves at once


def cache_kwargs(cached: Any) -> dict[str, Any]:
    """Return a cache under the argument name that transformers' models use."""
    return {NAME: cached, "use_cache": True}


class Recorded:
    """Records a prompt: keeps what is computed first, and returns the same when gradient
    checkpointing recomputes it."""

    keys: Tensor | None
    values: Tensor | None

    def get_seq_length(self) -> int:
        return 0  # nothing precedes a prompt

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> KV:
        if self.keys is None:
            self.keys = key_states
            self.values = value_states
        return key_states, value_states


class Continued:
    """Continues prompts with answers scored in one pass: nothing is kept, so gradient checkpointing
    can repeat the pass."""

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
    """Grows with sampled answers: written in place, with room for later steps."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> KV:
        return _written(self.reserve(key_states.shape[-2]), key_states, value_states)

    def reserve(self, tokens: int) -> KV:
        """Return keys and values with room for that many more tokens."""
        end = self.length + tokens
        if end > self.keys.shape[-2]:
            room = end + max(ROOM, end // 4)
            self.keys = _roomy(self.keys, self.length, room)
            self.values = _roomy(self.values, self.length, room)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def kv(self) -> KV:
        return self.keys, self.values


class Reserved:
    """Replaces transformers' cache in a compiled graph: every layer writes one more token into its
    last column, allocated before."""

    def __init__(self, columns: Sequence[KV]):
        self.columns = columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns[layer_idx][0].shape[-2] - 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> KV:
        return _written(self.columns[layer_idx], key_states, value_states)


class PrefixCache:
    """Replaces transformers' cache in a compiled graph: answers scored in one pass after the keys
    and values of their prompts."""

    def __init__(self, prompts: Sequence[KV]):
        self.prompts = prompts

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.prompts[layer_idx][0].shape[-2]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> KV:
        keys, values = self.prompts[layer_idx]
        return torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)


def _written(columns: KV, keys: Tensor, values: Tensor) -> KV:
    """Write keys and values [B, heads, n, D] into the last columns of a cache."""
    tokens = keys.shape[-2]
    for column, x in zip(columns, (keys, values), strict=True):
        column[:, :, -tokens:] = x
    return columns


def _roomy(x: Tensor, length: int, room: int) -> Tensor:
    wide = x.new_empty(*x.shape[:2], room, x.shape[-1])
    wide[:, :, :length] = x[:, :, :length]
    return wide


@cache
def _layer(behaviour: type) -> Any:
    """Make one of the classes above a layer of transformers' caches; inside a function since
    transformers is heavy to import."""
    from transformers.cache_utils import DynamicLayer

    return type(behaviour.__name__, (behaviour, DynamicLayer), {})


def recorded(layers: int) -> Any:
    """Make an empty cache that records a prompt's pass."""
    layer = _layer(Recorded)
    return _of([layer() for _ in range(layers)])


def remembered(config: Any) -> Any:
    """Make an empty cache that records a prompt's pass through a text model of this configuration,
    with any kind of layer."""
    attends = _layer(Recorded)
    pictures = cross_attention_caches.layers_of(config)

    def layer(number: int, kind: type) -> Any:
        if number in pictures:
            return cross_attention_caches.layer()
        return states.layer(states.RecordedState) if states.keeps_state(kind) else attends()

    return _of([layer(number, kind) for number, kind in enumerate(_kinds(config))])


def continued(memories: Sequence[Memory], rows: Tensor) -> Any:
    """Make a cache of the prompts of ``rows`` [B], for answers that are scored in one pass."""
    return _of([_continuing(Continued, states.ContinuedState, x, rows) for x in memories])


def growing(memories: Sequence[Memory], rows: Tensor) -> Any:
    """Make a cache of the prompts of ``rows`` [B], for answers that are sampled token by token."""
    return _of([_continuing(Growing, states.GrowingState, x, rows) for x in memories])


def reserved(grown: Any) -> list[KV]:
    """Return keys and values of every layer of a growing cache with room for one more token."""
    return [layer.reserve(1) for layer in grown.layers]


def _continuing(attention: type, recurrent: type, memory: Memory, rows: Tensor) -> Any:
    if isinstance(memory, State):
        return states.layer(recurrent, memory.rows(rows))
    if isinstance(memory, Sight):
        return cross_attention_caches.layer(memory.rows(rows))
    return _layer(attention)(*(x.index_select(0, rows) for x in memory))


def shortened(grown: Any, rows: slice | Tensor, length: int) -> Any:
    """Make a cache of these rows of a growing one, truncated to ``length`` tokens; a slice shares
    memory while there is room."""
    layer = _layer(Growing)
    cache = _of([layer(*(x[rows] for x in each.kv())) for each in grown.layers])
    for each in cache.layers:
        each.length = length
    return cache


def select(grown: Any, rows: Tensor) -> None:
    """Keep only ``rows`` [B'] of a growing cache."""
    for layer in grown.layers:
        if isinstance(layer, (Kept, Seen)):
            layer.state = layer.state.rows(rows)
            continue
        layer.keys, layer.values = (
            x[:, :, : layer.length].index_select(0, rows) for x in layer.kv()
        )


def refill(grown: Any, left: Tensor, memories: Sequence[Memory], rows: Tensor, width: int) -> None:
    """Keep ``left`` [B'] of a growing cache and add the prompts of ``rows`` [B''], all at the end
    of ``width`` columns; columns cut off or added on the left are masked."""
    for layer, prompt in zip(grown.layers, memories, strict=True):
        if isinstance(prompt, (State, Sight)):
            layer.state = layer.state.rows(left).beside(prompt.rows(rows))
            continue
        layer.keys, layer.values = (
            torch.cat(
                [
                    _at_end(x[:, :, : layer.length].index_select(0, left), width),
                    _at_end(new.index_select(0, rows), width),
                ]
            )
            for x, new in zip(layer.kv(), prompt, strict=True)
        )
        layer.length = width


def _at_end(x: Tensor, width: int) -> Tensor:
    length = x.shape[-2]
    return x[:, :, length - width :] if length >= width else F.pad(x, (0, 0, width - length, 0))


def memories(filled: Any) -> list[Memory]:
    """Return the memory of every layer of a cache."""
    return [
        layer.state if isinstance(layer, (Kept, Seen)) else pair
        for layer, pair in zip(filled.layers, key_values(filled), strict=True)
    ]


def key_values(filled: Any) -> list[KV]:
    """Return the keys and values of every layer of a cache; a layer that keeps none, since it reads
    those of an earlier one (Gemma 4), has as many of zero heads."""
    pairs: list[Any] = [
        (getattr(x, "keys", None), getattr(x, "values", None)) for x in filled.layers
    ]
    some = [keys for keys, _ in pairs if keys is not None]
    if not some:
        return pairs
    none = some[0].new_empty(len(some[0]), 0, some[0].shape[-2], 0)
    return [(none, none) if keys is None else (keys, values) for keys, values in pairs]


def plain(config: Any) -> bool:
    """Tell whether a text model of this configuration caches only keys and values of tokens, one
    pair per layer."""
    return not cross_attention_caches.layers_of(config) and all(
        _attends(kind) for kind in _kinds(config)
    )


def continuable(config: Any) -> bool:
    """Tell whether many rows can continue everything that a text model of this configuration caches
    of a prompt: keys and values, one pair per layer, a state or images."""
    return all(_attends(kind) or states.keeps_state(kind) for kind in _kinds(config))


def _kinds(config: Any) -> list[type]:
    """List the layer types of transformers' own cache for a text model."""
    from transformers.cache_utils import DynamicCache

    return [type(layer) for layer in DynamicCache(config=config).layers]


def _attends(kind: type) -> bool:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    # a dummy reads the keys and values of another layer
    return kind in (DynamicLayer, DynamicSlidingWindowLayer) or kind.__name__ == "DummyLayer"


def _of(layers: list[Any]) -> Any:
    from transformers.cache_utils import Cache

    return Cache(layers=layers)


def _again(layer: Callable[..., Any], *args: Any) -> Any:
    """Run a layer with gradient checkpointing where gradients are recorded: older versions of
    transformers call it while sampling too."""
    if not torch.is_grad_enabled():
        return layer(*args)
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)


def recompute(net: nn.Module) -> None:
    """Turn on gradient checkpointing; it is safe with mmrl's caches, which do not change when
    recomputed."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in net.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = layer._can_checkpoint_with_cache = True
            layer._gradient_checkpointing_func = _again
            # for the layer only, as checkpointing requires; its children stay in eval mode
            layer.training = True


def shareable(hf: Any) -> bool:
    """Tell whether many answers can continue what the family caches of a prompt: keys and values,
    one pair per layer, a state or images."""
    return continuable(hf.config.get_text_config())


def divisible(hf: Any) -> bool:
    """Tell whether a prompt's cache can be packed and truncated to any token: only keys and values,
    with full or sliding-window attention; packing would hide where chunks (Llama 4) begin."""
    config = hf.config.get_text_config()
    chunks = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return shareable(hf) and plain(config) and not chunks
