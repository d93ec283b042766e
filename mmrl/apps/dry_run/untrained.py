"""Builds the networks of the digits world from their recipes, untrained, so that a dry run works on
a machine without built artifacts.

Sizes are those of the built folders; weights are random, and replaced by fakes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn

from mmrl.worlds import recipes
from mmrl.worlds.recipes import PainterRecipe, VLMRecipe, VQRecipe, WanPartsRecipe, WanRecipe


def _vlm(recipe: VLMRecipe) -> nn.Module:
    from mmrl.worlds import vlm

    net: nn.Module = vlm.new_model(recipe, vlm.tokenizer())
    return net


def _llamagen(recipe: PainterRecipe, images: VQRecipe) -> nn.Module:
    from mmrl.worlds import llamagen, vq

    return _plain(llamagen.new_gpt(vq.new_vq(images), recipe))


def _janus(recipe: PainterRecipe, images: VQRecipe) -> nn.Module:
    from mmrl.worlds import janus, vq
    from mmrl.zoo.models.unified.net import UnifiedNet

    return UnifiedNet(janus.new_model(vq.new_vq(images), janus.tokenizer(), recipe))


def _var(recipe: PainterRecipe, images: VQRecipe) -> nn.Module:
    from mmrl.worlds import scales, var, vq

    return _plain(var.new_net(scales.begun(vq.new_vq(images), images), images, recipe))


def _amused(recipe: PainterRecipe, images: VQRecipe) -> nn.Module:
    from mmrl.worlds import amused, text, vq

    encoder = text.text_models(recipes.TEXT)["text_encoder"].config
    net: nn.Module = amused.new_transformer(vq.new_vq(images), encoder, recipe)
    return net


def _plain(net: nn.Module) -> nn.Module:
    """Expand composed embeddings to tables, as saved."""
    from torch.nn.utils import parametrize

    for module in net.modules():
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")
    return net


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "world:digits/vlm": partial(_vlm, recipes.VLM),
    "world:digits/llamagen": partial(_llamagen, recipes.LLAMAGEN, recipes.VQ),
    "world:digits/janus": partial(_janus, recipes.JANUS, recipes.VQ),
    "world:digits/var": partial(_var, recipes.VAR, recipes.VQ),
    "world:digits/amused": partial(_amused, recipes.AMUSED, recipes.VQ),
}


def network(path: str) -> nn.Module | None:
    """Build the network of a token model of the digits world; None for another path."""
    make = NETWORKS.get(path)
    return None if make is None else make().requires_grad_(True)


def _wan(recipe: WanRecipe, shared: WanPartsRecipe) -> tuple[str, dict[str, Any]]:
    from diffusers import FlowMatchEulerDiscreteScheduler

    from mmrl.worlds import wan, wan_parts

    vae = wan_parts.new_vae(shared.vae)
    models = {"vae": vae, "text_encoder": wan_parts.new_umt5(shared.text)}
    return "WanImageToVideoPipeline" if recipe.first_frame else "WanPipeline", {
        "transformer": wan.new_transformer(models, recipe),
        "vae": vae,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=1.0),
    }


def _sd3(recipe: recipes.FlowRecipe, shared: recipes.PartsRecipe) -> tuple[str, dict[str, Any]]:
    from diffusers import FlowMatchEulerDiscreteScheduler

    from mmrl.worlds import flow, text, vae

    models: dict[str, Any] = text.text_models(shared.text) | {"vae": vae.new_vae(shared.vae)}
    return "StableDiffusion3Pipeline", {
        "transformer": flow.new_transformer(models, recipe),
        "vae": models["vae"],
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=1.0),
    }


def _words(recipe: recipes.WordsRecipe) -> tuple[str, dict[str, Any]]:
    from diffusers import FlowMatchEulerDiscreteScheduler

    from mmrl.worlds import flow, vae
    from mmrl.worlds.words import lettering, spelling

    models: dict[str, Any] = spelling.text_models(recipe) | {"vae": vae.new_vae(recipe.vae)}
    return "StableDiffusion3Pipeline", {
        "transformer": flow.new_transformer(models, recipe, lettering.WIDTH),
        "vae": models["vae"],
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=1.0),
    }


PIPELINES: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    "world:digits/wan": partial(_wan, recipes.WAN, recipes.WAN_PARTS),
    "world:digits/wan_i2v": partial(_wan, recipes.WAN_I2V, recipes.WAN_I2V_PARTS),
    "world:digits/sd3-clean": partial(_sd3, recipes.SD3_CLEAN, recipes.PARTS),
    "world:words/sd3": partial(_words, recipes.WORDS),
}


@cache
def _made() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mmrl-untrained-")


@cache
def folder(path: str) -> Path | None:
    """Write the config files of a diffusers folder of the digits world, without weights; None for
    another path."""
    make = PIPELINES.get(path)
    if make is None:
        return None
    pipeline, parts = make()
    place = Path(_made().name) / path.rpartition("/")[2]
    for name, part in parts.items():
        part.save_config(place / name)
    index = {name: ["diffusers", type(part).__name__] for name, part in parts.items()}
    (place / "model_index.json").write_text(json.dumps({"_class_name": pipeline} | index))
    return place
