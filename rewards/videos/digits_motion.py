"""Defines ``digits_motion``, which checks direction, amount and evenness of motion by the ink's
centroid."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Gt
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.card import card
from rewards.videos.consistency import moving

WAYS = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
    "still": (0.0, 0.0),
}
PAPER = 0.2  # brightness of any channel up to which a pixel is background
LEAST = 0.015  # minimum ink, as a share of the picture; a thin 1 has 0.03
# distance of the ink from its centre, in shares of the shorter side
COMPACT = 0.25
SCATTERED = 0.35
# mean distance from an even pace, as a share of the path: that of a jump in the middle
UNEVEN = 0.25


@card(
    media="video", needs="motion", low=0, high=1, source="centroids of the ink; nothing is learned"
)
@REWARDS.register("digits_motion")
class DigitsMotion:
    """Check that the digit moves as requested: direction, distance, even pace, 0 to 1.

    For every frame, c is the centroid of the ink: pixels weighted by their brightness above the
    background. With n the vector from the first centroid to the last, in shares of the shorter
    side, and d the requested direction, the reward is the product of

    * amount: ``1 - |n.d / travel - 1|``, clipped at 0: too far is as wrong as not far enough;
    * heading: ``n.d / |n|``, clipped at 0;
    * evenness: ``1 - e / (|n| / 4)``, clipped at 0, with e the mean distance of the centroids from
    an even pace on the straight line from the first to the last: a jump half-way, frames out of
    order and a random walk have about 0;
    * presence: every frame has ink in one blob: 1 if its root mean square distance from the
    centroid is at most a quarter of the shorter side, 0 from 0.35 on. Blank frames and noise have
    0.

    If requested to stand still: ``1 - length of the centroids' path / travel``, clipped at 0, times
    presence. The digit and its colour are not checked: use ``digits`` on every frame.

    Args:
        travel: the distance a moving digit should go, in shares of the shorter side; default: that
            of the digits world's clips.
    """

    def __init__(self, travel: Annotated[float, Gt(0)] = 0.25):
        self.travel = travel

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score videos [B, F, 3, H, W] in 0..1, three frames or more -> [B] float32; NaN if a pixel
        is not finite."""
        stack = moving(media, "digits_motion", 3).float()
        motions: list[Any] = [prompt.get("motion") for prompt in prompts]
        if unknown := [way for way in motions if way not in WAYS]:
            raise UserError(
                f"reward 'digits_motion' needs \"motion\" ({', '.join(WAYS)}) in every "
                f"prompt, and one has "
                f"{unknown[0]!r}. Use data: {{digits_moving: {{}}}}"
            )
        centers, presence = located(stack)
        way = stack.new_tensor([WAYS[motion] for motion in motions])  # [B, 2]
        still = 1 - centers.diff(dim=1).norm(dim=-1).sum(1) / self.travel
        score = (
            torch.where(way.any(1), moved(centers, way, self.travel), still.clamp(0, 1)) * presence
        )
        return score.masked_fill(~stack.isfinite().flatten(1).all(1), torch.nan)


def located(stack: Tensor) -> tuple[Tensor, Tensor]:
    """Return centroids of the ink [B, F, 2] in shares of the shorter side, and the presence [B],
    0..1."""
    height, width = stack.shape[-2:]
    # [B, F, H, W]
    ink = (stack.nan_to_num(0.0, 0.0, 0.0).amax(2) - PAPER).clamp(min=0) / (1 - PAPER)
    places = [
        (torch.arange(side, device=ink.device) + 0.5) / min(height, width)
        for side in (width, height)
    ]
    mass = ink.sum((2, 3))  # [B, F]
    # [B, F, W], [B, F, H]
    shares = [ink.sum(axis) / mass.clamp(min=1e-6)[..., None] for axis in (2, 3)]
    centers = torch.stack([(share * place).sum(-1) for share, place in zip(shares, places)], -1)
    squares = torch.stack([(share * place**2).sum(-1) for share, place in zip(shares, places)], -1)
    reach = (squares - centers**2).sum(-1).clamp(min=0).sqrt()  # [B, F]
    inked = (mass / (LEAST * height * width)).clamp(max=1)
    compact = ((SCATTERED - reach) / (SCATTERED - COMPACT)).clamp(0, 1)
    return centers, (inked * compact).amin(1)


def moved(centers: Tensor, way: Tensor, travel: float) -> Tensor:
    """Return amount, heading and evenness [B] of centres [B, F, 2] for directions [B, 2]."""
    whole = centers[:, -1] - centers[:, 0]
    length: Tensor = whole.norm(dim=1).clamp(min=1e-6)
    along = (whole * way).sum(1)
    amount = (1 - (along / travel - 1).abs()).clamp(min=0)
    pace = torch.linspace(0, 1, centers.shape[1], device=centers.device).view(1, -1, 1)
    even = centers[:, :1] + pace * whole[:, None]
    strayed: Tensor = (centers - even).norm(dim=-1).mean(1)
    return amount * (along / length).clamp(min=0) * (1 - strayed / (UNEVEN * length)).clamp(min=0)
