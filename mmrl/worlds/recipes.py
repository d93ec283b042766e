"""Holds every constant of what the digits world builds. They are part of the cache's folder names:
change one, rebuild one.

This module is light: it imports nothing but dataclasses. What quickstart needs is shipped built
(``mmrl/worlds/shipped``): after a change here that concerns it, run
``python scripts/dev/ship_world.py`` and commit what it writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

PATCH = 8  # pixels of the VLM's; a picture of 48x48 is 36 tokens, a frame of 32x32 is 16
# The code that follows the recipes, by part. Raise the number when that code computes something
# else than before, and
# all that is built from it is rebuilt; names, comments and line breaks of the code do not matter.
VERSIONS = {
    "scenes": 1,  # scenes, render, samplers.noise: what pictures show
    "reader": 1,  # reading, rewards.images.digit_reader
    "clip": 1,
    "text": 1,  # tokenizers and text encoders
    "vae": 1,
    "flow": 1,  # the transformer of Stable Diffusion 3
    "vlm": 1,  # album, asking, vlm, warmup
    "vq": 1,  # vq and the networks of mmrl.policies.image_tokens that it trains
    "painting": 1,  # painting, vq_names: what the writers of image tokens share
    "llamagen": 1,
    "janus": 1,
    "var": 1,  # scales, var
    "amused": 1,
    "moving": 1,  # clips
    "wan_parts": 1,
    "wan": 1,
    "words": 1,  # words.signs, words.lettering, words.spelling
}


@dataclass(frozen=True)
class ReaderRecipe:
    """Describes a network that reads pictures (``rewards.images.digit_reader``), and its training
    scans."""

    split: Literal["generator", "reader", "judge"]
    channels: tuple[int, int, int]
    kernel: int  # of the first convolution
    pool: bool  # halve by pooling instead of strides
    seed: int
    scenes: int = 8000
    steps: int = 520
    batch: int = 48
    lr: float = 4e-3


@dataclass(frozen=True)
class ClipRecipe:
    """Describes a tiny open_clip model."""

    width: int = 64
    layers: int = 3
    scenes: int = 4000
    steps: int = 200
    batch: int = 64
    lr: float = 3e-3
    seed: int = 3


@dataclass(frozen=True)
class TextRecipe:
    """Describes two CLIP text encoders and T5."""

    width: int = 32  # of each CLIP encoder and its projection
    joint: int = 64  # of T5; at least both CLIP widths together
    steps: int = 100
    batch: int = 64
    lr: float = 6e-3
    seed: int = 0


@dataclass(frozen=True)
class VaeRecipe:
    """Describes an AutoencoderKL, 32x32 pixels to ``latent`` x 8 x 8."""

    channels: tuple[int, ...] = (8, 16, 32)
    latent: int = 4
    scenes: int = 6000
    single: float = 0.4  # share of pictures of one digit; the others have more ink to learn from
    steps: int = 400
    batch: int = 24
    lr: float = 6e-3
    kl: float = 1e-6  # weight, per pixel
    coarse: float = 16.0  # weight of the error of the blurred picture, where colours are seen
    seed: int = 0


@dataclass(frozen=True)
class PartsRecipe:
    """Describes all parts of a Stable Diffusion 3 except the transformer."""

    text: TextRecipe = field(default_factory=TextRecipe)
    vae: VaeRecipe = field(default_factory=VaeRecipe)


@dataclass(frozen=True)
class FlowRecipe:
    """Describes an SD3Transformer2DModel and its flow-matching pre-training."""

    layers: int = 2
    heads: int = 4  # of 32 channels each
    scenes: int = 12000
    single: float = 1.0  # share of plain single digits; the rest is sized, pairs and triples
    steps: int = 600
    batch: int = 96
    lr: float = 3.5e-3
    # share of the steps before any caption is wrong: a short training learns nothing else
    true_first: float = 0.6
    # after that, share of pictures whose caption belongs to another one
    wrong_captions: float = 0.1
    no_caption: float = 0.1  # share trained with the empty prompt, for classifier-free guidance
    seed: int = 0


ORDER = tuple("few crowd few few crowd few few clips few crowd few pairs".split())


@dataclass(frozen=True)
class VLMRecipe:
    """Describes a tiny Qwen2.5-VL, its vision tower's pre-training and its warm-up on questions."""

    width: int = 64
    heads: int = 4
    layers: int = 3
    vision_layers: int = 2
    eyes_steps: int = 300  # of the vision tower alone
    eyes_batch: int = 64
    eyes_lr: float = 3e-3
    scenes: int = 3000  # of each sort: one or two large digits, pairs of any size, crowds, clips
    order: tuple[str, ...] = ORDER  # sorts of scenes, step after step
    turns: int = 4  # questions a scene
    steps: int = 960
    batch: int = 24  # scenes
    lr: float = 2e-3
    hasty: float = 0.65  # share of the warm-up's boxes and counts that a hasty person gave
    margin: float = 0.35  # such a person pushes every side out by this share of the box
    seed: int = 0


