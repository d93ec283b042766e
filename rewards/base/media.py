"""Provides what image rewards share: images and videos as one stack of frames, and preprocessing of
tensors.

F frames (1 for images), N = B F pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor

from mmrl.core.errors import UserError

RESIZE_MODES = ("shortest", "longest", "squash")


def frames(media: Tensor, reward: str) -> Tensor:
    """View images [B, 3, H, W] or videos [B, F, 3, H, W] as [B, F, 3, H, W].

    Raises:
        UserError: anything else, such as the texts of a language model.
    """
    if not isinstance(media, Tensor):
        raise UserError(
            f"reward {reward!r} judges images or videos, but the policy made "
            f"{type(media).__name__} of text"
        )
    if media.ndim not in (4, 5) or media.shape[-3] != 3 or not media.is_floating_point():
        raise UserError(
            f"reward {reward!r} expects float images [B, 3, H, W] or videos [B, F, 3, H, "
            f"W] in 0..1, "
            f"got {media.dtype} {list(media.shape)}"
        )
    return media if media.ndim == 5 else media[:, None]


def frame_mean(values: Tensor, count: int) -> Tensor:
    """Average [B F] -> [B] over the ``count`` frames of each sample; one NaN frame makes the sample
    NaN."""
    return values.reshape(-1, count).mean(1)


def to_uint8(pictures: Tensor) -> Tensor:
    """Convert [..., 3, H, W] floats in 0..1 -> uint8 of the same shape on the CPU, rounded to
    nearest and clamped."""
    return (pictures.float() * 255).round().clamp(0, 255).to(torch.uint8).cpu()


def resize_and_crop(
    pictures: Tensor, size: tuple[int, int], mode: str, interpolation: str, fill: float = 0.0
) -> Tensor:
    """Resize [N, 3, H, W] in 0..1 -> [N, 3, *size] in 0..1, antialiased, in float32.

    ``shortest``: cover the target and crop the centre; ``longest``: fit inside it and pad with
    ``fill``; ``squash``: ignore the aspect ratio. Bicubic overshoot is clamped, as it is in 8-bit
    PIL images.
    """
    height, width = pictures.shape[-2:]
    inner = inner_size((height, width), size, mode)
    pictures = pictures.float()
    if inner != (height, width):
        pictures = nnf.interpolate(
            pictures, inner, mode=interpolation, antialias=True, align_corners=False
        )
    return pad_or_crop(pictures.clamp(0, 1), size, fill)


def inner_size(source: tuple[int, int], target: tuple[int, int], mode: str) -> tuple[int, int]:
    """Return height and width after resizing and before cropping, rounded as torchvision and
    open_clip round them."""
    if mode not in RESIZE_MODES:
        raise UserError(
            f"unknown resize mode {mode!r} in the model's preprocess_cfg; known: "
            f"{', '.join(RESIZE_MODES)}"
        )
    if mode == "squash":
        return target
    height, width = source
    ratios = [s / t for s, t in zip(source, target, strict=True)]
    if mode == "shortest" and target[0] == target[1]:
        short = min(source)
        return target[0] * height // short, target[0] * width // short
    ratio = min(ratios) if mode == "shortest" else max(ratios)
    return round(height / ratio), round(width / ratio)


def pad_or_crop(pictures: Tensor, size: tuple[int, int], fill: float) -> Tensor:
    """Pad or crop [N, 3, H, W] -> [N, 3, *size] around the centre; an odd pixel of padding goes
    right and below."""
    missing_h, missing_w = (max(0, t - s) for s, t in zip(pictures.shape[-2:], size, strict=True))
    if missing_h or missing_w:
        edges = (missing_w // 2, (missing_w + 1) // 2, missing_h // 2, (missing_h + 1) // 2)
        pictures = nnf.pad(pictures, edges, value=fill)
    top, left = (round((s - t) / 2) for s, t in zip(pictures.shape[-2:], size, strict=True))
    return pictures[..., top : top + size[0], left : left + size[1]]


def normalize(pictures: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalise [N, 3, H, W] -> (x - mean) / std per colour."""
    shift, scale = (pictures.new_tensor(list(values)).view(3, 1, 1) for values in (mean, std))
    return (pictures - shift) / scale
