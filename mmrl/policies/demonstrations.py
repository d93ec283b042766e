"""Converts external images and videos to the form in which a policy would have sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.core.types import Provenance, Rollout
from mmrl.policies.contracts import EncodesMedia


def framed(picture: Tensor, size: tuple[int, int] | None) -> Tensor:
    """Center-crop an image [..., 3, H, W] in 0..1 to the aspect ratio of ``size`` and resize it;
    None leaves it alone."""
    if size is None or tuple(picture.shape[-2:]) == tuple(size):
        return picture
    (top, left), cut, _ = middle_of(picture, size)
    middle = picture[..., top : top + cut[0], left : left + cut[1]]
    frames = middle.reshape(-1, *middle.shape[-3:])
    scaled = F.interpolate(frames, size=tuple(size), mode="bicubic", antialias=True)
    return scaled.clamp(0, 1).view(*picture.shape[:-2], *size)


def middle_of(
    picture: Tensor, size: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int], float]:
    """Return the crop of ``framed`` in an image [..., H, W]: corner (top, left) and (height,
    width), and its scale factor."""
    sides = picture.shape[-2:]
    scale = max(want / side for side, want in zip(sides, size, strict=True))
    height, width = (min(s, round(want / scale)) for s, want in zip(sides, size, strict=True))
    return ((sides[0] - height) // 2, (sides[1] - width) // 2), (height, width), scale


def timed(video: Tensor, frames: int | None) -> Tensor:
    """Take ``frames`` evenly spaced frames of a video [F, 3, H, W], repeating those of a short one;
    None takes all."""
    if frames is None or len(video) == frames:
        return video
    return video[torch.linspace(0, len(video) - 1, frames).round().long()]


@torch.no_grad()
def encoded(policy: EncodesMedia, answers: Sequence[Any]) -> tuple[Tensor | None, Tensor]:
    """Encode images or videos one by one, so that none depends on the others.

    Returns the samples [n, *] of those that exist (None if there are none) and the mask of their
    rows, [B] bool.
    """
    present = torch.tensor([answer is not None for answer in answers], device=policy.device)
    samples = []
    for answer in answers:
        if answer is not None:
            media = torch.as_tensor(answer).to(policy.device)
            if media.ndim == 4:
                media = timed(media, policy.media.frames)
            samples.append(policy.encode_media(framed(media, policy.media.size)[None]))
    return (torch.cat(samples) if samples else None), present


def placed_rows(samples: Tensor | None, present: Tensor, blank: Tensor) -> Tensor:
    """Scatter samples [n, *] to the rows [B] that have one; the others are ``blank`` [B, *]."""
    if samples is None:
        return blank
    rows = blank.clone()
    rows[present] = samples.to(blank)
    return rows


def sourced(rollout: Rollout, present: Tensor) -> Rollout:
    """Mark the rows [B] that have an answer; those without are not trained on."""
    return rollout.replace(
        trainable=present, provenance=Provenance(is_ground_truth=present.clone())
    )
