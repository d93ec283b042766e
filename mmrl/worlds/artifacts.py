"""Registers what the embedded worlds build once and cache: ``world:digits/sd3`` in a configuration
is a folder built here.

Names ending in ``-test`` are the same classes and files after a few steps of training: quick to
build, for tests. Nothing heavy is imported before something has to be built.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from mmrl.core.registry import ARTIFACTS
from mmrl.worlds import cache, recipes
from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import (
    ClipRecipe,
    FlowRecipe,
    PainterRecipe,
    PartsRecipe,
    ReaderRecipe,
    TextRecipe,
    VLMRecipe,
    VQRecipe,
    WanPartsRecipe,
    WanRecipe,
    WordsRecipe,
)
from mmrl.worlds.unfinished import Unfinished

# What a build depends on besides its recipe: parts of the code, each with its number in
# recipes.VERSIONS.
_SCENES = ("scenes",)
_READER = (*_SCENES, "reader")
_CLIP = (*_SCENES, "clip", "text")
_PARTS = (*_SCENES, "text", "vae")
_SD3 = (*_PARTS, "flow")
_VLM = (*_SCENES, "vlm")
_VQ = (*_SCENES, "vq")
_PAINTER = (*_VQ, "text", "painting")
_LLAMAGEN = (*_PAINTER, "llamagen")
_JANUS = (*_PAINTER, "janus")
_VAR = (*_PAINTER, "var")
_AMUSED = (*_PAINTER, "amused")
_WAN_PARTS = (*_SCENES, "moving", "wan_parts")
_WAN = (*_WAN_PARTS, "wan")


def _fetch(name: str, constants: tuple[Any, ...], code: tuple[str, ...], build: Any) -> Path:
    recipe = cache.recipe_hash(constants, [recipes.VERSIONS[part] for part in code])
    unfinished = Unfinished(cache.root() / f".unfinished/{name}-{recipe}")
    folder = cache.fetch(
        name, recipe, partial(build, progress=Progress(name, unfinished=unfinished))
    )
    unfinished.remove()
    return folder


def reader(name: str, recipe: ReaderRecipe) -> Path:
    """Build a reader's folder (config.json, model.safetensors)."""
    from mmrl.worlds.reading import train_reader

    return _fetch(name, (recipe,), _READER, partial(train_reader, recipe=recipe))


def clip(name: str, recipe: ClipRecipe) -> Path:
    """Build a folder that open_clip loads as ``local-dir:FOLDER``."""
    from mmrl.worlds.clip import train_clip

    return _fetch(name, (recipe,), _CLIP, partial(train_clip, recipe=recipe))


def parts(name: str, recipe: PartsRecipe) -> Path:
    """Build tokenizers, text encoders and autoencoder that the Stable Diffusion 3 folders share."""
    from mmrl.worlds.vae import build_parts

    return _fetch(name, (recipe,), _PARTS, partial(build_parts, recipe=recipe))


def sd3(name: str, recipe: FlowRecipe, shared: PartsRecipe, shared_name: str) -> Path:
    """Build a complete diffusers folder that ``StableDiffusion3Pipeline.from_pretrained`` loads."""
    from mmrl.worlds.flow import build_sd3

    def build(folder: Path, progress: Progress) -> None:
        build_sd3(folder, parts(shared_name, shared), recipe, progress)

    return _fetch(name, (recipe, shared), _SD3, build)


def vlm(name: str, recipe: VLMRecipe) -> Path:
    """Build a folder that AutoProcessor and AutoModelForImageTextToText load."""
    from mmrl.worlds.vlm import build_vlm

    return _fetch(name, (recipe,), _VLM, partial(build_vlm, recipe=recipe))


def vq(name: str, recipe: VQRecipe) -> Path:
    """Build a folder with LlamaGen's tokenizer, vq.safetensors."""
    from mmrl.worlds.vq import build_vq

    return _fetch(name, (recipe,), _VQ, partial(build_vq, recipe=recipe))


def llamagen(name: str, recipe: PainterRecipe, images: VQRecipe, end: str = "") -> Path:
    """Build a folder as the policy ``llamagen`` exports them."""
    from mmrl.worlds.llamagen import build_llamagen

    def build(folder: Path, progress: Progress) -> None:
        build_llamagen(folder, vq(f"digits/vq{end}", images), recipe, progress)

    return _fetch(name, (recipe, images), _LLAMAGEN, build)


