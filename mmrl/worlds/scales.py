"""Builds VAR's multi-scale VQ of the digits world: the tokenizer's network with a residual codebook
of all scales."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import VQRecipe
from mmrl.worlds.render import render
from mmrl.worlds.vq import descend, k_means, lloyd, load_vq, pictured, rebuilt
from mmrl.worlds.vq_names import JANUS, folded, renamed
from mmrl.zoo.models.image_tokens.llamagen_vq import LlamaGenVQ
from mmrl.zoo.models.image_tokens.var_vq import VARVQ
from mmrl.zoo.models.image_tokens.vq_parts import nearest
from samplers.noise import Rng

FITS = 10  # rounds of fitting the codebook to residuals, which it changes itself


def build_scales(vq: Path, recipe: VQRecipe, progress: Progress) -> VARVQ:
    """Train a VARVQ that rebuilds pictures from ids of all scales."""
    vq_scales = begun(load_vq(vq), recipe)
    images = (
        render(pictured(recipe.scenes, recipe.seed), Rng.of(recipe.seed, "scales")).images * 2 - 1
    )
    fit(vq_scales, images[: recipe.pool // 10])
    tune(vq_scales, images, recipe, progress)
    return vq_scales.eval().requires_grad_(False)


@torch.no_grad()
def begun(vq: LlamaGenVQ, recipe: VQRecipe) -> VARVQ:
    """Copy a VQ into VARVQ's classes: 1x1 convolutions around the codebook are multiplied into
    their neighbours, VAR's own begin as the identity."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        new = VARVQ(recipe.sides, recipe.vocab, recipe.dim, recipe.channels, recipe.mult, 1)
    shared = new.quantize.quant_resi.get_submodule("qresi_ls").children()
    for conv in (new.quant_conv, new.post_quant_conv, *shared):
        nn.init.dirac_(conv.get_parameter("weight"))
        nn.init.zeros_(conv.get_parameter("bias"))
    nn.init.zeros_(new.quantize.embedding.weight)
    named = renamed(folded(vq), JANUS)
    last = len(recipe.mult) - 1
    named = {
        re.sub(r"decoder\.up\.(\d+)", lambda m: f"decoder.up.{last - int(m[1])}", k): v
        for k, v in named.items()
    }
    fused = {k: v for k, v in named.items() if not re.search(r"attn\w*(\.\d+)?\.[qkv]\.", k)}
    for name in (k for k in named if re.search(r"attn\w*(\.\d+)?\.q\.", k)):
        parts = [named[re.sub(r"\.q\.", f".{part}.", name)] for part in "qkv"]
        fused[re.sub(r"\.q\.", ".qkv.", name)] = torch.cat(parts)
    new.load_state_dict({**new.state_dict(), **fused}, strict=True)
    return new


@torch.no_grad()
def fit(vq: VARVQ, images: Tensor) -> None:
    """Fit the codebook by k-means of the residuals of every scale, which depend on the codebook.
    Entry 0 stays zero, so that no scale need make it worse; the best round counts."""
    z = torch.cat([vq.quant_conv(vq.encoder(part)) for part in images.split(250)])
    book = vq.quantize.embedding.weight
    centres = k_means(torch.cat(residuals(vq, z)[0]), len(book), Rng.of("scales"))
    best = float("inf")
    previous = centres
    for _ in range(FITS):
        book.copy_(torch.cat([torch.zeros_like(centres[:1]), centres[1:]]))
        compared, f = residuals(vq, z)
        error = float((f - z).square().mean())
        if error < best:
            best = error
            previous = book.clone()
        centres = lloyd(torch.cat(compared), book)
    book.copy_(previous)


def residuals(vq: VARVQ, z: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the vectors [N, D] that scales compare with entries, and z [B, D, p, p] quantised."""
    quantize = vq.quantize
    f = torch.zeros_like(z)
    compared = []
    for k in range(len(quantize.sides)):
        rest = quantize.at_scale((z - f).detach(), k)  # [B, p^2, D]
        compared.append(rest.flatten(0, 1))
        f = quantize.add(
            f, nearest(compared[-1], quantize.embedding.weight).view(rest.shape[:2]), k
        )
    return compared, f


def tune(vq: VARVQ, images: Tensor, recipe: VQRecipe, progress: Progress) -> None:
    """Train straight through all scales; codebook and shared convolutions follow the latents."""

    def loss(rows: Tensor, step: int) -> Tensor:
        x = images[rows]
        with torch.no_grad():  # the encoder stays
            z = vq.quant_conv(vq.encoder(x))
        f = residuals(vq, z)[1]
        back = vq.decoder(vq.post_quant_conv(f.detach()))
        return (
            rebuilt(back, x, recipe) + recipe.code_weight * F.mse_loss(f, z, reduction="sum")
        ) / len(x)

    learnt = [*vq.decoder.parameters(), *vq.post_quant_conv.parameters(), *vq.quantize.parameters()]
    descend(
        learnt,
        loss,
        len(images),
        recipe.scale_steps,
        recipe.batch,
        recipe.lr / 2,
        progress,
        "tokenizer, scales",
    )
