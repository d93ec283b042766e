"""Trains the autoencoder of the tiny Stable Diffusion 3, and builds the folder of all parts but the
transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.types import Prompt
from mmrl.worlds.progress import Progress, quiet_libraries
from mmrl.worlds.recipes import PartsRecipe, VaeRecipe
from mmrl.worlds.render import render
from mmrl.worlds.scenes import CANVAS, captions, is_held_out
from mmrl.worlds.text import teach_text, text_models
from samplers.noise import Rng


def training_prompts(count: int, single: float, seed: int) -> list[Prompt]:
    """Draw ``count`` prompts, a share ``single`` with one digit, the rest sized, pairs and triples;
    no held-out caption."""
    lone = [p for p in captions("single", 240, seed) if not is_held_out(p["text"])]
    crowded = [
        p
        for k in ("sized", "pairs", "triples")
        for p in captions(k, 720, seed)
        if not is_held_out(p["text"])
    ]
    rows = Rng.of(seed, "prompts").uniform(torch.arange(count), (2,)).tolist()
    return [
        pool[int(v * len(pool))] for u, v in rows for pool in (lone if u < single else crowded,)
    ]


def build_parts(folder: Path, recipe: PartsRecipe, progress: Progress) -> None:
    """Train and save tokenizers, text encoders and autoencoder, each in the pipeline's
    subfolder."""
    models = text_models(recipe.text)
    teach_text(models, recipe.text, progress)
    models["vae"] = new_vae(recipe.vae)
    teach_vae(models["vae"], recipe.vae, progress)
    with quiet_libraries():
        for name, model in models.items():
            model.save_pretrained(folder / name)


def new_vae(recipe: VaeRecipe) -> Any:
    from diffusers import AutoencoderKL

    levels = len(recipe.channels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return AutoencoderKL(
            block_out_channels=recipe.channels,
            latent_channels=recipe.latent,
            layers_per_block=1,
            norm_num_groups=8,
            down_block_types=["DownEncoderBlock2D"] * levels,
            up_block_types=["UpDecoderBlock2D"] * levels,
            sample_size=CANVAS,
            mid_block_add_attention=False,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )


def teach_vae(vae: Any, recipe: VaeRecipe, progress: Progress) -> None:
    """Train on rendered scenes."""
    rng = Rng.of(recipe.seed, "vae")
    prompts = training_prompts(recipe.scenes, recipe.single, recipe.seed)
    fit_vae(vae, render(prompts, rng).images, recipe, progress)


def fit_vae(vae: Any, images: Tensor, recipe: VaeRecipe, progress: Progress) -> None:
    """Reconstruct images [N, 3, H, W] in 0..1, then set scale and shift so that latents have mean 0
    and deviation 1."""
    rng = Rng.of(recipe.seed, "vae")
    images = images * 2 - 1
    images = images.contiguous(memory_format=torch.channels_last)
    vae.to(memory_format=torch.channels_last)  # a third faster on a CPU
    optimizer = torch.optim.AdamW(vae.parameters(), recipe.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, total_steps=recipe.steps, pct_start=0.1
    )
    for step in progress.steps("autoencoder", recipe.steps, optimizer, schedule):
        rows = (rng.fold("rows").uniform(torch.arange(recipe.batch), (), step) * len(images)).long()
        loss = vae_loss(vae, images[rows], recipe, rng.fold("noise", step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 200.0)
        optimizer.step()
        schedule.step()
    vae.eval().requires_grad_(False)
    latents = encode(vae, images[:2000] / 2 + 0.5)
    vae.register_to_config(
        shift_factor=float(latents.mean()), scaling_factor=float(1 / latents.std())
    )


def vae_loss(vae: Any, x: Tensor, recipe: VaeRecipe, rng: Rng) -> Tensor:
    """Return the squared error of the picture and its blurred self (sums), plus a little KL."""
    posterior = vae.encode(x).latent_dist
    noise = rng.normal(torch.arange(len(x)), tuple(posterior.mean.shape[1:]))
    back = vae.decode(posterior.mean + posterior.std * noise).sample
    coarse = F.mse_loss(F.avg_pool2d(back, 8, 4), F.avg_pool2d(x, 8, 4), reduction="sum")
    error = F.mse_loss(back, x, reduction="sum") + recipe.coarse * coarse
    kl: Tensor = posterior.kl().mean()
    return error / len(x) + recipe.kl * x[0].numel() * kl


@torch.no_grad()
def encode(vae: Any, images: Tensor) -> Tensor:
    """Return mean latents [B, 4, 8, 8] of images [B, 3, 32, 32] in 0..1, unscaled and unshifted."""
    return torch.cat([vae.encode(2 * part - 1).latent_dist.mean for part in images.split(256)])
