"""Pre-trains the transformer of the tiny Wan by flow matching, text to video or image to video, and
saves the whole pipeline."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.policies.diffusion.diffusers_folder import load_part
from mmrl.worlds.flow_matching import descend, draw
from mmrl.worlds.moving import film, trained_on
from mmrl.worlds.progress import Progress, quiet_libraries
from mmrl.worlds.recipes import WanRecipe
from mmrl.worlds.wan_parts import embed_texts, encode_clips
from samplers.noise import Rng


class Lessons(NamedTuple):
    """Holds everything that is the same in each step, computed once."""

    latents: Tensor  # [N, C, f, h, w] of mean 0 and deviation 1
    condition: Tensor  # [N, 0 or C + mask, f, h, w] further input of an image-to-video network
    caption: Tensor  # [N] long, into texts
    texts: Tensor  # [P + 1, 8, width]; the last is the empty prompt


def build_wan(folder: Path, parts: Path, recipe: WanRecipe, progress: Progress) -> None:
    """Train a transformer for what is in ``parts`` and save a WanPipeline or
    WanImageToVideoPipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanPipeline

    with quiet_libraries():
        models = load_parts(parts)
    transformer = new_transformer(models, recipe)
    loss = partial(flow_loss, transformer, prepare(models, recipe))
    descend(
        transformer, loss, recipe, Rng.of(recipe.seed, "wan flow"), progress, "video transformer"
    )
    pipeline = WanImageToVideoPipeline if recipe.first_frame else WanPipeline
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    with quiet_libraries():
        pipeline(transformer=transformer, scheduler=scheduler, **models).save_pretrained(folder)


def load_parts(folder: Path) -> dict[str, Any]:
    from diffusers import AutoencoderKLWan
    from transformers import T5Tokenizer, UMT5EncoderModel

    classes = {"tokenizer": T5Tokenizer, "text_encoder": UMT5EncoderModel, "vae": AutoencoderKLWan}
    return {name: load_part(cls, str(folder), name) for name, cls in classes.items()}


def new_transformer(models: dict[str, Any], recipe: WanRecipe) -> Any:
    from diffusers import WanTransformer3DModel

    vae = models["vae"].config
    width = 32 * recipe.heads
    condition_channels = vae.z_dim + vae.scale_factor_temporal if recipe.first_frame else 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        transformer = WanTransformer3DModel(
            patch_size=recipe.patch,
            num_attention_heads=recipe.heads,
            attention_head_dim=32,
            in_channels=vae.z_dim + condition_channels,
            out_channels=vae.z_dim,
            text_dim=models["text_encoder"].config.d_model,
            freq_dim=64,
            ffn_dim=4 * width,
            num_layers=recipe.layers,
            rope_max_seq_len=32,
        )
        begin_with_itself(transformer)
    return transformer


@torch.no_grad()
def begin_with_itself(transformer: Any) -> None:
    """Initialise the velocity to nearly the noisy latents themselves, which is right where they are
    noise.

    The input and output projections share orthonormal axes, so noise passes through from the start.
    """
    enter = transformer.patch_embedding
    leave = transformer.proj_out
    z = transformer.config.out_channels
    width = len(enter.weight)
    shape = (width, z, *transformer.config.patch_size)
    axes = torch.linalg.qr(torch.randn(width, math.prod(shape[1:])))[0].view(shape)
    enter.weight[:, :z] = axes
    enter.bias.zero_()
    leave.weight.copy_(axes.permute(2, 3, 4, 1, 0).reshape(-1, width))
    leave.bias.zero_()


def prepare(models: dict[str, Any], recipe: WanRecipe) -> Lessons:
    """Draw, encode and embed everything once; the training loop then runs the transformer only."""
    known = trained_on()
    prompts = (known * (recipe.scenes // len(known) + 1))[: recipe.scenes]
    clips = film(prompts, Rng.of(recipe.seed, "wan")).frames.transpose(1, 2)
    latents = encode_clips(models["vae"], clips)
    condition = first_frames(models["vae"], clips) if recipe.first_frame else latents[:, :0]
    number = {prompt["text"]: i for i, prompt in enumerate(known)}
    texts = embed_texts(models["text_encoder"], models["tokenizer"], [*number, ""])
    return Lessons(latents, condition, torch.tensor([number[p["text"]] for p in prompts]), texts)


def first_frames(vae: Any, clips: Tensor) -> Tensor:
    """Return [B, mask + C, f, h, w] as WanImageToVideoPipeline makes them of clips: which frames
    are conditions, and their latents with grey after the first."""
    known = torch.cat([clips[:, :, :1], torch.full_like(clips[:, :, 1:], 0.5)], 2)
    latents = encode_clips(vae, known)
    mask = latents.new_zeros(len(latents), vae.config.scale_factor_temporal, *latents.shape[2:])
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], 1)


def flow_loss(transformer: Any, lessons: Lessons, recipe: WanRecipe, rng: Rng) -> Tensor:
    """Return the squared error of the velocity ``noise - x`` at ``x + t (noise - x)``."""
    drawn = draw(lessons.latents, lessons.caption, len(lessons.texts) - 1, recipe, rng)
    velocity = transformer(
        hidden_states=torch.cat([drawn.state(), lessons.condition[drawn.row]], 1),
        timestep=1000 * drawn.t,
        encoder_hidden_states=lessons.texts[drawn.caption],
        return_dict=False,
    )[0]
    return F.mse_loss(velocity, drawn.noise - drawn.x)
