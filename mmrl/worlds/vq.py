"""Builds the image tokenizer of the digits world: LlamaGen's VQ, which Janus and aMUSEd share by
weight and VAR begins from.

Training a VQGAN from scratch takes minutes even here. So the codebook comes first: k-means of the
principal components of patches. The decoder learns to draw its entries, at half and then at full
resolution, the encoder to name them; finally both are tuned together with the straight-through
estimator (van den Oord et al. 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.types import Prompt
from mmrl.policies.image_tokens import checkpoints
from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import VQRecipe
from mmrl.worlds.render import render
from mmrl.worlds.scenes import captions, is_held_out
from mmrl.zoo.models.image_tokens.llamagen_vq import LlamaGenVQ
from mmrl.zoo.models.image_tokens.vq_parts import Attention, Residual, nearest
from samplers.noise import Rng

INK = -0.5  # brightness from which a patch is not empty, in -1..1
# length of the coordinate that is the same for all patches: of unit vectors, so that they keep
# distances
LIFT = 4.0


class Pages(NamedTuple):
    """Holds what the tokenizer learns from."""

    images: Tensor  # [N, 3, H, W] in -1..1
    ids: Tensor  # [N, T] long, of the nearest entries
    codes: Tensor  # [N, D, h, w] unit vectors: targets of the encoder


def build_vq(folder: Path, recipe: VQRecipe, progress: Progress) -> None:
    """Write vq.safetensors under LlamaGen's names."""
    vq = new_vq(recipe)
    pages = paginate(vq, recipe)
    teach_half(vq, pages, recipe, progress)
    teach_whole(vq, pages, recipe, progress)
    checkpoints.save(vq.state_dict(), folder / "vq.safetensors")


def load_vq(folder: Path) -> LlamaGenVQ:
    """Load what ``build_vq`` saved, frozen."""
    file = folder / "vq.safetensors"
    weights = checkpoints.read(file)
    return checkpoints.load(LlamaGenVQ.like(weights, str(file)), weights, file).requires_grad_(
        False
    )


def new_vq(recipe: VQRecipe) -> LlamaGenVQ:
    """Make a VQ whose residual branches begin at zero and whose last enlargement copies: a shallow
    network learns faster at first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        vq = LlamaGenVQ(
            recipe.vocab, recipe.dim, recipe.channels, recipe.channels, recipe.mult, 1, used=0
        )
    for module in vq.modules():
        if isinstance(module, Residual | Attention):
            nn.init.zeros_(
                (module.conv2 if isinstance(module, Residual) else module.proj_out).weight
            )
    enlarge = vq.decoder.conv_blocks[-2].get_submodule("upsample.conv")
    nn.init.dirac_(enlarge.get_parameter("weight"))
    for conv in (enlarge, vq.post_quant_conv):
        nn.init.zeros_(conv.get_parameter("bias"))
    # then VAR's 3x3 convolution can stand for it at the border too
    vq.post_quant_conv.get_parameter("bias").requires_grad_(False)
    return vq


def pictured(count: int, seed: int) -> list[Prompt]:
    """Draw ``count`` prompts of one, two or three plain digits in equal parts, none held out."""
    kinds = [captions(kind, 720, seed) for kind in ("single", "pairs", "triples")]
    pools = [[p for p in prompts if not is_held_out(p["text"])] for prompts in kinds]
    rows = Rng.of(seed, "pictured").uniform(torch.arange(count), (2,)).tolist()
    return [pool[int(v * len(pool))] for u, v in rows for pool in (pools[int(u * 3)],)]


def paginate(vq: LlamaGenVQ, recipe: VQRecipe) -> Pages:
    """Draw pictures and find the codebook, which is put into ``vq``: k-means of unit vectors, each
    the principal components of a patch and one number more."""
    rng = Rng.of(recipe.seed, "vq")
    images = render(pictured(recipe.scenes, recipe.seed), rng).images * 2 - 1
    # [N, T, numbers], black is 0
    patches = F.unfold(images, vq.factor, stride=vq.factor).transpose(1, 2) + 1
    inked = patches.amax(2) > INK + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        axes = torch.pca_lowrank(patches[inked], recipe.dim - 1, center=False)[2]
    codes = F.normalize(F.pad(patches @ axes, (0, 1), value=LIFT), dim=-1)
    pool = torch.cat([codes[inked][: recipe.pool], codes[~inked][: recipe.pool // 50]])
    book = k_means(pool, recipe.vocab, rng.fold("codebook"))
    with torch.no_grad():
        vq.quantize.embedding.weight.copy_(F.normalize(book, dim=-1))
    vq.quantize.requires_grad_(False)
    ids = nearest(codes.flatten(0, 1), vq.quantize.codebook()).view(codes.shape[:2])
    side = images.shape[-1] // vq.factor
    return Pages(images, ids, codes.transpose(1, 2).unflatten(2, (side, side)))


def k_means(vectors: Tensor, count: int, rng: Rng, rounds: int = 12) -> Tensor:
    """Return the centres [count, D] of the vectors [N, D]: the first by k-means++ (Arthur and
    Vassilvitskii 2007), then Lloyd's rounds; an empty centre moves to a vector far from its own."""
    chosen = [0]
    far = (vectors - vectors[0]).square().sum(1)
    for draw in rng.uniform(torch.arange(count - 1), ()).tolist():
        chosen.append(
            int(torch.searchsorted(far.cumsum(0), draw * far.sum()).clamp_max(len(vectors) - 1))
        )
        far = torch.minimum(far, (vectors - vectors[chosen[-1]]).square().sum(1))
    book = vectors[chosen]
    for _ in range(rounds):
        book = lloyd(vectors, book)
    return book


