"""Builds the Stable Diffusion 3 of the words world: it half spells."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.types import Prompt
from mmrl.worlds.flow import new_transformer
from mmrl.worlds.flow_matching import descend, draw
from mmrl.worlds.progress import Progress, quiet_libraries
from mmrl.worlds.recipes import WordsRecipe
from mmrl.worlds.text import clip_tokenizer, encoded, t5_tokenizer, text_encoders, tokens
from mmrl.worlds.vae import encode, fit_vae, new_vae
from mmrl.worlds.words import lettering
from mmrl.worlds.words.signs import COLORS, GROUNDS, LONGEST, WORDS, captions, is_held_out, styled
from samplers.noise import Rng

STYLE = ("a", "the", "in", "on", "sign", "that", "says", "word", "words", *COLORS, *GROUNDS)
SHORT = 16  # tokens of CLIP: the style; its words are cut off
LONG = 48  # characters of T5: all of a caption
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
NAMES = ("", "_2", "_3")  # of the text encoders


class Lessons(NamedTuple):
    """Holds everything that is the same in each step, computed once."""

    latents: Tensor  # [N, C, 8, 24] scaled and shifted
    caption: Tensor  # [N] long, into ids
    ids: dict[str, Tensor]  # [P + 1, length] of every tokenizer; the last is the empty prompt


def build_words(folder: Path, recipe: WordsRecipe, progress: Progress) -> None:
    """Train autoencoder, text encoders and transformer, and save a StableDiffusion3Pipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    models = text_models(recipe)
    models["vae"] = vae = new_vae(recipe.vae)
    rng = Rng.of(recipe.seed, "words")
    prompts = training_prompts(recipe)
    pictures = lettering.draw(prompts, rng)
    fit_vae(vae, pictures[: recipe.vae.scenes], recipe.vae, progress)
    latents = (encode(vae, pictures) - vae.config.shift_factor) * vae.config.scaling_factor
    number = {text: i for i, text in enumerate(dict.fromkeys(p["text"] for p in prompts))}
    ids = {name: tokens(models, name, [*number, ""]) for name in NAMES}
    lessons = Lessons(latents, torch.tensor([number[p["text"]] for p in prompts]), ids)
    transformer = new_transformer(models, recipe, lettering.WIDTH)
    trained = nn.ModuleList([transformer, *(models[f"text_encoder{name}"] for name in NAMES)])
    loss = partial(flow_loss, transformer, models, lessons)
    descend(trained, loss, recipe, rng.fold("flow"), progress, "transformer and text encoders")
    with quiet_libraries():
        StableDiffusion3Pipeline(
            transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0), **models
        ).save_pretrained(folder)


def training_prompts(recipe: WordsRecipe) -> list[Prompt]:
    """Draw captions of training words, and of random letters so that a word never seen can be
    spelt; held-out words are in neither."""
    rng = Rng.of(recipe.seed, "words", "prompts")
    known = [p["words"].lower() for p in captions("mixed", 1800, held_out=False)]
    rows = rng.uniform(rng.rows(recipe.pictures, 1), (5 + LONGEST,)).tolist()
    forbidden = {word for word in WORDS if is_held_out(word)}
    prompts = []
    for kind, which, form, color, ground, *letters in rows:
        length = 2 + int(which * 6)
        word = "".join(ALPHABET[int(x * 26)] for x in letters[:length])
        random = kind < recipe.letters and word not in forbidden
        words = word if random else known[int(which * len(known))]
        prompts.append(styled(words, form, color, ground))
    return prompts


def text_models(recipe: WordsRecipe) -> dict[str, Any]:
    """Make tokenizers and text encoders, as StableDiffusion3Pipeline names them."""
    clip = partial(clip_tokenizer, STYLE, SHORT)
    tokenizers = {
        "tokenizer": clip(),
        "tokenizer_2": clip(),
        "tokenizer_3": t5_tokenizer((), LONG),
    }
    return tokenizers | text_encoders(recipe.text, tokenizers)


def flow_loss(
    transformer: Any, models: dict[str, Any], lessons: Lessons, recipe: WordsRecipe, rng: Rng
) -> Tensor:
    """Return the squared error of the velocity ``noise - x`` at ``x + t (noise - x)``."""
    empty = len(lessons.ids[""]) - 1
    drawn = draw(lessons.latents, lessons.caption, empty, recipe, rng)
    text, pooled = encoded(models, {name: ids[drawn.caption] for name, ids in lessons.ids.items()})
    velocity = transformer(
        hidden_states=drawn.state(),
        timestep=1000 * drawn.t,
        return_dict=False,
        encoder_hidden_states=text,
        pooled_projections=pooled,
    )[0]
    return F.mse_loss(velocity, drawn.noise - drawn.x)
