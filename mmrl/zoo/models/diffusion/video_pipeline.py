"""The base of video families in diffusers' folder format: frames, latents with a time axis,
decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Rollout
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy


class VideoFolderPolicy(FolderPolicy):
    """Trains video models: latents [B, C, F, H, W]; samples are videos [B, F, 3, H, W]."""

    capabilities = replace(FolderPolicy.capabilities, makes="video")

    def __init__(
        self,
        path: str,
        frames: Annotated[int, Ge(1)] = 33,
        offload_trajectory: bool = True,
        **options: Any,
    ):
        """Extend the options of ``FolderPolicy``. frames: of a video. offload_trajectory: stored
        latents are kept in the CPU's memory."""
        self.frames = frames
        self.media = replace(self.media, frames=frames)
        super().__init__(path, offload_trajectory=offload_trajectory, **options)

    def latent_frames(self, factor: int) -> int:
        """Count the frames of the latents; UserError where the autoencoder cannot make ``frames``,
        which must be n factor + 1."""
        if (self.frames - 1) % factor:
            down = (self.frames - 1) // factor * factor + 1
            raise UserError(
                f"policy option frames {self.frames}: the autoencoder makes n x {factor} "
                f"+ 1 frames; the nearest are "
                f"{down} and {down + factor}"
            )
        return (self.frames - 1) // factor + 1

    def encode_media(self, media: Tensor) -> Tensor:
        return super().encode_media(media.transpose(1, 2))

    def decode(self, rollout: Rollout) -> Tensor:
        """Decode to videos [B, F, 3, H, W] in 0..1."""
        return super().decode(rollout).transpose(1, 2)


def standardised(vae: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mean, std) of an autoencoder's latents by channel, from its config, shaped for [B, C,
    F, H, W]."""
    shape = (1, -1, 1, 1, 1)
    mean, std = (
        torch.tensor(x).to(latents).view(shape)
        for x in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, std
