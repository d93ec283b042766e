"""Applies an image reward to the frames of a video: mean, worst or best, of all or some frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Interval
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt, Reward
from rewards.base.media import frames
from rewards.card import card, card_of

REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda values: values.mean(1),
    "worst": lambda values: values.amin(1),
    "best": lambda values: values.amax(1),
    "median": lambda values: values.median(1).values,
    "first": lambda values: values[:, 0],
}


@card(
    media="video image",
    scaling="steady 0.3 and frames 8 is UniRL's wrapper: 0.7 mean reward + 0.3 max(0, 1 - mean "
    "|difference|)",
)
@REWARDS.register("per_frame")
class PerFrame:
    """Apply an image reward to each frame of a video.

    In a configuration: ``per_frame: {reward: {geneval: {form: strict}}, reduce: worst, frames:
    4}``.

    Args:
        reward: the image reward, with its options.
        reduce: how the frames' values are combined.
        frames: number of frames, evenly from the first to the last (only the first for 1); None:
            all.
        steady: weight of max(0, 1 - mean absolute difference of neighbouring frames), the rest is
            the reward's.

    Raises:
        UserError: a reward that does not judge images.
    """

    def __init__(
        self,
        reward: Annotated[Reward, REWARDS],
        reduce: Literal["mean", "worst", "best", "median", "first"] = "mean",
        frames: Annotated[int, Ge(1)] | None = None,
        steady: Annotated[float, Interval(ge=0, le=1)] = 0.0,
    ):
        inner = card_of(reward)
        if "image" not in inner.media:
            raise UserError(
                f"per_frame wants a reward of images; this one judges {' or '.join(inner.media)}"
            )
        self.reward = reward
        self.reduce = REDUCE[reduce]
        self.frames = frames
        self.steady = steady
        low, high = (inner.low, inner.high) if not steady else (None, None)
        self.card = replace(inner, media=("video", "image"), low=low, high=high)

    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score videos [B, F, 3, H, W] or images [B, 3, H, W] in 0..1 -> [B] float32 on the CPU."""
        stack = frames(media, "per_frame")
        chosen = stack if self.frames is None else stack[:, evenly(stack.shape[1], self.frames)]
        repeated = [prompt for prompt in prompts for _ in range(chosen.shape[1])]
        # [B F]
        values = torch.as_tensor(
            self.reward(chosen.flatten(0, 1), repeated), dtype=torch.float32
        ).cpu()
        scores = self.reduce(values.reshape(len(prompts), -1))
        return (
            scores
            if not self.steady
            else (1 - self.steady) * scores + self.steady * steadiness(stack)
        )


def evenly(count: int, limit: int) -> Tensor:
    """Return the indices of at most ``limit`` of ``count`` frames, from the first to the last."""
    return torch.linspace(0, count - 1, min(count, limit)).round().long()


def steadiness(stack: Tensor) -> Tensor:
    """Map [B, F, 3, H, W] -> [B] 1 minus the mean absolute difference of neighbouring frames; 1 for
    a single one."""
    if stack.shape[1] == 1:
        return torch.ones(len(stack))
    return (1 - stack.float().diff(dim=1).abs().flatten(1).mean(1)).clamp(min=0).cpu()
