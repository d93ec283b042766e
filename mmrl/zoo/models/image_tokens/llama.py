"""Passes one token through a Llama of transformers by its own layers, without the masks, caches and
dispatch of a whole pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmrl.policies.image_tokens.attention import Kernel, attend
from mmrl.policies.image_tokens.kv_cache import KV, Place, Rooms, put

# cosines and sines, [B or 1, 1, n, D] each, sines negative in the first half
Rope = tuple[Tensor, Tensor]


def rotations(model: Any, like: Tensor, first: Tensor, count: int) -> Rope:
    """Return the rotations of ``count`` positions from ``first`` [B] on; one row where all begin at
    one place."""
    first = first[:1] if bool((first == first[0]).all()) else first
    places = first[:, None] + torch.arange(count, device=first.device)
    cos, sin = model.rotary_emb(like, position_ids=places)
    a, b = sin[:, None].chunk(2, -1)
    return cos[:, None], torch.cat([-a, b], -1)


def token(
    model: Any,
    x: Tensor,
    rope: Rope,
    mask: Tensor | None,
    place: Place,
    rooms: Rooms | list[KV],
    kernel: Kernel,
) -> Tensor:
    """Return the hidden states [B, 1, H] for the head, from inputs x [B, 1, H]; writes their keys
    and values at ``place``."""
    for layer, room in zip(model.layers, rooms, strict=True):
        # FSDP2 gathers the weights of a layer when it is called; here it is not
        sharded = hasattr(layer, "unshard")
        if sharded:
            layer.unshard()
        x = _layer(layer, x, rope, mask, place, room, kernel)
        if sharded:
            layer.reshard()
    hidden: Tensor = model.norm(x)
    return hidden


def _layer(
    layer: Any, x: Tensor, rope: Rope, mask: Tensor | None, place: Place, room: KV, kernel: Kernel
) -> Tensor:
    attention = layer.self_attn
    h = layer.input_layernorm(x)
    q, k, v = (
        project(h).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = _turned(torch.cat([q, k], 1), rope).split([q.shape[1], k.shape[1]], 1)
    k, v = put(room, k, v, place)
    attended = attend(q, k, v, mask, scale=attention.scaling, kernel=kernel)
    x = x + attention.o_proj(attended.transpose(1, 2).flatten(2))
    change: Tensor = layer.mlp(layer.post_attention_layernorm(x))
    return x + change


def _turned(x: Tensor, rope: Rope) -> Tensor:
    """Apply rotary positions (Su et al. 2021), the two halves of a head being the parts of its
    complex numbers."""
    a, b = x.chunk(2, -1)
    return torch.addcmul(x * rope[0], torch.cat([b, a], -1), rope[1])
