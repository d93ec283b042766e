"""Measures the appearance of pictures, independent of the reward: dark pixels, colour, edges,
entropy.

Reinforcement learning of image models was reported to drift to dark, edgeless, one-coloured
pictures while the reward rises; these four numbers detect it cheaply.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as nnf
from torch import Tensor

from mmrl.core.distributed import all_sum
from mmrl.core.types import Media
from mmrl.monitoring.diversity import LUMA, ROWS, some_frames

SIDE = 256  # pixels a side that pictures are measured at; larger ones are averaged down
DARK = 0.2  # grey value, 0..1, below which a pixel is dark
LEVELS = 8  # of each of the three colours, in the histogram whose entropy is measured
# a central difference, smoothed across it
SOBEL = ((-0.125, 0.0, 0.125), (-0.25, 0.0, 0.25), (-0.125, 0.0, 0.125))
NAMES = ("samples/dark", "samples/colour", "samples/edges", "samples/colour_entropy")


@torch.no_grad()
def appearance(media: Media, device: torch.device) -> dict[str, float]:
    """Measure the means over all pictures of all processes, each of which must call it; {} if there
    are none.

    ``samples/dark``: share of pixels whose grey value is below 0.2. ``samples/colour``: mean
    difference of a pixel's largest and smallest colour value, 0 is grey. ``samples/edges``: mean
    length of Sobel's gradient of the grey picture, in grey values a pixel.
    ``samples/colour_entropy``: entropy of a picture's histogram of 8 x 8 x 8 colours in bits, 0 is
    one colour, 9 the most.

    Args:
        media: images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1, of which some frames are
            measured; anything else counts as no pictures.
        device: for communication between processes.
    """
    sums = torch.zeros(len(NAMES) + 1, dtype=torch.float64)
    if isinstance(media, Tensor) and media.ndim in (4, 5) and media.shape[-3] == 3 and len(media):
        frames = some_frames(media).flatten(0, 1)
        for pictures in frames.split(ROWS):
            values = of_pictures(pictures)
            finite = values[values.isfinite().all(1)].double()
            sums += torch.cat([finite.sum(0), finite.new_tensor([len(finite)])]).cpu()
    *total, count = all_sum(sums.to(device)).tolist()
    return {name: value / count for name, value in zip(NAMES, total, strict=True) if count}


def of_pictures(pictures: Tensor) -> Tensor:
    """Measure pictures [N, 3, H, W] in 0..1: [N, 4] in the order of ``NAMES``, NaN of broken
    ones."""
    pictures = pictures.float()
    height, width = pictures.shape[-2:]
    if max(height, width) > SIDE:
        pictures = nnf.adaptive_avg_pool2d(pictures, (min(SIDE, height), min(SIDE, width)))
    grey = torch.einsum("nchw,c->nhw", pictures, pictures.new_tensor(LUMA))
    dark = (grey < DARK).float().flatten(1).mean(1)
    colour = (pictures.amax(1) - pictures.amin(1)).flatten(1).mean(1)
    columns = [dark, colour, edges(grey), colour_entropy(pictures)]
    broken = ~pictures.flatten(1).isfinite().all(1)
    return torch.stack(columns, 1).masked_fill(broken[:, None], torch.nan)


def edges(grey: Tensor) -> Tensor:
    """Compute the mean length of Sobel's gradient of pictures [N, H, W], borders repeated: [N]."""
    across = grey.new_tensor(SOBEL)
    kernels = torch.stack([across, across.T])[:, None]  # [2, 1, 3, 3]
    padded = nnf.pad(grey[:, None], (1, 1, 1, 1), mode="replicate")
    lengths: Tensor = nnf.conv2d(padded, kernels).norm(dim=1)
    return lengths.flatten(1).mean(1)


def colour_entropy(pictures: Tensor) -> Tensor:
    """Compute the entropy in bits of each picture's colours [N, 3, H, W], 8 levels each: [N]."""
    levels = (pictures.nan_to_num() * LEVELS).long().clamp(0, LEVELS - 1).flatten(2)  # [N, 3, HW]
    bins = (levels[:, 0] * LEVELS + levels[:, 1]) * LEVELS + levels[:, 2]
    counts = torch.zeros(len(pictures), LEVELS**3, device=pictures.device)
    counts.scatter_add_(1, bins, torch.ones_like(bins, dtype=counts.dtype))
    share = counts / bins.shape[1]
    bits: Tensor = -torch.special.xlogy(share, share).sum(1) / math.log(2)
    return bits