@dataclass(frozen=True)
class VQRecipe:
    """Describes an image tokenizer: 32x32 pixels to 4x4 ids, and VAR's of all ``sides``."""

    vocab: int = 256
    dim: int = 12  # of an entry
    channels: int = 32  # at every resolution; GroupNorm has 32 groups
    mult: tuple[int, ...] = (1, 1, 1, 1)
    sides: tuple[int, ...] = (1, 2, 4)  # VAR's scales
    scenes: int = 4000
    pool: int = 12000  # patches the codebook is found in
    half_steps: int = 260  # of the decoder alone, at half the resolution
    steps: int = 130
    scale_steps: int = 50  # of VAR's decoder
    batch: int = 8
    lr: float = 4e-3
    code_weight: float = 20.0  # weight of the distance of encodings from codes
    coarse: float = 16.0  # weight of the error of the blurred picture
    seed: int = 0


@dataclass(frozen=True)
class PainterRecipe:
    """Describes a transformer that writes image tokens, and its pre-training."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    scenes: int = 6000
    steps: int = 400
    batch: int = 64
    lr: float = 3e-3
    true_first: float = 0.6  # share of the steps before any caption is wrong
    # after that, share of pictures whose caption belongs to another one
    wrong_captions: float = 0.4
    no_caption: float = 0.1  # share without a caption, for classifier-free guidance
    seed: int = 0


READER = ReaderRecipe("reader", channels=(24, 48, 64), kernel=3, pool=False, seed=1)
JUDGE = ReaderRecipe("judge", channels=(12, 32, 72), kernel=5, pool=True, seed=2)
CLIP = ClipRecipe()
PARTS = PartsRecipe()
SD3 = FlowRecipe()
SD3_CLEAN = replace(SD3, wrong_captions=0.0)

READER_TEST = replace(READER, scenes=200, steps=5)
CLIP_TEST = replace(CLIP, scenes=200, steps=3)
PARTS_TEST = PartsRecipe(
    TextRecipe(steps=2, batch=16), VaeRecipe(channels=(8, 8, 16), scenes=64, steps=4, batch=4)
)
SD3_TEST = replace(SD3, heads=2, scenes=64, steps=4, batch=16)
VLM = VLMRecipe()
VLM_TEST = replace(VLM, eyes_steps=3, eyes_batch=16, scenes=48, steps=6, batch=8)

TEXT = TextRecipe()
VQ = VQRecipe()
LLAMAGEN = PainterRecipe(steps=600)
JANUS = PainterRecipe()
VAR = PainterRecipe()
AMUSED = PainterRecipe()
TEXT_TEST = TextRecipe(steps=2, batch=16)
VQ_TEST = VQRecipe(vocab=16, scenes=64, half_steps=4, steps=4, scale_steps=2, batch=4)
PAINTER_TEST = PainterRecipe(width=32, layers=1, heads=2, scenes=200, steps=3, batch=8)


@dataclass(frozen=True)
class WanTextRecipe:
    """Describes a UMT5 text encoder."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    steps: int = 60
    batch: int = 64
    lr: float = 6e-3
    seed: int = 0


