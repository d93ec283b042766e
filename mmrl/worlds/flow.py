"""Pre-trains the transformer of the tiny Stable Diffusion 3 by flow matching, and saves the whole
pipeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.policies.diffusion.diffusers_folder import load_part
from mmrl.worlds.flow_matching import descend, draw
from mmrl.worlds.progress import Progress, quiet_libraries
from mmrl.worlds.recipes import FlowRecipe, WordsRecipe
from mmrl.worlds.render import render
from mmrl.worlds.scenes import CANVAS
from mmrl.worlds.text import embed
from mmrl.worlds.vae import encode, training_prompts
from samplers.noise import Rng


class Lessons(NamedTuple):
    """Holds everything that is the same in each step, computed once."""

    latents: Tensor  # [N, 4, 8, 8] scaled and shifted
    caption: Tensor  # [N] long, into tokens and pooled
    tokens: Tensor  # [P + 1, 32, joint]; the last is the empty prompt
    pooled: Tensor  # [P + 1, width]


def build_sd3(folder: Path, parts: Path, recipe: FlowRecipe, progress: Progress) -> None:
    """Train a transformer for the encoders and the autoencoder in ``parts`` and save a
    StableDiffusion3Pipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    with quiet_libraries():
        models = load_parts(parts)
    transformer = new_transformer(models, recipe)
    loss = partial(flow_loss, transformer, prepare(models, recipe))
    descend(transformer, loss, recipe, Rng.of(recipe.seed, "flow"), progress, "flow transformer")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    with quiet_libraries():
        StableDiffusion3Pipeline(
            transformer=transformer, scheduler=scheduler, **models
        ).save_pretrained(folder)


def load_parts(folder: Path) -> dict[str, Any]:
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

    classes = {
        "tokenizer": CLIPTokenizer,
        "tokenizer_2": CLIPTokenizer,
        "tokenizer_3": T5Tokenizer,
        "text_encoder": CLIPTextModelWithProjection,
        "text_encoder_2": CLIPTextModelWithProjection,
        "text_encoder_3": T5EncoderModel,
        "vae": AutoencoderKL,
    }
    models = {name: load_part(cls, str(folder), name) for name, cls in classes.items()}
    # a path of this machine would be saved with the pipeline
    models["vae"].register_to_config(_name_or_path="")
    return models


def new_transformer(
    models: dict[str, Any], recipe: FlowRecipe | WordsRecipe, longest: int = CANVAS
) -> Any:
    """Make a random transformer for pictures of at most ``longest`` pixels a side."""
    from diffusers import SD3Transformer2DModel

    latent = models["vae"].config.latent_channels
    joint = models["text_encoder_3"].config.d_model
    pooled = sum(models[name].config.projection_dim for name in ("text_encoder", "text_encoder_2"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        transformer = SD3Transformer2DModel(
            sample_size=longest // 4,
            patch_size=2,
            in_channels=latent,
            out_channels=latent,
            num_layers=recipe.layers,
            attention_head_dim=32,
            num_attention_heads=recipe.heads,
            caption_projection_dim=32 * recipe.heads,
            joint_attention_dim=joint,
            pooled_projection_dim=pooled,
            pos_embed_max_size=longest // 8,
            qk_norm="rms_norm",
        )
    nn.init.zeros_(transformer.proj_out.weight)  # a velocity of zero is the best first guess
    nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def prepare(models: dict[str, Any], recipe: FlowRecipe) -> Lessons:
    """Draw, encode and embed everything once; the training loop then runs the transformer only."""
    prompts = training_prompts(recipe.scenes, recipe.single, recipe.seed)
    number = {text: i for i, text in enumerate(dict.fromkeys(p["text"] for p in prompts))}
    vae = models["vae"]
    latents = encode(vae, render(prompts, Rng.of(recipe.seed, "flow")).images)
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return Lessons(
        latents, torch.tensor([number[p["text"]] for p in prompts]), *embed(models, [*number, ""])
    )


def flow_loss(transformer: Any, lessons: Lessons, recipe: FlowRecipe, rng: Rng) -> Tensor:
    """Return the squared error of the velocity ``noise - x`` at ``x + t (noise - x)``."""
    drawn = draw(lessons.latents, lessons.caption, len(lessons.tokens) - 1, recipe, rng)
    velocity = transformer(
        hidden_states=drawn.state(),
        timestep=1000 * drawn.t,
        return_dict=False,
        encoder_hidden_states=lessons.tokens[drawn.caption],
        pooled_projections=lessons.pooled[drawn.caption],
    )[0]
    return F.mse_loss(velocity, drawn.noise - drawn.x)
