"""Trains image to video with Wan's network: Wan 2.1 (with CLIP embeddings) and 2.2, and SkyReels-V2
(Chen et al. 2025)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from mmrl.core.registry import POLICIES
from mmrl.policies.base import MediaFormat
from mmrl.zoo.models.diffusion.image_to_video import FirstFrame, Picture
from mmrl.zoo.models.diffusion.video_pipeline import standardised
from mmrl.zoo.models.diffusion.wan import Wan


@POLICIES.register("wan_i2v")
class WanI2V(FirstFrame, Wan):
    """Trains Wan 2.1 and 2.2 image to video from a folder or hub id of a WanImageToVideoPipeline.

    The condition is joined to the latents as further channels: a mask of the given frames and the
    latents of the video that is the image and then grey. Wan 2.2 TI2V (``expand_timesteps``) sees
    the image in place of its first frame, at time 0.
    """

    # the latter: TI2V's folders
    pipeline = "WanImageToVideoPipeline"
    also: ClassVar[tuple[str, ...]] = ("WanPipeline",)

    @property
    def holds(self) -> bool:
        return self.expand

    @torch.no_grad()
    def encode_pictures(
        self, pipe: Any, pictures: list[Picture], device: torch.device
    ) -> dict[str, Tensor]:
        frames = self.frames_of(pictures, device)
        vae = self.vae.to(device)
        if not self.expand:
            frames = torch.cat(
                [frames, frames.new_zeros(*frames.shape[:2], self.frames - 1, *frames.shape[3:])], 2
            )
        latents = vae.encode(frames).latent_dist.mode()
        mean, std = standardised(vae, latents)
        condition = (latents - mean) / std
        if self.expand:
            return {"condition": condition}
        mask = condition.new_zeros(
            len(condition), vae.config.scale_factor_temporal, *condition.shape[2:]
        )
        mask[:, :, 0] = 1
        encoding = {"condition": torch.cat([mask, condition], 1)}
        if self.config.image_dim is not None:
            encoding["image"] = pipe.encode_image([picture.image for picture in pictures], device)
        return encoding

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        return self.toward_image(super().velocity(x, t, cond), x, t, cond)

    def conditions(self, cond: dict[str, Any]) -> dict[str, Tensor]:
        image = {"encoder_hidden_states_image": cond["image"]} if "image" in cond else {}
        return super().conditions(cond) | image

    def network_inputs(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if not self.expand:
            return torch.cat([x, cond["condition"].to(x)], 1), t
        x, t = super().network_inputs(x, t, cond)
        known = t.shape[1] // x.shape[2]  # tokens of a frame
        t = torch.cat([torch.zeros_like(t[:, :known]), t[:, known:]], 1)
        return torch.cat([cond["condition"].to(x), x[:, :, 1:]], 2), t


@POLICIES.register("skyreels_i2v")
class SkyReelsI2V(WanI2V):
    """Trains SkyReels-V2 image to video from a folder or hub id of a
    SkyReelsV2ImageToVideoPipeline."""

    pipeline = "SkyReelsV2ImageToVideoPipeline"
    network = "SkyReelsV2Transformer3DModel"
    media = MediaFormat(fps=24.0)
    also = ()
