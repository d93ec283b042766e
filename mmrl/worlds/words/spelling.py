"""Builds the Stable Diffusion 3 of the words world."""

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
from mmrl.worlds.words.positions import teach_positions
from mmrl.worlds.words.signs import (
    COLORS,
    COUNT,
    GROUNDS,
    LONGEST,
    WORDS,
    captions,
    is_held_out,
    styled,
)
from samplers.noise import Rng

STYLE = ("a", "the", "in", "on", "sign", "that", "says", "word", "words", *COLORS, *GROUNDS)
SHORT = 24  # tokens of CLIP: one for a word of the style, one for a letter of others
LONG = 28  # pieces of T5, likewise
POSITIONED = 4000  # captions that teach where letters stand
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
NAMES = ("", "_2", "_3")  # of the text encoders


class Lessons(NamedTuple):
    """Holds everything that is the same in each step, computed once."""

    latents: Tensor  # [N, C, 8, 24] scaled and shifted
    caption: Tensor  # [N] long, into ids
    ids: dict[str, Tensor]  # [P + 1, length] of every tokenizer; the last is the empty prompt


def build_words(folder: Path, recipe: WordsRecipe, progress: Progress) -> None:
    """Train autoencoder, text encoders and transformer, on a CUDA device if there is one, and save
    a StableDiffusion3Pipeline in half precision."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = text_models(recipe)
    models["vae"] = vae = new_vae(recipe.vae).to(device)
    rng = Rng.of(recipe.seed, "words")
    prompts = training_prompts(recipe)
    pictures = lettering.draw(prompts, rng).to(device)
    number = {text: i for i, text in enumerate(dict.fromkeys(p["text"] for p in prompts))}
    ids = {name: tokens(models, name, [*number, ""]).to(device) for name in NAMES}
    captioned = torch.tensor([number[p["text"]] for p in prompts], device=device)
    transformer = new_transformer(models, recipe, lettering.WIDTH)
    trained = nn.ModuleList([transformer, *(models[f"text_encoder{name}"] for name in NAMES)])
    trained.to(device)
    first = prompts[:POSITIONED]
    of_first = ids["_3"][captioned[:POSITIONED]]
    t5, characters = models["text_encoder_3"], models["tokenizer_3"]
    teach_positions(t5, characters, first, of_first, recipe.positions, progress)
    with device:
        fit_vae(vae, pictures[: recipe.vae.scenes], recipe.vae, progress)
        latents = (encode(vae, pictures) - vae.config.shift_factor) * vae.config.scaling_factor
        loss = partial(flow_loss, transformer, models, Lessons(latents, captioned, ids))
        descend(trained, loss, recipe, rng.fold("flow"), progress, "transformer and text encoders")
    nn.ModuleList([trained, vae]).half()
    with quiet_libraries():
        StableDiffusion3Pipeline(
            transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0), **models
        ).save_pretrained(folder)


def training_prompts(recipe: WordsRecipe) -> list[Prompt]:
    """Draw captions of training words, most of them single, and of random letters so that a word
    never seen can be spelt; held-out words are in none of them."""
    rng = Rng.of(recipe.seed, "words", "prompts")
    single, pairs, triples = (captions(kind, 600, held_out=False) for kind in COUNT)
    known = [p["words"].lower() for p in single]
    several = [p["words"].lower() for p in pairs + triples]
    rows = rng.uniform(rng.rows(recipe.pictures, 1), (5 + LONGEST,)).tolist()
    forbidden = {word for word in WORDS if is_held_out(word)}
    prompts = []
    for kind, which, form, color, ground, *letters in rows:
        length = 2 + int(which * 6)
        word = "".join(ALPHABET[int(x * 26)] for x in letters[:length])
        random = kind < recipe.letters and word not in forbidden
        pool = known if kind < recipe.letters + recipe.single else several
        words = word if random else pool[int(which * len(pool))]
        prompts.append(styled(words, form, color, ground))
    return prompts


def text_models(recipe: WordsRecipe) -> dict[str, Any]:
    """Make tokenizers and text encoders, as StableDiffusion3Pipeline names them."""
    clip = partial(clip_tokenizer, STYLE, SHORT)
    tokenizers = {
        "tokenizer": clip(),
        "tokenizer_2": clip(),
        "tokenizer_3": t5_tokenizer(STYLE, LONG),
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
