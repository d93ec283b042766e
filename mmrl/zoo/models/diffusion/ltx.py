"""Trains LTX-Video (HaCohen et al. 2024): one token for each latent, times shifted by the number of
tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.core.registry import POLICIES
from mmrl.policies.diffusion.schedulers import shift_of, stepwise
from mmrl.zoo.models.diffusion.video_pipeline import VideoFolderPolicy
from mmrl.zoo.models.diffusion.wan import Wan


@POLICIES.register("ltx")
class LTX(VideoFolderPolicy):
    """Trains LTX-Video text to video from any diffusers folder or hub id of an LTXPipeline."""

    pipeline = "LTXPipeline"
    network = "LTXVideoTransformer3DModel"
    autoencoder = "AutoencoderKLLTXVideo"
    attention = Wan.attention

    def __init__(
        self,
        path: str,
        fps: Annotated[float, Gt(0)] = 25.0,
        text_length: int = 128,
        decode_time: Annotated[float, Ge(0), Le(1)] = 0.0,
        **options: Any,
    ):
        """Extend the options of ``VideoFolderPolicy``. fps: frames a second, an input of the
        network. text_length: T5 tokens. decode_time: the time that autoencoders from 0.9.1 on take
        for decoding; no noise is added, so that rewards are deterministic."""
        self.fps = fps
        self.media = replace(self.media, fps=fps)
        self.text_length = text_length
        self.decode_time = decode_time
        super().__init__(path, **options)

    def latent_shape(self) -> tuple[int, ...]:
        factor = self.vae.spatial_compression_ratio
        sides = (self.latent_side(side, factor, factor) for side in self.size)
        return (
            self.config.in_channels,
            self.latent_frames(self.vae.temporal_compression_ratio),
            *sides,
        )

    def tokens(self) -> int:
        _, frames, height, width = self.shape
        return frames * height * width

    def handed(self, steps: int, config: Any) -> dict[str, Any]:
        return stepwise(steps, mu=shift_of(self.tokens(), config))

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        frames, height, width = x.shape[2:]
        spatial = self.vae.spatial_compression_ratio
        tokens: Tensor = self.active()(
            hidden_states=self.cast(x.flatten(2).transpose(1, 2)),
            timestep=1000 * t,
            encoder_hidden_states=self.cast(cond["text"]),
            encoder_attention_mask=cond["mask"],
            num_frames=frames,
            height=height,
            width=width,
            return_dict=False,
            rope_interpolation_scale=(
                self.vae.temporal_compression_ratio / self.fps,
                spatial,
                spatial,
            ),
        )[0]
        output: Tensor = tokens.transpose(1, 2).unflatten(2, (frames, height, width))
        return output

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        mean, std = (
            value.to(latents).view(1, -1, 1, 1, 1) for value in (vae.latents_mean, vae.latents_std)
        )
        time = (
            latents.new_full((len(latents),), self.decode_time)
            if vae.config.timestep_conditioning
            else None
        )
        videos: Tensor = vae.decode(latents * std / vae.config.scaling_factor + mean, time).sample
        return videos

    def latents_of(self, vae: Any, pixels: Tensor) -> Tensor:
        mode: Tensor = vae.encode(pixels).latent_dist.mode()
        mean, std = (
            value.to(mode).view(1, -1, 1, 1, 1) for value in (vae.latents_mean, vae.latents_std)
        )
        latents: Tensor = (mode - mean) * vae.config.scaling_factor / std
        return latents

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        text, mask, _, _ = pipe.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            max_sequence_length=self.text_length,
            device=device,
        )
        return {"text": text, "mask": mask}
