"""LlamaGen's and VAR's transformers against their published definitions, written again, a head at a
time."""

import pytest
import torch
from torch.nn import functional as F

from mmrl.zoo.models.image_tokens.var_net import Shape, VARNet
from mmrl.zoo.models.image_tokens.var_vq import Quantizer
from samplers.noise import Rng
from tests.fixtures.image_tokens import at, every, policy_of

SIDES = (1, 2, 3)
VAR_IDS = every(2, 14)[[4711, 9001]]


def attention(q, k, v, seen, scale):
    """[n, D] of one head; ``seen`` [n, n] bool."""
    return (q @ k.T * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v


# --------------------------------------------------------------------------------------------------
# VAR


def var_inputs(w, quantizer, label, ids):
    """[L, C]: the class, then each next scale's input from the image so far."""
    x = [w["class_emb.weight"][label][None] + w["pos_start"][0]]
    codebook = quantizer.embedding.weight
    last = SIDES[-1]
    start = 0
    image = torch.zeros(1, codebook.shape[1], last, last, dtype=codebook.dtype)
    for k, side in enumerate(SIDES[:-1]):
        h = codebook[ids[start : start + side * side]].T.reshape(1, -1, side, side)
        h = F.interpolate(h, size=(last, last), mode="bicubic")
        conv = quantizer.quant_resi.qresi_ls[(0, 2)[k]]
        image = image + 0.5 * h + 0.5 * F.conv2d(h, conv.weight, conv.bias, padding=1)
        pooled = F.adaptive_avg_pool2d(image, SIDES[k + 1])[0].flatten(1).T
        x.append(pooled @ w["word_embed.weight"].T + w["word_embed.bias"])
        start += side * side
    level = torch.arange(len(SIDES)).repeat_interleave(torch.tensor(SIDES) ** 2)
    return torch.cat(x) + w["lvl_embed.weight"][level] + w["pos_1LC"][0], level


def var_block(w, x, modulation, level):
    """The six vectors are, in this order, gains, scales and shifts, of attention and of the
    feed-forward layer."""
    gain1, gain2, scale1, scale2, shift1, shift2 = modulation
    heads = w["attn.scale_mul_1H11"].flatten()
    norm = normed(x)
    bias = torch.cat([w["attn.q_bias"], torch.zeros_like(w["attn.q_bias"]), w["attn.v_bias"]])
    parts = ((norm * (1 + scale1) + shift1) @ w["attn.mat_qkv.weight"].T + bias).chunk(3, 1)
    heads_out = []
    for q, k, v, scale in zip(*(part.chunk(len(heads), 1) for part in parts), heads, strict=True):
        q = q / q.norm(dim=1, keepdim=True)
        k = k / k.norm(dim=1, keepdim=True)
        heads_out.append(attention(q, k, v, level[:, None] >= level, scale.exp().clamp(max=100)))
    x = x + gain1 * (torch.cat(heads_out, 1) @ w["attn.proj.weight"].T + w["attn.proj.bias"])
    h = (normed(x) * (1 + scale2) + shift2) @ w["ffn.fc1.weight"].T + w["ffn.fc1.bias"]
    return x + gain2 * (F.gelu(h, approximate="tanh") @ w["ffn.fc2.weight"].T + w["ffn.fc2.bias"])


def normed(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()


def layer(w, name):
    """The weights below ``name``."""
    return {key.removeprefix(name): w[key] for key in w if key.startswith(name)}


def var_logits(w, quantizer, label, ids):
    x, level = var_inputs(w, quantizer, label, ids)
    about = F.silu(w["class_emb.weight"][label])
    for i in range(2):
        weights = layer(w, f"blocks.{i}.")
        if "ada_gss" in weights:
            modulation = (
                w["shared_ada_lin.1.weight"] @ about
                + w["shared_ada_lin.1.bias"]
                + weights["ada_gss"].flatten()
            )
        else:
            modulation = weights["ada_lin.1.weight"] @ about + weights["ada_lin.1.bias"]
        x = var_block(weights, x, modulation.view(6, -1), level)
    scale, shift = (w["head_nm.ada_lin.1.weight"] @ about + w["head_nm.ada_lin.1.bias"]).chunk(2)
    return (normed(x) * (1 + scale) + shift) @ w["head.weight"].T + w["head.bias"]


def random(module):
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(
                Rng.of("own", i).normal(torch.zeros(1), (p.numel(),), dtype=p.dtype).view_as(p) / 2
            )
    return module


@torch.no_grad()
def test_var_with_shared_modulation_is_what_was_published():
    quantizer = random(Quantizer(2, 4, SIDES).double())
    net = random(VARNet(Shape(16, 2, 2, SIDES, 2, 4, 5, 24, shared=True), quantizer).double())
    net.blocks[0].attn.scale_mul_1H11[0, 0] = 7.0  # beyond ln 100, where it is cut
    logits = net.vocabulary(net.teach({"label": torch.tensor([3, 5])}, VAR_IDS))
    for row, label in enumerate((3, 5)):  # of a class, and of none
        expected = var_logits(net.state_dict(), quantizer, label, VAR_IDS[row])
        torch.testing.assert_close(logits[row], expected, atol=1e-10, rtol=1e-9)


@torch.no_grad()
def test_vars_guidance_is_what_was_published():
    """Against the class after the last one, from none at the first scale to ``guidance`` - 1 = 3
    at the last."""
    policy = policy_of("var-3", vocab=2, guidance_scale=4.0)
    quantizer = policy.vae.quantize
    t = torch.tensor([0.0] + [1.5] * 4 + [3.0] * 9, dtype=torch.float64)[:, None]
    scored = policy.dist(at(policy, VAR_IDS, {"label": 3})).log_prob(VAR_IDS)
    for row, ids in enumerate(VAR_IDS):
        z, empty = (var_logits(policy.net.state_dict(), quantizer, label, ids) for label in (3, 5))
        expected = ((1 + t) * z - t * empty).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(scored[row], expected, atol=1e-10, rtol=1e-9)


# --------------------------------------------------------------------------------------------------
# LlamaGen


def turned(x, condition, grid):
    """[n, D] of one head: adjacent pairs turn by row (the first half of them) and by column; a
    condition is zeroed."""
    n = len(x)
    pairs = x.shape[1] // 2
    z = torch.view_as_complex(x.unflatten(1, (pairs, 2)).contiguous())
    factor = torch.zeros_like(z)
    for place in range(condition, n):
        for i in range(pairs):
            where = divmod(place - condition, grid)[i >= pairs // 2]
            angle = torch.tensor(where * 10000.0 ** (-2 * (i % (pairs // 2)) / pairs))
            factor[place, i] = torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(z * factor).flatten(1)


def rms(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def llamagen_logits(w, condition, ids, heads, grid):
    """[T, V] after the condition [n, C], of tokens [T]."""
    x = torch.cat([condition, w["tok_embeddings.weight"][ids[:-1]]])
    visible = torch.ones(len(x), len(x)).tril().bool()
    for i in range(2):
        weights = layer(w, f"layers.{i}.")
        parts = (
            rms(x, weights["attention_norm.weight"]) @ weights["attention.wqkv.weight"].T
        ).chunk(3, 1)
        heads_out = []
        for q, k, v in zip(*(part.chunk(heads, 1) for part in parts), strict=True):
            q, k = (turned(vectors, len(condition), grid) for vectors in (q, k))
            heads_out.append(attention(q, k, v, visible, q.shape[1] ** -0.5))
        x = x + torch.cat(heads_out, 1) @ weights["attention.wo.weight"].T
        h = rms(x, weights["ffn_norm.weight"])
        gated = F.silu(h @ weights["feed_forward.w1.weight"].T) * (
            h @ weights["feed_forward.w3.weight"].T
        )
        x = x + gated @ weights["feed_forward.w2.weight"].T
    return (rms(x, w["norm.weight"]) @ w["output.weight"].T)[len(condition) - 1 :]


def conditions(policy, text, prompt):
    """[n, C] of a prompt, and of none: the class after the last one, or a learnt text as long as
    the prompt."""
    w, (inputs,) = policy.net.state_dict(), policy.encode([prompt])
    if not text:
        table = w["cls_embedding.embedding_table.weight"]
        return table[[prompt["label"]]], table[[5]]
    words = inputs["mask"][0].bool()
    assert 1 < words.sum() < len(words)
    return [
        F.gelu(row[words].double() @ w["cls_embedding.cap_proj.fc1.weight"].T, approximate="tanh")
        @ w["cls_embedding.cap_proj.fc2.weight"].T
        for row in (inputs["text"][0], w["cls_embedding.uncond_embedding"])
    ]


@pytest.mark.parametrize("text", [False, True])
@torch.no_grad()
def test_llamagen_and_its_guidance_are_what_was_published(text):
    """Of texts what is padded may be left out: a condition has no positions."""
    policy = policy_of("llamagen" if text else "llamagen-classes", guidance_scale=4.0)
    net = policy.net
    ids = every(3, 4)[[46, 61]]
    prompts = [{"text": "a red seven", "label": 2}, {"text": "two", "label": 0}]
    logits = net.vocabulary(net.teach(policy.collate(policy.encode(prompts)), ids))
    for row, prompt in enumerate(prompts):
        z, empty = (
            llamagen_logits(net.state_dict(), c, ids[row], 2, 2)
            for c in conditions(policy, text, prompt)
        )
        # its rotations are float32
        torch.testing.assert_close(logits[row], z, atol=1e-6, rtol=1e-6)
        expected = (empty + 4 * (z - empty)).log_softmax(-1).gather(1, ids[row][:, None])[:, 0]
        scored = policy.dist(at(policy, ids[row : row + 1], prompt)).log_prob(ids[row : row + 1])[0]
        torch.testing.assert_close(scored, expected, atol=1e-5, rtol=1e-6)
