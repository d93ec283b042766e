"""Builds LlamaGen's transformer (Sun et al. 2024, arXiv 2406.06525), under its published names:
GPT-B to GPT-7B.

As published, the condition's queries and keys are zero: its positions have no rotation but the
factor 0, so what an image token sees of it are its values only, each with weight exp(0) before the
softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmrl.policies.image_tokens.attention import Kernel, attend
from mmrl.policies.image_tokens.kv_cache import KV, Place, Rooms, put
from mmrl.policies.image_tokens.network import ImageNet, Inputs, widened

EPSILON = 1e-5  # of norms


@dataclass(frozen=True)
class Shape:
    """Sets the sizes of a transformer. ``classes`` > 0 is class-conditional, else text-conditional
    with ``caption`` features."""

    dim: int
    layers: int
    heads: int
    vocab: int = 16384
    classes: int = 1000
    caption: int = 2048
    condition: int = 1  # tokens before the image
    grid: int = 16  # tokens a side
    feed: int | None = None  # width of the feed-forward layers

    def width(self) -> int:
        return self.feed or -(-int(8 * self.dim / 3) // 256) * 256


@dataclass
class _State:
    rooms: Rooms
    padding: Tensor | None  # [B, condition] bool


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.promote_types(x.dtype, torch.float32))
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPSILON)).to(
            x.dtype
        ) * self.weight


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.wqkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        mask: Tensor | None,
        kernel: Kernel,
        room: KV | None = None,
        place: Place | None = None,
    ) -> tuple[Tensor, KV]:
        """Attend by ``rope`` [n, D / 2, 2] and ``mask`` [B, 1, n, S] bool or None: causal; ``room``
        is written at ``place``."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.wqkv(x).chunk(3, -1)
        )
        q = rotated(q, rope)
        k = rotated(k, rope)
        if room is not None and place is not None:
            k, v = put(room, k, v, place)
        attended = attend(q, k, v, mask, causal=mask is None and x.shape[1] > 1, kernel=kernel)
        return self.wo(attended.transpose(1, 2).flatten(2)), (k, v)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.width(), bias=False)
        self.w3 = nn.Linear(shape.dim, shape.width(), bias=False)
        self.w2 = nn.Linear(shape.width(), shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return output


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)
        self.attention_norm = RMSNorm(shape.dim)
        self.ffn_norm = RMSNorm(shape.dim)

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        mask: Tensor | None,
        kernel: Kernel,
        room: KV | None = None,
        place: Place | None = None,
    ) -> tuple[Tensor, KV]:
        attended, key_values = self.attention(
            self.attention_norm(x), rope, mask, kernel, room, place
        )
        x = x + attended
        return x + self.feed_forward(self.ffn_norm(x)), key_values


