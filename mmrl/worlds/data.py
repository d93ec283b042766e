"""Registers the captions of the digits world as a data source."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.worlds.render import render
from mmrl.worlds.scenes import Kind, is_held_out, singles
from mmrl.worlds.scenes import captions as draw_captions
from samplers.noise import Rng


@DATA.register("digits")
class Digits:
    """Draw captions of pictures of handwritten digits: single (240 exist), sized, pairs,
    triples, mixed.

    pictures: drawings of every caption, each a row with its ``answer``; 0: captions alone.

    kind: single, sized, pairs, triples or mixed. captions: how many. seed: of all choices.
    """

    fields = ("text", "objects", "relation", "count")  # of every prompt
    train: list[Prompt]
    # by a hash of the caption: never seen by the base model's pre-training either
    held_out: list[Prompt]

    def __init__(
        self,
        kind: Kind = "single",
        captions: int = 240,
        seed: int = 0,
        pictures: Annotated[int, Ge(0)] = 0,
    ):
        if captions < 20:
            raise UserError(
                f"data.digits.captions is {captions}: at least 20, so that some are held out"
            )
        prompts = draw_captions(kind, captions, seed)
        if kind == "single":  # the classes of class-conditional models
            label = {prompt["text"]: i for i, prompt in enumerate(singles())}
            prompts = [{**prompt, "label": label[prompt["text"]]} for prompt in prompts]
        self.train = [prompt for prompt in prompts if not is_held_out(prompt["text"])]
        self.held_out = [prompt for prompt in prompts if is_held_out(prompt["text"])]
        if pictures:
            self.train, self.held_out = (
                drawn(prompts, pictures, seed) for prompts in (self.train, self.held_out)
            )


def drawn(prompts: list[Prompt], pictures: int, seed: int) -> list[Prompt]:
    """Draw every prompt ``pictures`` times: one row each, its picture as ``answer``."""
    rounds = [render(prompts, Rng.of(seed, "answers", n)).images for n in range(pictures)]
    return [
        {**prompt, "answer": image}
        for images in rounds
        for prompt, image in zip(prompts, images, strict=True)
    ]
