"""Computes picture statistics without a model: sharpness, colourfulness, contrast, saturation.

Good for monitoring: a reward that rises while one of these diverges is being hacked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.frames import each_frame
from rewards.card import card

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, what OpenCV and PIL call grey
LAPLACE = ((0.0, 1.0, 0.0), (1.0, -4.0, 1.0), (0.0, 1.0, 0.0))
CHUNK = 64  # pictures at a time


@card(media="image video", low=0, source="variance of the Laplacian: Pech-Pacheco et al. 2000")
@REWARDS.register("sharpness")
def sharpness(media: Tensor, prompts: list[Prompt], *, scale: float = 1.0) -> Tensor:
    """Measure the variance of the Laplacian of the grey picture in 0..255: low is blurred.

    Images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 -> [B]; of a video, the mean over its
    frames. The kernel is OpenCV's 3x3 one, borders mirrored as OpenCV does.
    """

    def score(pictures: Tensor, rows: list[int]) -> Tensor:
        kernel = pictures.new_tensor(LAPLACE)[None, None]
        padded = nnf.pad(grey(pictures)[:, None], (1, 1, 1, 1), mode="reflect")
        return scale * nnf.conv2d(padded, kernel).flatten(1).var(1, correction=0)

    return each_frame(media, "sharpness", CHUNK, score)


@card(
    media="image video",
    low=0,
    source="Hasler and Suesstrunk 2003, Measuring colourfulness in natural images",
)
@REWARDS.register("colourfulness")
def colourfulness(media: Tensor, prompts: list[Prompt], *, scale: float = 1.0) -> Tensor:
    """Measure Hasler and Suesstrunk's M3 on 0..255: 0 is grey, 33 moderately, 109 extremely
    colourful.

    Images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 -> [B]; of a video, the mean over its
    frames.
    """

    def score(pictures: Tensor, rows: list[int]) -> Tensor:
        red, green, blue = (255 * pictures).unbind(1)  # each [N, H, W]
        opponents = torch.stack([red - green, (red + green) / 2 - blue])  # [2, N, H, W]
        spread: Tensor = opponents.std((-2, -1), correction=0).norm(dim=0)
        strength: Tensor = opponents.mean((-2, -1)).norm(dim=0)
        return scale * (spread + 0.3 * strength)

    return each_frame(media, "colourfulness", CHUNK, score)


@card(media="image video", low=0, source="root-mean-square contrast: Peli 1990")
@REWARDS.register("contrast")
def contrast(media: Tensor, prompts: list[Prompt], *, scale: float = 1.0) -> Tensor:
    """Measure the standard deviation of the grey picture in 0..1; 0 is a blank one.

    Images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 -> [B]; of a video, the mean over its
    frames.
    """

    def score(pictures: Tensor, rows: list[int]) -> Tensor:
        return scale * grey(pictures).flatten(1).std(1, correction=0) / 255

    return each_frame(media, "contrast", CHUNK, score)


@card(media="image video", low=-1, high=0, source="share of clipped colour values")
@REWARDS.register("saturation_penalty")
def saturation_penalty(
    media: Tensor, prompts: list[Prompt], *, margin: float = 0.5 / 255, scale: float = 1.0
) -> Tensor:
    """Negate the share of colour values within ``margin`` of black or full: burnt-out is near -1.

    Images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 -> [B]; of a video, the mean over its
    frames.
    """

    def score(pictures: Tensor, rows: list[int]) -> Tensor:
        clipped = (pictures <= margin) | (pictures >= 1 - margin)
        return -scale * clipped.flatten(1).float().mean(1)

    return each_frame(media, "saturation_penalty", CHUNK, score)


def grey(pictures: Tensor) -> Tensor:
    """Convert [N, 3, H, W] in 0..1 -> [N, H, W] grey in 0..255."""
    return 255 * (pictures * pictures.new_tensor(LUMA).view(3, 1, 1)).sum(1)
