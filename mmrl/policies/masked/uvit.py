"""Speeds up aMUSEd's U-ViT without changing its output: a text's keys and values once for all rows
that use it, logits of the requested tokens only, one product with the codebook for guided ones, and
fewer passes over wide activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.host import selected
from mmrl.policies.image_tokens.attention import Kernel, attend
from mmrl.policies.products import linear


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
            output = self._to_text(attn.heads, q, k, v, attention_mask, rows)
        else:
            q, k, v = (_by_head(x, attn.heads) for x in (q, k, v))
            output = attend(q, k, v, attention_mask, kernel=self.kernel).transpose(1, 2).flatten(2)
        projected: Tensor = attn.to_out[1](attn.to_out[0](output))
        return projected

    def _to_text(
        self, heads: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rows: Tensor
    ) -> Tensor:
        """Attend with queries [B, n, C] to the texts [U, S, C] of ``rows`` [B]."""
        batch, texts = len(q), len(k)
        exact = _exact(q)
        if mask is None and exact:
            mask, k, v = _even(k, v)
        each = torch.arange(texts).repeat_interleave(batch // texts)
        if exact and torch.equal(rows, each):
            # rows of one text are queries of one text, which kernels take in larger blocks
            q = q.reshape(texts, -1, q.shape[-1])
        else:
            k = k[rows]
            v = v[rows]
        q, k, v = (_by_head(x, heads) for x in (q, k, v))
        output = attend(q, k, v, mask, kernel=self.kernel).transpose(1, 2)
        joined: Tensor = output.reshape(batch, -1, heads * q.shape[-1])
        return joined


def _by_head(x: Tensor, heads: int) -> Tensor:
    parts: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return parts


def _even(k: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Pad keys and values [U, S, C] to a number of tokens that registers are filled by, with the
    mask that leaves the padding out; a text of CLIP has 77."""
    tokens = k.shape[1]
    missing = -tokens % 16
    if not missing:
        return None, k, v
    mask = torch.zeros(1, 1, 1, tokens + missing, dtype=k.dtype)
    mask[..., tokens:] = -torch.inf
    return mask, F.pad(k, (0, 0, 0, missing)), F.pad(v, (0, 0, 0, missing))


def _exact(x: Tensor) -> bool:
    """Tell whether x is computed with on a CPU in full precision, where passes over wide
    activations and small blocks are what costs."""
    exact = x.dtype in (torch.float32, torch.float64)
    return exact and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


@cache
def _head() -> type[nn.Module]:
    """Make the class of the head; inside a function since diffusers is heavy to import."""
    from diffusers.models.unets.uvit_2d import ConvMlmLayer

    class Head(ConvMlmLayer):
        """Gives all logits, or those at ``selection`` (where [B, L], guidance scale) only."""

        selection: tuple[Tensor, float | None] | None = None

        def forward(self, hidden_states: Tensor) -> Tensor:
            """Return logits [N, V] of hidden states [B, C, h, w], whose second half is
            unconditional if there is a scale."""
            if self.selection is None:
                logits: Tensor = super().forward(hidden_states)
                return logits
            where, scale = self.selection
            flat = hidden_states.flatten(2).transpose(1, 2)  # [B, L, C]
            parts = [selected(half, where) for half in ([flat] if scale is None else flat.chunk(2))]
            h = [self.layer_norm(_pointwise(self.conv1, part)) for part in parts]
            # 1 - s and s add up to 1: affine is after
            mixed = h[0] if scale is None else h[1] + scale * (h[0] - h[1])
            return _pointwise(self.conv2, mixed)

    return Head


@cache
def _response() -> type[nn.Module]:
    from diffusers.models.normalization import GlobalResponseNorm

    class Response(GlobalResponseNorm):
        def forward(self, x: Tensor) -> Tensor:
            """Compute gamma x n + beta + x, of x [B, h, w, C] and n [B, 1, 1, C], by one
            multiplication and addition."""
            length = _length(x)
            share = length / (length.mean(-1, keepdim=True) + 1e-6)
            return _shifted(self.beta, x, self.gamma * share + 1)

    return Response


