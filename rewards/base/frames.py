"""Provides the base of rewards that score single pictures: frames in batches, broken ones NaN."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.types import Prompt
from rewards.base.clip import pick_device
from rewards.base.media import frame_mean, frames
from rewards.base.precision import own_precision
from rewards.base.prompt import texts_of

BatchSize = Annotated[int, Ge(1)]


class FrameReward(ABC):
    """Scores pictures one by one; for a video, the mean over its frames.

    A subclass defines ``score``, and ``conditions`` if prompts are preprocessed.

    Args:
        batch_size: pictures in one forward pass.
        device: ``auto`` is CUDA if there is one.
    """

    name: ClassVar[str]  # registered name, for messages

    def __init__(self, batch_size: BatchSize = 32, device: str = "auto"):
        self.batch_size = batch_size
        self.device = pick_device(device)  # where it loads its models; `handling` may move them

    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 -> [B] float32 on the CPU."""
        conditions = self.conditions(prompts)

        def score(pictures: Tensor, rows: list[int]) -> Tensor:
            if isinstance(conditions, Tensor):
                return self.score(pictures, conditions[rows])
            return self.score(pictures, [conditions[row] for row in rows])

        with own_precision(self.device.type):  # of its networks, wherever the media are
            return each_frame(media, self.name, self.batch_size, score)

    def conditions(self, prompts: list[Prompt]) -> list[Any] | Tensor:
        """Return the conditions of the B prompts for ``score``, computed once for all their
        frames."""
        return prompts

    @abstractmethod
    def score(self, pictures: Tensor, conditions: Any) -> Tensor:
        """Score float32 pictures [n, 3, H, W] in 0..1 by their conditions -> [n]."""


class PromptReward(FrameReward):
    """A ``FrameReward`` whose conditions are the texts of the prompts."""

    def conditions(self, prompts: list[Prompt]) -> list[str]:
        return texts_of(prompts, self.name)


def each_frame(
    media: Tensor, reward: str, batch_size: int, score: Callable[[Tensor, list[int]], Tensor]
) -> Tensor:
    """Return the score of every sample, averaged over its frames, outside autocast; differentiable
    if the media require a gradient.

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
    with_gradient = torch.is_grad_enabled() and stack.requires_grad
    with own_precision(media.device.type), torch.set_grad_enabled(with_gradient):
        for start in range(0, len(pictures), batch_size):
            part = pictures[start : start + batch_size]
            rows = [place // count for place in range(start, start + len(part))]
            broken = ~part.isfinite().flatten(1).all(1).cpu()
            values = score(part.float().nan_to_num(0.0, 0.0, 0.0), rows).float().cpu()
            scores.append(values.masked_fill(broken, torch.nan))
    return frame_mean(torch.cat(scores), count) if scores else torch.zeros(0)
