"""VAR's transformer (Tian et al. 2024, arXiv 2404.02905), under its published names: VAR-d16 to VAR-d36.

All tokens of a scale are drawn at once, given the image of the scales before it. Labels are never dropped, unlike in
the published forward pass, which drops them in evaluation too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .net import ImageNet, Inputs
from .var_vq import Quantizer

KV = tuple[Tensor, Tensor]  # [B, heads, S, D] each


@dataclass(frozen=True)
class Shape:
    """Of a transformer; ``shared``: one layer makes the modulation of all blocks (d36)."""

    width: int
    depth: int
    heads: int
    sides: Sequence[int] = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
    vocab: int = 4096
    latent: int = 32
    classes: int = 1000
    feed: int | None = None
    shared: bool = False


@dataclass
class _State:
    inputs: Inputs  # of every row
    f: Tensor  # [B, D, p, p] the image so far
    scale: int = 0
    kept: list[KV | None] = field(default_factory=list)


class Attention(nn.Module):
    """Queries and keys of length 1, a learnt temperature for every head."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.scale_mul_1H11 = nn.Parameter(torch.full((1, shape.heads, 1, 1), math.log(4.0)))
        self.mat_qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(shape.width)), nn.Parameter(torch.zeros(shape.width))
        self.register_buffer("zero_k_bias", torch.zeros(shape.width))
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, bias: Tensor | None, kept: KV | None) -> tuple[Tensor, KV]:
        qkv = self.mat_qkv(x) + torch.cat([self.q_bias, self.zero_k_bias, self.v_bias])
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        q = F.normalize(q, dim=-1) * self.scale_mul_1H11.clamp_max(math.log(100)).exp()
        k = F.normalize(k, dim=-1)
        if kept is not None:
            k, v = torch.cat([kept[0], k], 2), torch.cat([kept[1], v], 2)
        seen = F.scaled_dot_product_attention(q.to(v), k.to(v), v, attn_mask=bias, scale=1.0)
        return self.proj(seen.transpose(1, 2).flatten(2)), (k, v)


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.attn, self.ffn = Attention(shape), nn.Module()
        feed = shape.feed or 4 * shape.width
        self.ffn.fc1, self.ffn.fc2 = nn.Linear(shape.width, feed), nn.Linear(feed, shape.width)
        if shape.shared:
            self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, shape.width))
        else:
            self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(shape.width, 6 * shape.width))

    def forward(self, x: Tensor, cond: Tensor, bias: Tensor | None = None, kept: KV | None = None) -> tuple[Tensor, KV]:
        """``cond`` [B, C] is the class, or [B, 1, 6, C] its modulation where that is shared."""
        six = self.ada_gss + cond if hasattr(self, "ada_gss") else self.ada_lin(cond).view(len(x), 1, 6, -1)
        gain1, gain2, scale1, scale2, shift1, shift2 = six.unbind(2)
        seen, kept = self.attn(normed(x) * (1 + scale1) + shift1, bias, kept)
        x = x + gain1 * seen
        h = F.gelu(self.ffn.fc1(normed(x) * (1 + scale2) + shift2), approximate="tanh")
        return x + gain2 * self.ffn.fc2(h), kept


class VARNet(ImageNet):
    """Inputs: ``label`` [B]; ``quantizer`` is frozen and not a part of it."""

    _no_split_modules = ["Block"]

    def __init__(self, shape: Shape, quantizer: Quantizer):
        super().__init__()
        self.shape, self.vocab, self.hidden, self.outside = shape, shape.vocab, shape.width, (quantizer,)
        self.turns, length = tuple(side * side for side in shape.sides), sum(side * side for side in shape.sides)
        self.pos_start = nn.Parameter(torch.zeros(1, shape.sides[0] ** 2, shape.width))
        self.pos_1LC = nn.Parameter(torch.zeros(1, length, shape.width))
        self.word_embed = nn.Linear(shape.latent, shape.width)
        self.class_emb = nn.Embedding(shape.classes + 1, shape.width)
        self.lvl_embed = nn.Embedding(len(shape.sides), shape.width)
        self.shared_ada_lin = nn.Identity()
        if shape.shared:
            self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(shape.width, 6 * shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.head_nm = nn.Module()
        self.head_nm.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(shape.width, 2 * shape.width))
        self.head = nn.Linear(shape.width, shape.vocab)
        level = torch.cat([torch.full((count,), k) for k, count in enumerate(self.turns)])
        later = level[:, None] < level[None, :]
        self.register_buffer("lvl_1L", level[None])
        self.register_buffer("attn_bias_for_masking", torch.zeros(1, 1, length, length).masked_fill(later, -torch.inf))
        self.checkpointing = False

    def begin(self, inputs: Inputs, rows: Tensor) -> tuple[Tensor, _State]:
        inputs = {"label": inputs["label"][rows]}
        quantizer = self._quantizer()
        state = _State(inputs, quantizer.blank(len(rows)), kept=[None] * len(self.blocks))
        return self._advance(self._start(inputs), state), state

    def step(self, ids: Tensor, state: _State) -> Tensor:
        quantizer = self._quantizer()
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
            state.f = quantizer.add(state.f, ids, state.scale)
            seen = quantizer.seen(state.f, state.scale + 1)
        state.scale += 1
        return self._advance(self._word(seen, state.scale), state)

    def teach(self, inputs: Inputs, ids: Tensor) -> Tensor:
        quantizer, parts = self._quantizer(), [self._start(inputs)]
        f = quantizer.blank(len(ids))
        for k, part in enumerate(list(quantizer.split(ids))[:-1]):
            with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
                f = quantizer.add(f, part, k)
                seen = quantizer.seen(f, k + 1)
            parts.append(self._word(seen, k + 1))
        x, cond = torch.cat(parts, 1), self._cond(inputs)
        bias = self.attn_bias_for_masking.to(x.dtype)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x, _ = checkpoint(block, x, cond, bias, use_reentrant=False, preserve_rng_state=False)
            else:
                x, _ = block(x, cond, bias)
        return self._last(x, inputs)

    def vocabulary(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def enable_gradient_checkpointing(self) -> None:
        self.checkpointing = True

    def _quantizer(self) -> Quantizer:
        return self.outside[0].to(self.pos_1LC.device)

    def _cond(self, inputs: Inputs) -> Tensor:
        found = self.shared_ada_lin(self.class_emb(inputs["label"]))
        return found.view(len(found), 1, 6, -1) if self.shape.shared else found

    def _places(self, k: int) -> Tensor:
        """[1, p_k^2, C] embeddings of the places and the number of a scale."""
        start = sum(self.turns[:k])
        part = slice(start, start + self.turns[k])
        return self.lvl_embed(self.lvl_1L[:, part]) + self.pos_1LC[:, part]

    def _start(self, inputs: Inputs) -> Tensor:
        return self.class_emb(inputs["label"])[:, None] + self.pos_start + self._places(0)

    def _word(self, seen: Tensor, k: int) -> Tensor:
        return self.word_embed(seen.to(self.word_embed.weight.dtype)) + self._places(k)

    def _advance(self, x: Tensor, state: _State) -> Tensor:
        cond = self._cond(state.inputs)
        for i, block in enumerate(self.blocks):
            x, state.kept[i] = block(x, cond, None, state.kept[i])
        return self._last(x, state.inputs)

    def _last(self, x: Tensor, inputs: Inputs) -> Tensor:
        """What the head reads."""
        scale, shift = self.head_nm.ada_lin(self.class_emb(inputs["label"]))[:, None].chunk(2, -1)
        return normed(x) * (1 + scale) + shift


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)