class ClassEmbedding(nn.Module):
    """Embeds labels [B]; the last row stands for no class."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embedding_table = nn.Embedding(shape.classes + 1, shape.dim)

    def forward(self, inputs: Inputs) -> Tensor:
        embedded: Tensor = self.embedding_table(inputs["label"])
        return embedded[:, None]


class _Projection(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.fc1 = nn.Linear(shape.caption, shape.dim, bias=False)
        self.fc2 = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        projected: Tensor = self.fc2(
            F.gelu(self.fc1(text.to(self.fc1.weight.dtype)), approximate="tanh")
        )
        return projected


class CaptionEmbedding(nn.Module):
    """Embeds text features [B, n, caption]."""

    uncond_embedding: Tensor  # [condition, caption]

    def __init__(self, shape: Shape):
        super().__init__()
        self.cap_proj = _Projection(shape)
        self.register_buffer("uncond_embedding", torch.zeros(shape.condition, shape.caption))

    def forward(self, inputs: Inputs) -> Tensor:
        embedded: Tensor = self.cap_proj(inputs["text"])
        return embedded


class LlamaGenGPT(ImageNet):
    """Implements LlamaGen's GPT. Inputs: ``label`` [B], or ``text`` [B, n, caption] with ``mask``
    [B, n] bool, padded on the left."""

    _no_split_modules = ["Block"]
    token: Callable[..., Tensor]

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.vocab = shape.vocab
        self.hidden = shape.dim
        self.turns = (1,) * shape.grid**2
        self.cls_embedding: ClassEmbedding | CaptionEmbedding = (
            ClassEmbedding(shape) if shape.classes else CaptionEmbedding(shape)
        )
        self.tok_embeddings = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.dim)
        self.output = nn.Linear(shape.dim, shape.vocab, bias=False)
        self.checkpointing = False
        self.token = token
        self.ropes: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def begin(self, inputs: Inputs, rows: Tensor) -> tuple[Tensor, _State]:
        x = self.cls_embedding(inputs)
        mask = inputs.get("mask")
        length = x.shape[1]
        rope = self._rope(0, length, x)
        attention_mask = None if mask is None else causal(mask, length)
        read = []
        for layer in self.layers:
            x, key_values = layer(x, rope, attention_mask, self.kernel)
            read.append(key_values)
        rooms = Rooms.after(read, rows, length + len(self.turns) - 1)
        padding = None if mask is None else mask[rows]
        return self.norm(x[:, -1:])[rows], _State(rooms, padding)

    def step(self, ids: Tensor, state: _State) -> Tensor:
        x = widened(self.tok_embeddings(ids), state.rooms.rows)
        first = state.rooms.length
        rope = self._rope(first, first + 1, x)
        place = state.rooms.next(1, self.fixed)
        mask = state.rooms.attention_mask(place, state.padding)
        return self.token(self, x, rope, mask, place, state.rooms.layers)

    def extend(self, ids: Tensor, state: _State) -> Tensor:
        x = self.tok_embeddings(ids[:, :-1])
        first = state.rooms.length
        place = slice(first, first + x.shape[1])
        state.rooms.length = place.stop
        mask = state.rooms.causal_mask(place, state.padding)
        return token(self, x, self._rope(first, place.stop, x), mask, place, state.rooms.layers)

    def back(self, state: _State, rows: slice | Tensor, count: int, ids: Tensor) -> _State:
        length = state.rooms.length - (len(self.turns) - 1 - count)
        padding = None if state.padding is None else state.padding[rows]
        return _State(state.rooms.back(rows, length), padding)

    def teach(self, inputs: Inputs, ids: Tensor) -> Tensor:
        condition = self.cls_embedding(inputs)
        mask = inputs.get("mask")
        x = torch.cat([condition, self.tok_embeddings(ids[:, :-1])], 1)
        rope = self._rope(0, x.shape[1], x)
        attention_mask = None if mask is None else causal(mask, x.shape[1])
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x, _ = checkpoint(
                    layer,
                    x,
                    rope,
                    attention_mask,
                    self.kernel,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                x, _ = layer(x, rope, attention_mask, self.kernel)
        hidden: Tensor = self.norm(x)
        return hidden[:, condition.shape[1] - 1 :]

    def vocabulary(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.output(hidden)
        return logits

    affine = vocabulary

    def enable_gradient_checkpointing(self) -> None:
        self.checkpointing = True

    def _rope(self, start: int, end: int, like: Tensor) -> Tensor:
        """Return cosines and sines of positions start..end - 1, [n, D / 2, 2]."""
        kind = like.device, torch.promote_types(like.dtype, torch.float32)
        if kind not in self.ropes:  # moved once, not at every token
            with torch.inference_mode(False):
                table = rotations(
                    self.shape.grid, self.shape.dim // self.shape.heads, self.shape.condition
                )
                self.ropes[kind] = table.to(*kind)
        return self.ropes[kind][start:end]


def token(
    net: LlamaGenGPT, x: Tensor, rope: Tensor, mask: Tensor | None, place: Place, rooms: list[KV]
) -> Tensor:
    """Return the hidden states [B, 1, H] for the head, from inputs x [B, 1, H]; writes their keys
    and values at ``place``."""
    for layer, room in zip(net.layers, rooms, strict=True):
        x, _ = layer(x, rope, mask, net.kernel, room, place)
    hidden: Tensor = net.norm(x)
    return hidden


def rotations(grid: int, dim: int, condition: int) -> Tensor:
    """Return [condition + grid^2, dim / 2, 2]: the first half of a head turns with the row, the
    second with the column; base 10000. Positions of the condition have 0 and 0."""
    rates = 10000.0 ** (-torch.arange(0, dim // 2, 2)[: dim // 4].float() / (dim // 2))
    angles = torch.outer(torch.arange(grid).float(), rates)  # [grid, dim / 4]
    row = angles[:, None].expand(-1, grid, -1)
    column = angles[None].expand(grid, -1, -1)
    angles_of_positions = torch.cat([row, column], -1).flatten(0, 1)
    turned = torch.stack([angles_of_positions.cos(), angles_of_positions.sin()], -1)
    return torch.cat([torch.zeros(condition, *turned.shape[1:]), turned])


def rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate [B, heads, n, D], adjacent numbers being the parts of one complex number."""
    a, b = x.to(rope).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rope.unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


def causal(mask: Tensor, length: int) -> Tensor:
    """Make the causal mask [B, 1, length, length] bool for a condition's mask [B, n]: nothing
    later, no padding, and always the token itself, since the row of padding would be empty."""
    keys = F.pad(mask.bool(), (0, length - mask.shape[1]), value=True)[:, None, None]
    whole = torch.ones(length, length, dtype=torch.bool, device=mask.device)
    return keys & whole.tril() | torch.eye(length, dtype=torch.bool, device=mask.device)
