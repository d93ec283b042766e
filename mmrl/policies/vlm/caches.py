"""Builds key-value caches for transformers' attention layers in which many rows continue one
prompt."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

KV = tuple[Tensor, Tensor]  # keys and values of one layer, [B, heads, S, D] each


def recorded(layers: int) -> Any:
    """Make an empty cache that keeps what a prompt's pass computes."""
    from mmrl.policies.vlm.cache_layers import Recorded

    return _of([Recorded() for _ in range(layers)])


def continued(key_values: list[KV], rows: Tensor) -> Any:
    """Make a cache of the prompts of ``rows`` [B], for answers that are scored in one pass."""
    from mmrl.policies.vlm.cache_layers import Continued

    return _of([Continued(k.index_select(0, rows), v.index_select(0, rows)) for k, v in key_values])


def growing(key_values: list[KV], rows: Tensor) -> Any:
    """Make a cache of the prompts of ``rows`` [B], for answers that are sampled token by token."""
    from mmrl.policies.vlm.cache_layers import Growing

    return _of([Growing(k.index_select(0, rows), v.index_select(0, rows)) for k, v in key_values])


def select(grown: Any, rows: Tensor) -> None:
    """Keep only ``rows`` [B'] of a growing cache."""
    for layer in grown.layers:
        layer.keys, layer.values = (
            x[:, :, : layer.length].index_select(0, rows) for x in layer.kv()
        )


def key_values(filled: Any) -> list[KV]:
    return [(layer.keys, layer.values) for layer in filled.layers]


def plain(config: Any) -> bool:
    """Tell whether a text model of this configuration keeps keys and values only, one pair a
    layer."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    layers = DynamicCache(config=config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def _of(layers: list[Any]) -> Any:
    from transformers.cache_utils import Cache

    return Cache(layers=layers)


def recompute(net: nn.Module) -> None:
    """Let layers be computed again in the backward pass; with caches that is safe, since ours do
    not change then."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for layer in net.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = layer._can_checkpoint_with_cache = True
            layer._gradient_checkpointing_func = again
            # for the layer alone, as checkpointing requires; its children stay in eval mode
            layer.training = True
