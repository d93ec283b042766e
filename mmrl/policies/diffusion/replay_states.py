"""Joins the states of a pipeline that steps several latents, such as a video and its sound, into
one, so that a step of both is one decision.

Pipelines step the sound by a copy of their scheduler. One state stays the tensor that it is;
several become one flat vector a row, in the order of ``PREPARING``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.sound import with_sound

PREPARING = ("prepare_latents", "prepare_audio_latents")  # methods that make a state each


class States:
    """Splits and joins the states that a pipeline prepares; their shapes are learned when it first
    prepares them."""

    def __init__(self, pipe: Any):
        self.pipeline = type(pipe).__name__
        self.methods = tuple(name for name in PREPARING if hasattr(pipe, name))
        self.count = max(1, len(self.methods))
        self.shapes: dict[int, torch.Size] = {}  # number of a state -> shape of a row's

    def learn(self, number: int, latents: Any) -> None:
        """Remember the shape of the latents [B, *] of a state. UserError where it was another."""
        if self.count == 1 or not isinstance(latents, Tensor):
            return
        shape = self.shapes.setdefault(number, latents.shape[1:])
        if shape != latents.shape[1:]:
            raise UserError(
                f"{self.pipeline} cannot be replayed: it prepared latents of shape {tuple(shape)} "
                f"before and prepares {tuple(latents.shape[1:])} now; set num_frames, height and "
                "width in policy option call, so that all prompts have one size"
            )

    def join(self, parts: Mapping[int, Tensor]) -> Tensor:
        """Join what there is of every state, each [B, *], to one state [B, *]."""
        if self.count == 1:
            return parts[0]
        return torch.cat([parts[number].flatten(1) for number in range(self.count)], 1)

    def split(self, state: Tensor) -> list[Tensor]:
        """Split what ``join`` has joined."""
        if self.count == 1:
            return [state]
        shapes = [self.shapes[number] for number in range(self.count)]
        parts = state.split([math.prod(shape) for shape in shapes], 1)
        # kernels round by strides: as what a pipeline prepares
        return [
            part.contiguous().view(len(part), *shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]


def heard(pipe: Any, output: Any) -> Any:
    """Return what a pipeline of videos with sound gave, (videos, sound), as videos that carry their
    sound; whatever else it gave as it is."""
    videos, sound = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
    if not isinstance(videos, Tensor) or not isinstance(sound, Tensor):
        return videos
    config = getattr(getattr(pipe, "vocoder", None), "config", {})
    rate = config.get("output_sampling_rate")
    if rate is None or sound.ndim != 3:
        raise UserError(
            f"{type(pipe).__name__} cannot be replayed: it gives a sound of shape "
            f"{tuple(sound.shape)}, and no vocoder that says its output_sampling_rate"
        )
    return with_sound(videos, sound.float(), int(rate))
