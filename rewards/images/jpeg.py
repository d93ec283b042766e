"""Measures the size of a picture as a JPEG (Black et al. 2023, DDPO, arXiv:2305.13301, section
5.2)."""

from __future__ import annotations

import io
from typing import Annotated

import torch
from annotated_types import Ge, Le
from numpy import ndarray
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.media import frame_mean, frames, to_uint8
from rewards.card import card

Quality = Annotated[int, Ge(1), Le(100)]
SCALING = "kB (1000 bytes); 0.002 kB is Flow-GRPO's"


@REWARDS.register("jpeg_incompressibility")
@card(
    media="image video", low=0, source="[DDPO](https://arxiv.org/abs/2305.13301)", scaling=SCALING
)
def jpeg_incompressibility(
    media: Tensor, prompts: list[Prompt], *, quality: Quality = 95, scale: float = 1.0
) -> Tensor:
    """Measure the size of the picture as a JPEG, in kB (1000 bytes) times ``scale``: for busy
    pictures.

    Args:
        media: images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1; for a video, the mean over its
            frames.
        prompts: ignored.
        quality: 1..100 as in PIL, colour subsampled 4:2:0.
        scale: 1 for kB as in DDPO.

    Returns:
        [B] float32; NaN for a sample with a pixel that is not finite.
    """
    return scale * kilobytes(media, quality, "jpeg_incompressibility")


@REWARDS.register("jpeg_compressibility")
@card(
    media="image video", high=0, source="[DDPO](https://arxiv.org/abs/2305.13301)", scaling=SCALING
)
def jpeg_compressibility(
    media: Tensor, prompts: list[Prompt], *, quality: Quality = 95, scale: float = 1.0
) -> Tensor:
    """Negate the size of the picture as a JPEG, in kB times ``scale``: for smooth pictures.

    ``scale`` is 1 for DDPO's -kB and 0.002 for the -kB/500 of Flow-GRPO; otherwise as
    ``jpeg_incompressibility``.
    """
    return -scale * kilobytes(media, quality, "jpeg_compressibility")


def kilobytes(media: Tensor, quality: int, reward: str) -> Tensor:
    """Return the mean JPEG size [B] of the frames in thousands of bytes."""
    if not 1 <= quality <= 100:
        raise UserError(f"reward {reward!r}: quality is 1 to 100, got {quality}")
    stack = frames(media, reward)
    broken = ~stack.isfinite().flatten(1).all(1).cpu()
    pictures = to_uint8(stack.nan_to_num(0.0)).flatten(0, 1).permute(0, 2, 3, 1).numpy()
    sizes = torch.tensor(
        [jpeg_bytes(picture, quality) / 1000 for picture in pictures], dtype=torch.float32
    )
    return frame_mean(sizes, stack.shape[1]).masked_fill(broken, torch.nan)


def jpeg_bytes(picture: ndarray, quality: int) -> int:
    """Return the length of the file PIL writes for a uint8 array [H, W, 3]."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="JPEG", quality=quality)
    return buffer.tell()
