"""Measures an iteration's samples, independent of the reward: diversity in groups, saturation,
contrast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor

from mmrl.core.distributed import all_sum
from mmrl.core.types import Media

SIDE = 32  # pixels a side at which pictures are compared
FRAMES = 4  # of a video
ROWS = 64  # pictures per batch
LETTERS = 500  # of a text
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601
EDGE = 0.5 / 255  # values nearer than this to 0 or 1 are 0 or 255 in a file
NAMES = ("samples/diversity", "samples/clipped", "samples/contrast")


@torch.no_grad()
def portrait(media: Media, group: Tensor) -> dict[str, float]:
    """Measure diversity, saturation and contrast over all processes, each of which must call it;
    NaN if there is nothing to measure.

    ``samples/diversity``: mean distance of two samples of one prompt: for pictures the root mean
    square difference of pixels (0..1, at 32 x 32), for texts the share of letters to delete and
    insert. ``samples/clipped``: share of pixel values at 0 or 1. ``samples/contrast``: standard
    deviation of the grey picture, 0..1. The last two of pictures only.

    Args:
        media: images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1, or B texts.
        group: [B], as in a rollout.
    """
    sums = torch.zeros(len(NAMES), 2, dtype=torch.float64)  # sum and count
    if isinstance(media, Tensor) and media.ndim in (4, 5) and media.shape[-3] == 3:
        small, clipped, contrast = looks(media)
        sums[0] = among(small, group)
        for place, values in ((1, clipped), (2, contrast)):
            finite = values[values.isfinite()].double()
            sums[place] = torch.stack(
                [finite.sum(), torch.tensor(float(len(finite)), dtype=torch.float64)]
            )
    elif not isinstance(media, Tensor) and all(isinstance(text, str) for text in media):
        sums[0] = among_texts(media, group)
    total = all_sum(sums.to(group.device)).tolist()
    return {name: value / count for name, (value, count) in zip(NAMES, total, strict=True) if count}


@torch.no_grad()
def diversity_of_prompts(media: Media, copies: int) -> Tensor:
    """Measure the mean distance of two samples of every prompt, as ``portrait`` does over all: [P]
    float64 on the CPU, NaN with fewer than two. ``copies`` neighbours answer one prompt."""
    count = len(media) // copies
    sums = torch.zeros(count, 2, dtype=torch.float64)
    group = torch.zeros(copies, dtype=torch.long)
    if isinstance(media, Tensor):
        if media.ndim in (4, 5) and media.shape[-3] == 3 and count:
            thumbnails = looks(media)[0].split(copies)
            sums = torch.stack([among(rows, group) for rows in thumbnails])
    elif all(isinstance(text, str) for text in media):
        for prompt in range(count):
            sums[prompt] = among_texts(media[prompt * copies : (prompt + 1) * copies], group)
    return sums[:, 0] / sums[:, 1]


def looks(media: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Measure pictures: [B, D] thumbnails, [B] clipped shares and [B] contrasts, float32 on the
    CPU; NaN of broken ones."""
    frames = some_frames(media)
    measured: list[tuple[Tensor, ...]] = []
    for rows in frames.split(max(1, ROWS // frames.shape[1])):
        pictures = rows.float().flatten(0, 1)  # [n F, 3, H, W]
        small = pictures
        if max(pictures.shape[-2:]) > SIDE:
            height, width = pictures.shape[-2:]
            small = nnf.adaptive_avg_pool2d(pictures, (min(SIDE, height), min(SIDE, width)))
        grey = torch.einsum("nchw,c->nhw", pictures, pictures.new_tensor(LUMA))
        ends = ((pictures <= EDGE) | (pictures >= 1 - EDGE)).float().flatten(1).mean(1)
        ends = ends.masked_fill(~pictures.flatten(1).isfinite().all(1), torch.nan)
        shape = (len(rows), -1)
        contrast = grey.flatten(1).std(1, correction=0).view(shape).mean(1)
        measured.append(
            (small.reshape(shape).cpu(), ends.view(shape).mean(1).cpu(), contrast.cpu())
        )
    thumbnails, clipped, contrast = (torch.cat(parts) for parts in zip(*measured, strict=True))
    return thumbnails, clipped, contrast


def some_frames(media: Tensor) -> Tensor:
    """Return a few frames of videos [B, F, 3, H, W], spread evenly, or images as one frame each."""
    frames = media if media.ndim == 5 else media[:, None]
    if frames.shape[1] > FRAMES:
        frames = frames[:, torch.linspace(0, frames.shape[1] - 1, FRAMES).round().long()]
    return frames


def among(thumbnails: Tensor, group: Tensor) -> Tensor:
    """Sum the distances of two rows [B, D] of one group: [2] sum and number."""
    group = group.cpu()
    total = 0.0
    count = 0
    finite = thumbnails.isfinite().all(1)
    for name in group.unique():
        rows = thumbnails[(group == name) & finite].double()
        if len(rows) > 1:
            total += float(torch.pdist(rows).sum()) / rows.shape[1] ** 0.5
            count += len(rows) * (len(rows) - 1) // 2
    return torch.tensor([total, count], dtype=torch.float64)


def among_texts(texts: Sequence[str], group: Tensor) -> Tensor:
    """Sum the distances of two texts of one group: [2] sum and number."""
    from rapidfuzz.distance import Indel

    members: dict[int, list[str]] = {}
    for text, name in zip(texts, group.tolist(), strict=True):
        members.setdefault(name, []).append(str(text)[:LETTERS])
    pairs = [(a, b) for some in members.values() for i, a in enumerate(some) for b in some[i + 1 :]]
    return torch.tensor(
        [sum(Indel.normalized_distance(a, b) for a, b in pairs), len(pairs)], dtype=torch.float64
    )
