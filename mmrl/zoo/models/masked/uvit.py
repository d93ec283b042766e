"""Speeds up aMUSEd's U-ViT without changing its output: a text's keys and values once for all rows
that use it, logits of the requested tokens only, and one product with the codebook for guided ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.host import selected
from mmrl.policies.image_tokens.attention import Kernel, attend


class SharedText:
    """Attends to texts [U, S, C] that stand for ``rows`` [B] of them, as an attention processor."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Attend with queries [B, n, C] and return [B, n, C]; the names are diffusers'."""
        self_attention = encoder_hidden_states is None
        read = hidden_states if self_attention else encoder_hidden_states
        k = attn.to_k(read)
        v = attn.to_v(read)
        q = attn.to_q(hidden_states)
        if rows is not None and not self_attention:
            k, v = k[rows], v[rows]
        q, k, v = (_by_head(x, attn.heads) for x in (q, k, v))
        output = attend(q, k, v, attention_mask, kernel=self.kernel).transpose(1, 2).flatten(2)
        projected: Tensor = attn.to_out[1](attn.to_out[0](output))
        return projected


def _by_head(x: Tensor, heads: int) -> Tensor:
    parts: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return parts


class SelectiveHead:
    """Gives all logits of a head, a ConvMlmLayer, or those at ``selection`` (where [B, L], guidance
    scale) only, in place of its ``forward``."""

    selection: tuple[Tensor, float | None] | None = None

    def __init__(self, layer: Any):
        self.layer = layer
        self.whole = layer.forward

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Return logits [N, V] of hidden states [B, C, h, w], whose second half is unconditional if
        there is a scale."""
        if self.selection is None:
            logits: Tensor = self.whole(hidden_states)
            return logits
        where, scale = self.selection
        layer = self.layer
        flat = hidden_states.flatten(2).transpose(1, 2)  # [B, L, C]
        parts = [selected(half, where) for half in ([flat] if scale is None else flat.chunk(2))]
        h = [layer.layer_norm(_pointwise(layer.conv1, part)) for part in parts]
        # 1 - s and s add up to 1: affine is after
        mixed = h[0] if scale is None else h[1] + scale * (h[0] - h[1])
        return _pointwise(layer.conv2, mixed)


def _pointwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Apply a convolution of one pixel to [N, C]."""
    return F.linear(x, conv.weight[:, :, 0, 0], conv.bias)


def share_texts(net: Any, kernel: Kernel) -> None:
    """Let a UVit2DModel take texts by rows and compute logits only at some places, with the same
    output."""
    net.set_attn_processor(SharedText(kernel))
    net.mlm_layer.forward = SelectiveHead(net.mlm_layer)


@contextmanager
def asking(net: Any, where: Tensor, scale: float | None) -> Iterator[None]:
    """Make passes within the block return logits [N, V] at ``where`` [B, L] only, guided with a
    scale."""
    head = net.mlm_layer.forward
    head.selection = where, scale
    try:
        yield
    finally:
        head.selection = None
