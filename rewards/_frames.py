"""One loop for the rewards that judge picture by picture: frames in batches, broken ones NaN,
videos the mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rewards._media import frame_mean, frames
from rewards.precision import own_precision


@torch.no_grad()
def each_frame(
    media: Tensor, reward: str, batch_size: int, score: Callable[[Tensor, list[int]], Tensor]
) -> Tensor:
    """Mean over its frames of the score of every sample, outside autocast.

    Args:
        media: images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1.
        reward: its name, for messages.
        batch_size: pictures in one call.
        score: float32 pictures [n, 3, H, W] and the rows 0..B-1 they belong to -> [n] scores.

    Returns:
        [B] float32 on the CPU; NaN for a sample with a pixel that is not finite.
    """
    stack = frames(media, reward)
    count = stack.shape[1]
    pictures = stack.flatten(0, 1)
    scores = []
    with own_precision(media.device.type):
        for start in range(0, len(pictures), batch_size):
            part = pictures[start : start + batch_size]
            rows = [place // count for place in range(start, start + len(part))]
            broken = ~part.isfinite().flatten(1).all(1).cpu()
            values = score(part.float().nan_to_num(0.0, 0.0, 0.0), rows).float().cpu()
            scores.append(values.masked_fill(broken, torch.nan))
    return frame_mean(torch.cat(scores), count) if scores else torch.zeros(0)