def janus(name: str, recipe: PainterRecipe, images: VQRecipe, end: str = "") -> Path:
    """Build a folder that JanusForConditionalGeneration and AutoProcessor load."""
    from mmrl.worlds.janus import build_janus

    def build(folder: Path, progress: Progress) -> None:
        build_janus(folder, vq(f"digits/vq{end}", images), recipe, progress)

    return _fetch(name, (recipe, images), _JANUS, build)


def var(name: str, recipe: PainterRecipe, images: VQRecipe, end: str = "") -> Path:
    """Build a folder as the policy ``var`` exports them."""
    from mmrl.worlds.var import build_var

    def build(folder: Path, progress: Progress) -> None:
        build_var(folder, vq(f"digits/vq{end}", images), images, recipe, progress)

    return _fetch(name, (recipe, images), _VAR, build)


def amused(
    name: str, recipe: PainterRecipe, images: VQRecipe, texts: TextRecipe, end: str = ""
) -> Path:
    """Build a folder that AmusedPipeline loads."""
    from mmrl.worlds.amused import build_amused

    def build(folder: Path, progress: Progress) -> None:
        build_amused(folder, vq(f"digits/vq{end}", images), texts, recipe, progress)

    return _fetch(name, (recipe, images, texts), _AMUSED, build)


def wan_parts(name: str, recipe: WanPartsRecipe) -> Path:
    """Build tokenizer, text encoder and autoencoder, which the Wan folders share."""
    from mmrl.worlds.wan_parts import build_wan_parts

    return _fetch(name, (recipe,), _WAN_PARTS, partial(build_wan_parts, recipe=recipe))


def wan_folder(name: str, recipe: WanRecipe, shared: WanPartsRecipe, shared_name: str) -> Path:
    """Build a complete diffusers folder that WanPipeline loads, or WanImageToVideoPipeline."""
    from mmrl.worlds.wan import build_wan

    def build(folder: Path, progress: Progress) -> None:
        build_wan(folder, wan_parts(shared_name, shared), recipe, progress)

    return _fetch(name, (recipe, shared), _WAN, build)


def words(name: str, recipe: WordsRecipe) -> Path:
    """Build a complete diffusers folder that ``StableDiffusion3Pipeline.from_pretrained`` loads."""
    from mmrl.worlds.words.spelling import build_words

    return _fetch(name, (recipe,), ("words", "vae"), partial(build_words, recipe=recipe))


@ARTIFACTS.register("digits/sd3")
def base() -> Path:
    """Build a tiny Stable Diffusion 3 that follows prompts only sometimes: some captions are
    wrong."""
    return sd3("digits/sd3", recipes.SD3, recipes.PARTS, "digits/parts")


@ARTIFACTS.register("digits/sd3-clean")
def base_clean() -> Path:
    """Build a tiny Stable Diffusion 3 trained on true captions."""
    return sd3("digits/sd3-clean", recipes.SD3_CLEAN, recipes.PARTS, "digits/parts")


@ARTIFACTS.register("digits/sd3-test")
def base_test() -> Path:
    """Build a tiny Stable Diffusion 3, barely trained, for tests."""
    return sd3("digits/sd3-test", recipes.SD3_TEST, recipes.PARTS_TEST, "digits/parts-test")


@ARTIFACTS.register("digits/reader")
def reward_reader() -> Path:
    """Build the detector and classifier of digits that the ``digits`` reward uses."""
    return reader("digits/reader", recipes.READER)


@ARTIFACTS.register("digits/judge")
def judge() -> Path:
    """Build an independent detector and classifier (other scans and network) for evaluation
    only."""
    return reader("digits/judge", recipes.JUDGE)


@ARTIFACTS.register("digits/reader-test")
def reader_test() -> Path:
    """Build a barely trained reader, for tests."""
    return reader("digits/reader-test", recipes.READER_TEST)


@ARTIFACTS.register("digits/clip")
def world_clip() -> Path:
    """Build the world's tiny open_clip model, loaded as ``local-dir:FOLDER``."""
    return clip("digits/clip", recipes.CLIP)


@ARTIFACTS.register("digits/clip-test")
def clip_test() -> Path:
    """Build a barely trained open_clip model, for tests."""
    return clip("digits/clip-test", recipes.CLIP_TEST)


@ARTIFACTS.register("digits/vlm")
def answers() -> Path:
    """Build a tiny Qwen2.5-VL, warmed up on questions about digits and mostly hasty answers."""
    return vlm("digits/vlm", recipes.VLM)