@dataclass(frozen=True)
class WanVaeRecipe:
    """Describes an AutoencoderKLWan with weights in closed form: ``latent`` principal components of
    every square of every frame."""

    patch: int = 16  # pixels along a side of a square, as all of Wan 2.2's levels together
    latent: int = 40
    scenes: int = 800  # clips whose principal components are taken
    seed: int = 0


@dataclass(frozen=True)
class WanPartsRecipe:
    """Describes all parts of a tiny Wan except the transformer."""

    text: WanTextRecipe = field(default_factory=WanTextRecipe)
    vae: WanVaeRecipe = field(default_factory=WanVaeRecipe)


@dataclass(frozen=True)
class WanRecipe:
    """Describes a WanTransformer3DModel and its flow-matching pre-training."""

    first_frame: bool = False  # image to video: sees the first frame
    # latent frames, rows and columns of a token: here a whole clip
    patch: tuple[int, int, int] = (5, 2, 2)
    layers: int = 2
    # of 32 channels each; in all at least the values of a token, else their noise stays
    heads: int = 15
    scenes: int = 1600
    steps: int = 300
    batch: int = 48
    lr: float = 2e-3
    true_first: float = 0.6  # share of the steps before any caption is wrong
    wrong_captions: float = 0.1  # after that, share of clips whose caption belongs to another one
    no_caption: float = 0.1  # share trained with the empty prompt, for classifier-free guidance
    seed: int = 0


WAN_PARTS = WanPartsRecipe(vae=WanVaeRecipe(latent=24))
WAN = WanRecipe()
WAN_I2V_PARTS = WanPartsRecipe()
WAN_I2V = replace(WAN, first_frame=True, patch=(1, 2, 2), heads=5, lr=3e-3)  # a token is a frame
WAN_PARTS_TEST = WanPartsRecipe(WanTextRecipe(steps=2), WanVaeRecipe(latent=8, scenes=40))
WAN_TEST = replace(WAN, layers=1, heads=5, scenes=16, steps=3, batch=8)
WAN_I2V_TEST = replace(WAN_I2V, layers=1, heads=2, scenes=16, steps=3, batch=8)


@dataclass(frozen=True)
class PositionsRecipe:
    """Describes how T5 learns where the letters of a caption stand."""

    steps: int = 500
    batch: int = 128
    lr: float = 4e-3


@dataclass(frozen=True)
class WordsRecipe:
    """Describes the Stable Diffusion 3 of the words world. Its text encoders, T5 over single
    characters, are trained with the transformer."""

    text: TextRecipe = field(default_factory=lambda: TextRecipe(width=32, joint=128))
    vae: VaeRecipe = field(
        default_factory=lambda: VaeRecipe(
            channels=(16, 32, 64), latent=8, scenes=8000, steps=1500, lr=4e-3, coarse=4.0
        )
    )
    positions: PositionsRecipe = PositionsRecipe()
    layers: int = 4
    heads: int = 6  # of 32 channels each
    pictures: int = 10000
    letters: float = 0.5  # share of pictures whose words are random letters, so that it spells
    single: float = 0.4  # share with one word
    steps: int = 3000
    batch: int = 64
    lr: float = 1.5e-3
    true_first: float = 1.0
    wrong_captions: float = 0.0
    no_caption: float = 0.1  # share trained with the empty prompt, for classifier-free guidance
    seed: int = 0


WORDS = WordsRecipe()
WORDS_TEST = WordsRecipe(
    TextRecipe(width=32, joint=64),
    VaeRecipe(channels=(8, 8, 16), latent=8, scenes=64, steps=4, batch=4),
    PositionsRecipe(steps=3, batch=8),
    layers=1,
    heads=2,
    pictures=64,
    steps=3,
    batch=8,
)
