"""The things the digits world builds once and caches: ``world:digits/sd3`` in a configuration is a folder made here.

Names ending in ``-test`` are the same classes and files after a few steps of training: quick to build, for tests.
Nothing heavy is imported before something has to be built.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.registry import ARTIFACTS
from mmrl.worlds import cache, recipes
from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import ClipRecipe, FlowRecipe, PartsRecipe, ReaderRecipe, VLMRecipe

# What a build depends on besides its recipe: source files, by module name.
_SCENES = ("mmrl.worlds.scenes", "mmrl.worlds.render", "samplers.noise")
_READER = (*_SCENES, "mmrl.worlds.reading", "rewards._reader")
_CLIP = (*_SCENES, "mmrl.worlds.clip", "mmrl.worlds.text")
_PARTS = (*_SCENES, "mmrl.worlds.text", "mmrl.worlds.vae")
_SD3 = (*_PARTS, "mmrl.worlds.flow")
_VLM = (*_SCENES, "mmrl.worlds.album", "mmrl.worlds.asking", "mmrl.worlds.vlm", "mmrl.worlds.warmup")


def _fetch(name: str, parts: tuple[Any, ...], modules: tuple[str, ...], build: Any) -> Path:
    sources = [importlib.import_module(module) for module in modules]
    return cache.fetch(name, cache.recipe_hash(parts, sources), partial(build, progress=Progress(name)))


def reader(name: str, recipe: ReaderRecipe) -> Path:
    """A reader's folder (config.json, model.safetensors)."""
    from mmrl.worlds.reading import train_reader

    return _fetch(name, (recipe,), _READER, partial(train_reader, recipe=recipe))


def clip(name: str, recipe: ClipRecipe) -> Path:
    """A folder open_clip loads as ``local-dir:FOLDER``."""
    from mmrl.worlds.clip import train_clip

    return _fetch(name, (recipe,), _CLIP, partial(train_clip, recipe=recipe))


def parts(name: str, recipe: PartsRecipe) -> Path:
    """Tokenizers, text encoders and autoencoder, which the Stable Diffusion 3 folders share."""
    from mmrl.worlds.vae import build_parts

    return _fetch(name, (recipe,), _PARTS, partial(build_parts, recipe=recipe))


def sd3(name: str, recipe: FlowRecipe, shared: PartsRecipe, shared_name: str) -> Path:
    """A complete diffusers folder that ``StableDiffusion3Pipeline.from_pretrained`` loads."""
    from mmrl.worlds.flow import build_sd3

    def build(folder: Path, progress: Progress) -> None:
        build_sd3(folder, parts(shared_name, shared), recipe, progress)

    return _fetch(name, (recipe, shared), _SD3, build)


def vlm(name: str, recipe: VLMRecipe) -> Path:
    """A folder that AutoProcessor and AutoModelForImageTextToText load."""
    from mmrl.worlds.vlm import build_vlm

    return _fetch(name, (recipe,), _VLM, partial(build_vlm, recipe=recipe))


@ARTIFACTS.register("digits/sd3")
def base() -> Path:
    """Tiny Stable Diffusion 3, some of its captions wrong: follows the prompt only sometimes."""
    return sd3("digits/sd3", recipes.SD3, recipes.PARTS, "digits/parts")


@ARTIFACTS.register("digits/sd3-clean")
def base_clean() -> Path:
    """Tiny Stable Diffusion 3 trained on true captions."""
    return sd3("digits/sd3-clean", recipes.SD3_CLEAN, recipes.PARTS, "digits/parts")


@ARTIFACTS.register("digits/sd3-test")
def base_test() -> Path:
    """Tiny Stable Diffusion 3, barely trained, for tests."""
    return sd3("digits/sd3-test", recipes.SD3_TEST, recipes.PARTS_TEST, "digits/parts-test")


@ARTIFACTS.register("digits/reader")
def reward_reader() -> Path:
    """Detector and classifier of digits, used by the ``digits`` reward."""
    return reader("digits/reader", recipes.READER)


@ARTIFACTS.register("digits/judge")
def judge() -> Path:
    """Independent detector and classifier: other scans, other network; for evaluation only."""
    return reader("digits/judge", recipes.JUDGE)


@ARTIFACTS.register("digits/reader-test")
def reader_test() -> Path:
    """Barely trained reader, for tests."""
    return reader("digits/reader-test", recipes.READER_TEST)


@ARTIFACTS.register("digits/clip")
def world_clip() -> Path:
    """Tiny open_clip model of the world's own; ``open_clip`` loads it as ``local-dir:FOLDER``."""
    return clip("digits/clip", recipes.CLIP)


@ARTIFACTS.register("digits/clip-test")
def clip_test() -> Path:
    """Barely trained open_clip model, for tests."""
    return clip("digits/clip-test", recipes.CLIP_TEST)


@ARTIFACTS.register("digits/vlm")
def answers() -> Path:
    """Tiny Qwen2.5-VL, warmed up on questions about digits, answered by mostly hasty people."""
    return vlm("digits/vlm", recipes.VLM)


@ARTIFACTS.register("digits/vlm-test")
def answers_test() -> Path:
    """Tiny Qwen2.5-VL, barely trained, for tests."""
    return vlm("digits/vlm-test", recipes.VLM_TEST)