@ARTIFACTS.register("digits/vlm-test")
def answers_test() -> Path:
    """Build a tiny Qwen2.5-VL, barely trained, for tests."""
    return vlm("digits/vlm-test", recipes.VLM_TEST)


@ARTIFACTS.register("digits/vq")
def image_tokens() -> Path:
    """Build the LlamaGen image tokenizer that ``digits/llamagen``, ``janus``, ``amused``, ``var``
    need."""
    return vq("digits/vq", recipes.VQ)


@ARTIFACTS.register("digits/llamagen")
def autoregressive() -> Path:
    """Build a tiny class-conditional LlamaGen, many of its labels wrong."""
    return llamagen("digits/llamagen", recipes.LLAMAGEN, recipes.VQ)


@ARTIFACTS.register("digits/janus")
def unified() -> Path:
    """Build a tiny Janus that paints, many of its captions wrong."""
    return janus("digits/janus", recipes.JANUS, recipes.VQ)


@ARTIFACTS.register("digits/var")
def next_scale() -> Path:
    """Build a tiny class-conditional VAR with its multi-scale VQ, many of its labels wrong."""
    return var("digits/var", recipes.VAR, recipes.VQ)


@ARTIFACTS.register("digits/amused")
def masked() -> Path:
    """Build a tiny aMUSEd, many of its captions wrong."""
    return amused("digits/amused", recipes.AMUSED, recipes.VQ, recipes.TEXT)


@ARTIFACTS.register("digits/vq-test")
def image_tokens_test() -> Path:
    """Build a barely trained image tokenizer, for tests."""
    return vq("digits/vq-test", recipes.VQ_TEST)


@ARTIFACTS.register("digits/llamagen-test")
def autoregressive_test() -> Path:
    """Build a barely trained LlamaGen, for tests."""
    return llamagen("digits/llamagen-test", recipes.PAINTER_TEST, recipes.VQ_TEST, "-test")


@ARTIFACTS.register("digits/janus-test")
def unified_test() -> Path:
    """Build a barely trained Janus, for tests."""
    return janus("digits/janus-test", recipes.PAINTER_TEST, recipes.VQ_TEST, "-test")


@ARTIFACTS.register("digits/var-test")
def next_scale_test() -> Path:
    """Build a barely trained VAR, for tests."""
    return var("digits/var-test", recipes.PAINTER_TEST, recipes.VQ_TEST, "-test")


@ARTIFACTS.register("digits/amused-test")
def masked_test() -> Path:
    """Build a barely trained aMUSEd, for tests."""
    return amused(
        "digits/amused-test", recipes.PAINTER_TEST, recipes.VQ_TEST, recipes.TEXT_TEST, "-test"
    )


@ARTIFACTS.register("digits/wan")
def wan() -> Path:
    """Build a tiny text-to-video Wan: its digit moves as the caption says only sometimes."""
    return wan_folder("digits/wan", recipes.WAN, recipes.WAN_PARTS, "digits/wan-parts")


@ARTIFACTS.register("digits/wan_i2v")
def wan_i2v() -> Path:
    """Build a tiny image-to-video Wan: the first frame's digit moves as prompted only sometimes."""
    return wan_folder(
        "digits/wan_i2v", recipes.WAN_I2V, recipes.WAN_I2V_PARTS, "digits/wan_i2v-parts"
    )


@ARTIFACTS.register("digits/wan-test")
def wan_test() -> Path:
    """Build a tiny Wan, barely trained, for tests."""
    return wan_folder(
        "digits/wan-test", recipes.WAN_TEST, recipes.WAN_PARTS_TEST, "digits/wan-parts-test"
    )


@ARTIFACTS.register("digits/wan_i2v-test")
def wan_i2v_test() -> Path:
    """Build a tiny image-to-video Wan, barely trained, for tests."""
    return wan_folder(
        "digits/wan_i2v-test", recipes.WAN_I2V_TEST, recipes.WAN_PARTS_TEST, "digits/wan-parts-test"
    )


@ARTIFACTS.register("words/sd3")
def speller() -> Path:
    """Build a tiny Stable Diffusion 3 that draws words; it does not spell yet."""
    return words("words/sd3", recipes.WORDS)


@ARTIFACTS.register("words/sd3-test")
def speller_test() -> Path:
    """Build a tiny Stable Diffusion 3 of the words world, barely trained, for tests."""
    return words("words/sd3-test", recipes.WORDS_TEST)
