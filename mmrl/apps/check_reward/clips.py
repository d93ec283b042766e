"""Probes rewards of videos: pans over real pictures against clips in random temporal order.

A reward of temporal order may reward one of two: motion (a still and a blank must score less) or
steadiness (noise and shuffled frames must).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor

from mmrl.core.types import Prompt
from samplers.noise import Rng

FRAMES = 8  # frames of a clip
SHARE = 0.8  # share of a picture's sides that one frame shows
GAIN = 0.25  # larger than for pictures: JPEG blocks stay in place while a small picture moves
MOTION = ("blank", "still")
STEADY = ("noise", "frames out of order")


def real(prompts: Sequence[Prompt], seed: int) -> Tensor | None:
    """Return drawn clips [B, F, 3, H, W], if the prompts are those of the moving digits world."""
    if not all("objects" in prompt and "motion" in prompt for prompt in prompts):
        return None
    from mmrl.worlds.moving import film

    return film(list(prompts), Rng.of(seed, "audit clips"), "judge").frames


def panned(pictures: Tensor) -> Tensor:
    """Pan over pictures [B, 3, H, W] from corner to corner at their own size -> [B, F, 3, H, W]."""
    steps = torch.linspace(-(1 - SHARE), 1 - SHARE, FRAMES)  # where its middle is, in -1..1
    theta = torch.zeros(FRAMES, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = SHARE
    theta[:, 0, 2] = theta[:, 1, 2] = steps
    grid = nnf.affine_grid(theta, [FRAMES, 3, *pictures.shape[-2:]], align_corners=False)
    frames = [
        nnf.grid_sample(picture.expand(FRAMES, -1, -1, -1), grid, align_corners=False)
        for picture in pictures
    ]
    return torch.stack(frames).clamp(0, 1)


def shuffled(clips: Tensor, seed: int) -> Tensor:
    """Put frames in a fixed order that is neither forwards nor backwards."""
    for attempt in range(100):
        order = Rng.of(seed, f"audit frames {attempt}").permutation(clips.shape[1])
        if (order.diff().abs() > 1).sum() >= clips.shape[1] // 2:
            break
    return clips[:, order]


def tried(clips: Tensor, seed: int) -> dict[str, Tensor]:
    """Return the clips that may score less, by probe."""
    return {
        "still": clips[:, :1].expand_as(clips),
        "frames out of order": shuffled(clips, seed),
    }


def excused(failed: set[str]) -> tuple[str, ...]:
    """Return the probes that a reward of motion, or of steadiness, need not pass; none if it is
    neither."""
    if not failed & set(MOTION):
        return STEADY
    return MOTION if not failed & set(STEADY) else ()


def wants(probe: str) -> str:
    """Return what a reward rewards, motion or steadiness, if it need not pass this probe."""
    return "motion" if probe in STEADY else "steadiness"