def _shifted(shift: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return shift + x weight, in the memory of x, which nobody else reads, where nothing needs it
    for a gradient."""
    if torch.is_grad_enabled() or not _exact(x):
        return torch.addcmul(shift, x, weight)
    return torch.addcmul(shift, x, weight, out=x)


def _length(x: Tensor) -> Tensor:
    """Return the length [B, 1, 1, C] of x [B, h, w, C] over all pixels."""
    if _exact(x):
        length: Tensor = _Length.apply(x)
        return length
    norm: Tensor = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    return norm


class _Length(torch.autograd.Function):
    """Sums up squares by rows, which on CPUs is faster than the norm over two axes of three; the
    gradient at 0 is 0, as the norm's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # image by image, so that squares stay in the cache
        sums = [(image * image).sum((0, 1), keepdim=True) for image in x]
        length = torch.stack(sums).sqrt()
        ctx.save_for_backward(x, length)
        return length

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, length = ctx.saved_tensors
        slope: Tensor = x * (gradient / length).masked_fill(length == 0, 0.0)
        return slope


class _Gelu(nn.GELU):
    """Stands behind a linear layer, whose output nobody else reads."""

    def forward(self, input: Tensor) -> Tensor:
        return _gelu(input)


def _gelu(x: Tensor) -> Tensor:
    """Apply the exact GELU, in place where nothing needs x for a gradient."""
    if torch.is_grad_enabled():
        return F.gelu(x)
    activated: Tensor = torch.ops.aten.gelu_(x)
    return activated


@cache
def _gate() -> type[nn.Module]:
    from diffusers.models.activations import GEGLU

    class Gate(GEGLU):
        def forward(self, hidden_states: Tensor) -> Tensor:
            """Compute both halves by products of their own on CPUs: their joint output is too wide
            for the caches."""
            proj = self.proj
            plain = type(proj) is nn.Linear and not proj._forward_hooks
            if not plain or not _exact(hidden_states) or proj._forward_pre_hooks:
                gated: Tensor = super().forward(hidden_states)
                return gated
            biases = (None, None) if proj.bias is None else proj.bias.chunk(2)
            value, gate = proj.weight.chunk(2)
            weighed = _gelu(F.linear(hidden_states, gate, biases[1]))
            values = F.linear(hidden_states, value, biases[0])
            return weighed * values if torch.is_grad_enabled() else weighed.mul_(values)

    return Gate


@cache
def _norm() -> type[nn.Module]:
    from diffusers.models.normalization import RMSNorm

    class Norm(RMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            if not _rooted(self, hidden_states):
                normed: Tensor = super().forward(hidden_states)
                return normed
            normed = hidden_states * _root(hidden_states, self.eps)
            return normed * self.weight if torch.is_grad_enabled() else normed.mul_(self.weight)

    return Norm


@cache
def _adaptive_norm() -> type[nn.Module]:
    from diffusers.models.normalization import AdaLayerNormContinuous

    class Adaptive(AdaLayerNormContinuous):
        def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
            """Multiply by the norm's weight and the scale at once."""
            if not _rooted(self.norm, x):
                normed: Tensor = super().forward(x, conditioning_embedding)
                return normed
            scale, shift = self.linear(self.silu(conditioning_embedding)).chunk(2, 1)
            weight = self.norm.weight * (1 + scale)[:, None]
            return _shifted(shift[:, None], x * _root(x, self.norm.eps), weight)

    return Adaptive


def _rooted(norm: nn.Module, x: Tensor) -> bool:
    """Tell whether ``_root`` serves a norm; in float64 diffusers' own takes squares in float32."""
    plain = isinstance(norm, _norm()) and norm.weight is not None and norm.bias is None
    return bool(plain and _exact(x) and x.dtype == norm.weight.dtype == torch.float32)


def _root(x: Tensor, epsilon: float) -> Tensor:
    """Return one over the root of the mean square of x [*, C], [*, 1], by a pass that writes no
    squares."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.rsqrt(length.square() / x.shape[-1] + epsilon)


def _pointwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Apply a convolution of one pixel to [N, C]."""
    return linear(x, conv.weight[:, :, 0, 0], conv.bias)


def quicken(net: Any, kernel: Kernel) -> None:
    """Let a UVit2DModel take texts by rows and compute logits at some places only; its output stays
    the same."""
    from diffusers.models.activations import GEGLU
    from diffusers.models.normalization import (
        AdaLayerNormContinuous,
        GlobalResponseNorm,
        RMSNorm,
    )
    from diffusers.models.unets.uvit_2d import ConvNextBlock

    net.set_attn_processor(SharedText(kernel))
    net.mlm_layer.__class__ = _head()
    quick = {
        GlobalResponseNorm: _response(),
        GEGLU: _gate(),
        RMSNorm: _norm(),
        AdaLayerNormContinuous: _adaptive_norm(),
    }
    for part in net.modules():
        part.__class__ = quick.get(type(part), type(part))
        if isinstance(part, ConvNextBlock):
            part.channelwise_act.__class__ = _Gelu


@contextmanager
def asking(net: Any, where: Tensor, scale: float | None) -> Iterator[None]:
    """Make passes within the block return logits [N, V] at ``where`` [B, L] only, guided with a
    scale."""
    net.mlm_layer.selection = where, scale
    try:
        yield
    finally:
        net.mlm_layer.selection = None
