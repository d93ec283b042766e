"""Generates images by LlamaGen and VAR in plain loops, as the baseline of ``bench_discrete.py``:
neither is in transformers or diffusers.

Written from the papers (Sun et al. 2024; Tian et al. 2024): every row, conditional or not, is
prefilled and cached separately; LlamaGen's KV cache is static, and a token attends to all of it
under a mask; VAR appends the keys of a scale to the cache; logits of both rows are computed and
mixed; a token is sampled by ``torch.multinomial``. The weights are those of mmrl's networks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.policies.image_tokens import checkpoints
from mmrl.zoo.models.image_tokens.llamagen_gpt import LlamaGenGPT, Shape, rotated
from mmrl.zoo.models.image_tokens.llamagen_vq import LlamaGenVQ
from mmrl.zoo.models.image_tokens.var_net import Shape as VARShape
from mmrl.zoo.models.image_tokens.var_net import VARNet, normed
from mmrl.zoo.models.image_tokens.var_vq import VARVQ

VAR_SIDES = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)  # tokens a side of every scale, at 256 pixels


def drawn(logits: Tensor) -> Tensor:
    """Draw a token for each row of logits [*, V]."""
    p = logits.softmax(-1).flatten(0, -2)
    return torch.multinomial(p, num_samples=1).view(logits.shape[:-1])


@torch.no_grad()
def llamagen(net: LlamaGenGPT, label: int, copies: int, scale: float) -> Tensor:
    """Generate ``copies`` images of a class, ids [copies, T]."""
    device = net.output.weight.device
    labels = torch.full((2 * copies,), label, device=device)
    labels[copies:] = net.shape.classes
    length = net.shape.condition + len(net.turns)
    size = 2 * copies, net.shape.heads, length, net.shape.dim // net.shape.heads
    like = net.output.weight
    caches = [(like.new_zeros(size), like.new_zeros(size)) for _ in net.layers]
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    x = net.cls_embedding({"label": labels})
    ids: list[Tensor] = []
    for place in range(len(net.turns)):
        logits = net.output(_llamagen_pass(net, x, place, caches, mask))[:, -1]
        cond, empty = logits.chunk(2)
        ids.append(drawn(empty + scale * (cond - empty)))
        x = net.tok_embeddings(torch.cat([ids[-1], ids[-1]]))[:, None]
    return torch.stack(ids, 1)


def _llamagen_pass(net: LlamaGenGPT, x: Tensor, place: int, caches: Any, mask: Tensor) -> Tensor:
    rope = net._rope(place, place + 1, x)
    for layer, (keys, values) in zip(net.layers, caches, strict=True):
        attention = layer.attention
        qkv = attention.wqkv(layer.attention_norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for part in qkv)
        keys[:, :, place : place + 1] = rotated(k, rope)
        values[:, :, place : place + 1] = v
        attended = F.scaled_dot_product_attention(
            rotated(q, rope), keys, values, attn_mask=mask[None, None, place : place + 1]
        )
        x = x + attention.wo(attended.transpose(1, 2).flatten(2))
        x = x + layer.feed_forward(layer.ffn_norm(x))
    return net.norm(x)


@torch.no_grad()
def var(net: VARNet, label: int, copies: int, scale: float) -> Tensor:
    """Generate ``copies`` images of a class, ids [copies, T], scale after scale."""
    quantizer = net._quantizer()
    labels = torch.full((2 * copies,), label, device=net.pos_1LC.device)
    labels[copies:] = net.shape.classes
    cond = net._cond({"label": labels})
    x = net._start({"label": labels})
    f = quantizer.blank(copies)
    caches: list[list[Tensor]] = [[] for _ in net.blocks]
    ids: list[Tensor] = []
    last = max(len(net.turns) - 1, 1)
    for k in range(len(net.turns)):
        for block, cache in zip(net.blocks, caches, strict=True):
            x = _var_block(block, x, cond, cache)
        logits = net.head(net.head_nm(x, net.class_emb(labels)))
        t = (scale - 1) * k / last
        conditional, empty = logits.chunk(2)
        ids.append(drawn((1 + t) * conditional - t * empty))
        if k < last:
            f = quantizer.add(f, ids[-1], k)
            word = net.word_embed(quantizer.at_scale(f, k + 1).to(net.word_embed.weight.dtype))
            x = (word + net._places(k + 1)).repeat(2, 1, 1)
    return torch.cat(ids, 1)


def _var_block(block: Any, x: Tensor, cond: Tensor, cache: list[Tensor]) -> Tensor:
    attention = block.attn
    modulation = block.ada_lin(cond).view(len(x), 1, 6, -1)
    gain1, gain2, scale1, scale2, shift1, shift2 = modulation.unbind(2)
    bias = torch.cat([attention.q_bias, attention.zero_k_bias, attention.v_bias])
    qkv = F.linear(normed(x) * (1 + scale1) + shift1, attention.mat_qkv.weight, bias)
    q, k, v = (
        part.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1)
    )
    heat = attention.scale_mul_1H11.clamp_max(math.log(100)).exp()
    q = F.normalize(q, dim=-1) * heat
    k = F.normalize(k, dim=-1)
    if cache:
        k = torch.cat([cache[0], k], 2)
        v = torch.cat([cache[1], v], 2)
    cache[:] = [k, v]
    attended = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    x = x + gain1 * attention.proj(attended.transpose(1, 2).flatten(2))
    return x + gain2 * block.ffn(normed(x) * (1 + scale2) + shift2)


def llamagen_folder(size: Any, folder: Path) -> None:
    """Build a folder in mmrl's export format, with random weights: no library has the class."""
    shape = Shape(size.width, size.layers, size.heads, size.vocab, 10, grid=size.side)
    checkpoints.save(LlamaGenGPT(shape).state_dict(), folder / "gpt.safetensors")
    codec = LlamaGenVQ(size.vocab, 4, 16, 32, (1, 1), 1, used=8)
    checkpoints.save(codec.state_dict(), folder / "vq.safetensors")
    settings = {"size": 2 * size.side, "heads": size.heads}
    (folder / "config.json").write_text(json.dumps(settings))


def var_folder(size: Any, folder: Path) -> None:
    """Build a folder in mmrl's export format, with random weights: no library has the class."""
    sides = tuple(side for side in VAR_SIDES if side <= size.side)
    codec = VARVQ(sides, size.vocab, 4, 32, (1, 1), 1)
    shape = VARShape(size.width, size.layers, size.heads, sides, size.vocab, 4, 10, 4 * size.width)
    net = VARNet(shape, codec.quantize)
    checkpoints.save(net.state_dict(), folder / "var.safetensors")
    checkpoints.save(codec.state_dict(), folder / "vae.safetensors")
