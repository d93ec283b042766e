"""Builds VAR's transformer (Tian et al. 2024, arXiv 2404.02905), under its published names: VAR-d16
to VAR-d36.

All tokens of a scale are drawn at once, given the image of the scales before it. Labels are never
dropped, unlike in the published forward pass, which drops them in evaluation too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmrl.policies.image_tokens.attention import Kernel, attend
from mmrl.policies.image_tokens.kv_cache import KV, Place, Rooms, put
from mmrl.policies.image_tokens.network import ImageNet, Inputs, widened
from mmrl.zoo.models.image_tokens.var_vq import Quantizer


@dataclass(frozen=True)
class Shape:
    """Sets the sizes of a transformer; ``shared``: one layer makes the modulation of all blocks
    (d36)."""

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
    # [B, D, p, p] the image so far; of conditional rows only, where others share their tokens
    f: Tensor
    rooms: Rooms
    scale: int = 0


class Attention(nn.Module):
    """Attends with queries and keys of length 1 and a learnt temperature for every head."""

    zero_k_bias: Tensor

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.scale_mul_1H11 = nn.Parameter(torch.full((1, shape.heads, 1, 1), math.log(4.0)))
        self.mat_qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(shape.width))
        self.v_bias = nn.Parameter(torch.zeros(shape.width))
        self.register_buffer("zero_k_bias", torch.zeros(shape.width))
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None,
        kernel: Kernel,
        room: KV | None = None,
        place: Place | None = None,
    ) -> Tensor:
        """Attend to x and the earlier scales in ``room``, which is written at ``place``."""
        qkv = self.mat_qkv(x) + torch.cat([self.q_bias, self.zero_k_bias, self.v_bias])
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1)
        )
        q = F.normalize(q, dim=-1) * self.scale_mul_1H11.clamp_max(math.log(100)).exp()
        k = F.normalize(k, dim=-1)
        if room is not None and place is not None:
            k, v = put(room, k, v, place)
        attended = attend(q.to(v), k.to(v), v, bias, scale=1.0, kernel=kernel)
        output: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        feed = shape.feed or 4 * shape.width
        self.fc1 = nn.Linear(shape.width, feed)
        self.fc2 = nn.Linear(feed, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return output


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.attn = Attention(shape)
        self.ffn = FeedForward(shape)
        self.shared = shape.shared
        if shape.shared:
            self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, shape.width))
        else:
            self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(shape.width, 6 * shape.width))

    def forward(
        self,
        x: Tensor,
        cond: Tensor,
        bias: Tensor | None,
        kernel: Kernel,
        room: KV | None = None,
        place: Place | None = None,
    ) -> Tensor:
        """Apply the block; ``cond`` [B, C] is the class, or [B, 1, 6, C] its modulation where that
        is shared."""
        six = self.ada_gss + cond if self.shared else self.ada_lin(cond).view(len(x), 1, 6, -1)
        gain1, gain2, scale1, scale2, shift1, shift2 = six.unbind(2)
        x = x + gain1 * self.attn(normed(x) * (1 + scale1) + shift1, bias, kernel, room, place)
        change: Tensor = self.ffn(normed(x) * (1 + scale2) + shift2)
        return x + gain2 * change


class HeadNorm(nn.Module):
    """Normalises hidden states for the head, modulated by the class."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(shape.width, 2 * shape.width))

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        modulation: Tensor = self.ada_lin(cond)[:, None]
        scale, shift = modulation.chunk(2, -1)
        return normed(x) * (1 + scale) + shift