def lloyd(vectors: Tensor, book: Tensor) -> Tensor:
    """Run one round: every centre [V, D] moves to the mean of its nearest vectors [N, D]."""
    index = nearest(vectors, book)
    count = torch.bincount(index, minlength=len(book))[:, None]
    means = torch.zeros_like(book).index_add_(0, index, vectors) / count.clamp_min(1)
    far = (vectors - book[index]).square().sum(1).topk(min(len(book), len(vectors))).indices
    replacements = F.pad(vectors[far], (0, 0, 0, len(book) - len(far)))
    return torch.where(count > 0, means, replacements)


def teach_half(vq: LlamaGenVQ, pages: Pages, recipe: VQRecipe, progress: Progress) -> None:
    """Train the decoder without its last resolution, on pictures of half the size."""
    small = F.avg_pool2d(pages.images, 2)

    def loss(rows: Tensor, step: int) -> Tensor:
        return (
            4
            * F.mse_loss(half(vq, entries(vq, pages.ids[rows])), small[rows], reduction="sum")
            / len(rows)
        )

    learnt = [*vq.decoder.parameters(), vq.post_quant_conv.weight]
    descend(
        learnt,
        loss,
        len(small),
        recipe.half_steps,
        2 * recipe.batch,
        recipe.lr,
        progress,
        "tokenizer, small",
    )


def teach_whole(vq: LlamaGenVQ, pages: Pages, recipe: VQRecipe, progress: Progress) -> None:
    """Train encoder and decoder: first separately, in the second half together, straight through
    the codebook."""

    def loss(rows: Tensor, step: int) -> Tensor:
        x = pages.images[rows]
        raw = vq.quant_conv(vq.encoder(x))
        q = entries(vq, pages.ids[rows])
        if step >= recipe.steps // 2:
            z = F.normalize(raw, dim=1)
            ids = nearest(z.permute(0, 2, 3, 1).flatten(0, 2), vq.quantize.codebook()).view(
                len(x), -1
            )
            q = z + (entries(vq, ids) - z).detach()
        code_loss = recipe.code_weight * F.mse_loss(raw, pages.codes[rows], reduction="sum")
        return (rebuilt(vq.decoder(vq.post_quant_conv(q)), x, recipe) + code_loss) / len(x)

    learnt = [p for p in vq.parameters() if p.requires_grad]
    descend(
        learnt,
        loss,
        len(pages.images),
        recipe.steps,
        recipe.batch,
        recipe.lr,
        progress,
        "tokenizer",
    )
    vq.eval().requires_grad_(False)


def rebuilt(back: Tensor, x: Tensor, recipe: VQRecipe) -> Tensor:
    """Return the squared error of pictures and of their blurred versions, summed over all
    pixels."""
    coarse = F.mse_loss(F.avg_pool2d(back, 8, 4), F.avg_pool2d(x, 8, 4), reduction="sum")
    return F.mse_loss(back, x, reduction="sum") + recipe.coarse * coarse


def entries(vq: LlamaGenVQ, ids: Tensor) -> Tensor:
    """Return the entries [B, D, h, w] of ids [B, T] of a square."""
    side = round(ids.shape[1] ** 0.5)
    flat = vq.quantize.codebook()[ids].transpose(1, 2)
    square: Tensor = flat.unflatten(2, (side, side))
    return square


def half(vq: LlamaGenVQ, q: Tensor) -> Tensor:
    """Decode without the decoder's last resolution: [B, 3, H / 2, W / 2]."""
    decoder = vq.decoder
    x: Tensor = decoder.conv_in(vq.post_quant_conv(q))
    last = decoder.conv_blocks[-2].get_submodule("res").children()
    for part in (*decoder.mid, *decoder.conv_blocks[:-2], *last):
        x = part(x)
    images: Tensor = decoder.conv_out(F.silu(decoder.norm_out(x)))
    return images


def descend(
    learnt: Sequence[Tensor],
    loss: Callable[[Tensor, int], Tensor],
    count: int,
    steps: int,
    batch: int,
    lr: float,
    progress: Progress,
    what: str,
) -> None:
    """Train by AdamW with one cycle of the learning rate; ``loss`` is given row numbers below
    ``count`` and the step."""
    optimizer = torch.optim.AdamW(learnt, lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=steps + 1, pct_start=0.1
    )
    for step in progress.steps(what, steps, optimizer, schedule):
        rows = (Rng.of("vq", what).uniform(torch.arange(batch), (), step) * count).long()
        optimizer.zero_grad()
        loss(rows, step).backward()
        nn.utils.clip_grad_norm_(learnt, 200.0)
        optimizer.step()
        schedule.step()
