"""Draws clips of one moving digit: captions such as "a red seven moving left", the clips they
describe, a data source.

A clip begins with the digit in the middle of the canvas, whatever the motion, so that the first
frame does not reveal the motion; every frame then moves it by two pixels.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.worlds.render import Split, coverage, scans
from mmrl.worlds.scenes import CANVAS, COLORS, PLAIN, is_held_out, phrase, thing
from samplers.noise import Rng

# of a clip: 4 n + 1, as Wan's autoencoder wants; pixels from one to the next
FRAMES = 5
MOST_FRAMES = 1000  # first frames of a caption, which are all drawn
STEP = 2.0
MOTIONS = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
    "still": (0.0, 0.0),
}
SCANS: dict[str, Split] = {"development": "reader", "test": "judge"}  # of held-out first frames
WORDS = {"still": "standing still"}  # the others are "moving left" ...


class Clips(NamedTuple):
    frames: Tensor  # [B, F, 3, 32, 32] in 0..1, black paper
    centers: Tensor  # [B, F, 2] x, y of the digit in pixels


def captions(seed: int = 0) -> list[Prompt]:
    """Return all 200 captions in a random order: 10 digits x 4 colours x (4 directions, still)."""
    prompts = [
        caption(thing(digit, color), motion)
        for digit, color, motion in itertools.product(range(10), COLORS, MOTIONS)
    ]
    return [prompts[i] for i in Rng.of(seed, "moving captions").permutation(len(prompts)).tolist()]


def trained_on() -> list[Prompt]:
    """Return the captions that are not held out."""
    return [prompt for prompt in captions() if not is_held_out(prompt["text"])]


def caption(item: dict[str, Any], motion: str) -> Prompt:
    text = f"{phrase(item)} {WORDS.get(motion, f'moving {motion}')}"
    return {"text": text, "objects": [item], "relation": None, "count": 1, "motion": motion}


def film(prompts: list[Prompt], rng: Rng, split: Split = "generator") -> Clips:
    """Draw every prompt once. Row i depends on ``rng`` and i alone; its scan does not depend on the
    motion."""
    u = rng.uniform(rng.rows(len(prompts), 1)).tolist()
    source = scans(split)
    pools = [torch.nonzero(source.labels == d)[:, 0].tolist() for d in range(10)]
    digits = [pools[prompt["objects"][0]["digit"]] for prompt in prompts]
    # [B, 8, 8]
    pixels = source.pixels[torch.tensor([pool[int(v * len(pool))] for pool, v in zip(digits, u)])]
    way = torch.tensor([MOTIONS[prompt["motion"]] for prompt in prompts])  # [B, 2]
    centers = CANVAS / 2 + STEP * way[:, None] * torch.arange(FRAMES).view(1, -1, 1)  # [B, F, 2]
    layout = torch.cat([centers, torch.full_like(centers[..., :1], PLAIN)], -1)
    # [B, F, H, W]
    ink = coverage(pixels[:, None].expand(-1, FRAMES, -1, -1), layout, torch.zeros_like(layout))
    paint = torch.tensor([COLORS[prompt["objects"][0]["color"]] for prompt in prompts])  # [B, 3]
    return Clips(ink[:, :, None] * paint[:, None, :, None, None], centers)


@DATA.register("digits_moving")
class Moving:
    """Draw captions of clips of one moving digit, "a red seven moving left": 200, a fifth held out.

    images: for image to video, the number of prompts of each caption with an ``image``, the first
    frame; 0: none. held_out: those images show scans that were never trained on: development, for
    choices, or test, for results.

    seed: of all choices.
    """

    fields = ("text", "objects", "relation", "count", "motion")  # of every prompt
    train: list[Prompt]
    # by a hash of the caption: never seen by the base model's pre-training either
    held_out: list[Prompt]

    def __init__(
        self, images: int = 0, held_out: Literal["development", "test"] = "test", seed: int = 0
    ):
        if not 0 <= images <= MOST_FRAMES:
            raise UserError(
                f"data.digits_moving.images is {images}: 0, or how many first frames a caption "
                f"has, at most {MOST_FRAMES}"
            )
        prompts = captions(seed)
        train = [prompt for prompt in prompts if not is_held_out(prompt["text"])]
        held_out_prompts = [prompt for prompt in prompts if is_held_out(prompt["text"])]
        self.train = train
        self.held_out = held_out_prompts
        if images:
            self.train = illustrated(train * images, Rng.of(seed, "first frames"), "generator")
            self.held_out = illustrated(
                held_out_prompts * images, Rng.of(seed, "held-out first frames"), SCANS[held_out]
            )


def illustrated(prompts: list[Prompt], rng: Rng, split: Split) -> list[Prompt]:
    """Return prompts with the first frame of a clip as ``image`` (PIL)."""
    from PIL import Image

    first = (
        (film(prompts, rng, split).frames[:, 0] * 255).round().byte().movedim(1, -1).contiguous()
    )
    return [
        {**prompt, "image": Image.fromarray(frame.numpy())} for prompt, frame in zip(prompts, first)
    ]