class VARNet(ImageNet):
    """Implements VAR's network. Inputs: ``label`` [B]; ``quantizer`` is frozen and not a part of
    it."""

    _no_split_modules = ["Block"]
    lvl_1L: Tensor  # [1, T] the number of every token's scale
    attn_bias_for_masking: Tensor  # [1, 1, T, T]

    def __init__(self, shape: Shape, quantizer: Quantizer):
        super().__init__()
        self.shape = shape
        self.vocab = shape.vocab
        self.hidden = shape.width
        self.outside = (quantizer,)
        self.turns = tuple(side * side for side in shape.sides)
        length = sum(side * side for side in shape.sides)
        self.pos_start = nn.Parameter(torch.zeros(1, shape.sides[0] ** 2, shape.width))
        self.pos_1LC = nn.Parameter(torch.zeros(1, length, shape.width))
        self.word_embed = nn.Linear(shape.latent, shape.width)
        self.class_emb = nn.Embedding(shape.classes + 1, shape.width)
        self.lvl_embed = nn.Embedding(len(shape.sides), shape.width)
        self.shared_ada_lin: nn.Module = nn.Identity()
        if shape.shared:
            self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(shape.width, 6 * shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.head_nm = HeadNorm(shape)
        self.head = nn.Linear(shape.width, shape.vocab)
        level = torch.cat([torch.full((count,), k) for k, count in enumerate(self.turns)])
        later = level[:, None] < level[None, :]
        self.register_buffer("lvl_1L", level[None])
        self.register_buffer(
            "attn_bias_for_masking",
            torch.zeros(1, 1, length, length).masked_fill(later, -torch.inf),
        )
        self.checkpointing = False

    def begin(self, inputs: Inputs, rows: Tensor) -> tuple[Tensor, _State]:
        inputs = {"label": inputs["label"][rows]}
        x = self._start(inputs)
        shape = len(rows), self.shape.heads, sum(self.turns), self.shape.width // self.shape.heads
        rooms = Rooms([(x.new_zeros(shape), x.new_zeros(shape)) for _ in self.blocks], 0)
        state = _State(inputs, self._quantizer().blank(1), rooms)
        return self._advance(x, state), state

    def step(self, ids: Tensor, state: _State) -> Tensor:
        quantizer = self._quantizer()
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
            state.f = quantizer.add(state.f, ids, state.scale)
            features = quantizer.at_scale(state.f, state.scale + 1)
        state.scale += 1
        return self._advance(widened(self._word(features, state.scale), state.rooms.rows), state)

    def extend(self, ids: Tensor, state: _State) -> Tensor:
        x = torch.cat(self._words(ids), 1)
        first = self.turns[0]
        place = state.rooms.next(x.shape[1])
        cond = self._cond(state.inputs)
        bias = self.attn_bias_for_masking[:, :, first:].to(x.dtype)
        for block, room in zip(self.blocks, state.rooms, strict=True):
            x = block(x, cond, bias, self.kernel, room, place)
        return self._last(x, state.inputs)

    def back(self, state: _State, rows: slice | Tensor, count: int, ids: Tensor) -> _State:
        quantizer = self._quantizer()
        f = quantizer.blank(len(ids))
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
            for k, part in enumerate(list(quantizer.split(ids))[:count]):
                f = quantizer.add(f, part, k)
        inputs = {name: tensor[rows] for name, tensor in state.inputs.items()}
        rooms = state.rooms.back(rows, sum(self.turns[: count + 1]))
        return _State(inputs, f, rooms, count)

    def _words(self, ids: Tensor) -> list[Tensor]:
        """Embed what every scale but the first sees of the tokens ids [B, T] before it."""
        quantizer = self._quantizer()
        parts = []
        f = quantizer.blank(len(ids))
        for k, part in enumerate(list(quantizer.split(ids))[:-1]):
            with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
                f = quantizer.add(f, part, k)
                features = quantizer.at_scale(f, k + 1)
            parts.append(self._word(features, k + 1))
        return parts

    def fork(self, state: _State, rows: Tensor) -> None:
        # unconditional rows have the tokens of these
        drawn = rows[: len(rows) * len(state.f) // state.rooms.rows]
        state.inputs = {name: tensor[rows] for name, tensor in state.inputs.items()}
        state.f = state.f[drawn]
        state.rooms = Rooms([(k[rows], v[rows]) for k, v in state.rooms], state.rooms.length)

    def teach(self, inputs: Inputs, ids: Tensor) -> Tensor:
        x = torch.cat([self._start(inputs), *self._words(ids)], 1)
        cond = self._cond(inputs)
        bias = self.attn_bias_for_masking.to(x.dtype)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(
                    block, x, cond, bias, self.kernel, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = block(x, cond, bias, self.kernel)
        return self._last(x, inputs)

    def vocabulary(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits

    affine = vocabulary

    def enable_gradient_checkpointing(self) -> None:
        self.checkpointing = True

    def _quantizer(self) -> Quantizer:
        return self.outside[0].to(self.pos_1LC.device)

    def _cond(self, inputs: Inputs) -> Tensor:
        modulation: Tensor = self.shared_ada_lin(self.class_emb(inputs["label"]))
        return modulation.view(len(modulation), 1, 6, -1) if self.shape.shared else modulation

    def _places(self, k: int) -> Tensor:
        """Embed the places and the number of a scale, [1, p_k^2, C]."""
        start = sum(self.turns[:k])
        part = slice(start, start + self.turns[k])
        levels: Tensor = self.lvl_embed(self.lvl_1L[:, part])
        return levels + self.pos_1LC[:, part]

    def _start(self, inputs: Inputs) -> Tensor:
        embedded: Tensor = self.class_emb(inputs["label"])
        return embedded[:, None] + self.pos_start + self._places(0)

    def _word(self, features: Tensor, k: int) -> Tensor:
        words: Tensor = self.word_embed(features.to(self.word_embed.weight.dtype))
        return words + self._places(k)

    def _advance(self, x: Tensor, state: _State) -> Tensor:
        cond = self._cond(state.inputs)
        place = state.rooms.next(x.shape[1])
        for block, room in zip(self.blocks, state.rooms, strict=True):
            x = block(x, cond, None, self.kernel, room, place)
        return self._last(x, state.inputs)

    def _last(self, x: Tensor, inputs: Inputs) -> Tensor:
        hidden: Tensor = self.head_nm(x, self.class_emb(inputs["label"]))
        return hidden


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)
