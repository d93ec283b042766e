"""Trains CogVideoX (Yang et al. 2024): v-prediction in a discrete diffusion that ends in pure
noise."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated, Any

import torch
from torch import Tensor

from mmrl.core.host import sent
from mmrl.core.registry import KERNELS, POLICIES
from mmrl.core.types import Kernel
from mmrl.policies.diffusion import schedulers
from mmrl.policies.diffusion.flow_policy import Grid
from mmrl.policies.diffusion.pipeline_policy import vae_factor
from mmrl.policies.diffusion.video_rates import rate_of
from mmrl.policies.lora import PROJECTIONS
from mmrl.zoo.models.diffusion.video_pipeline import VideoFolderPolicy
from samplers.kernels import ddim
from samplers.processes import Diffusion


@POLICIES.register("cogvideox")
class CogVideoX(VideoFolderPolicy):
    """Trains CogVideoX 1.0 and 1.5 text to video from a folder or hub id of a CogVideoXPipeline.

    Latents are [B, F, C, H, W]. The times and the process are those of diffusers'
    CogVideoXDDIMScheduler with the folder's settings, also where the folder asks for the DPM
    scheduler, whose steps have no density.
    """

    pipeline = "CogVideoXPipeline"
    network = "CogVideoXTransformer3DModel"
    autoencoder = "AutoencoderKLCogVideoX"
    process: Diffusion
    attention = tuple(f"attn1.{name}" for name in PROJECTIONS)

    def __init__(
        self,
        path: str,
        sde_type: Annotated[Kernel, KERNELS] = ddim,
        noise_level: float = 1.0,
        text_length: int = 226,
        **options: Any,
    ):
        """Extend the options of ``VideoFolderPolicy``. noise_level: 1 is ancestral sampling, 0 DDIM
        without noise. text_length: T5 tokens."""
        self.text_length = text_length
        super().__init__(path, sde_type=sde_type, noise_level=noise_level, **options)
        if rate := rate_of(self.network, self.config):
            self.media = replace(self.media, fps=rate)

    def latent_shape(self) -> tuple[int, ...]:
        """Return the shape of a sample's latents; version 1.5 joins ``patch_size_t`` frames in a
        token, so frames are added in front to fill a token."""
        factor = vae_factor(self.vae)
        config = self.config
        sides = tuple(
            self.latent_side(side, factor * config.patch_size, factor) for side in self.size
        )
        frames = self.latent_frames(int(self.vae.config.temporal_compression_ratio))
        self.added = -frames % (config.patch_size_t or 1)
        frames += self.added
        self.rotary = (
            self._rotary(factor, frames) if config.use_rotary_positional_embeddings else None
        )
        return (frames, config.in_channels, *sides)

    def _rotary(self, factor: int, frames: int) -> tuple[Tensor, Tensor]:
        """Compute the rotary embeddings as the pipeline does."""
        from diffusers import CogVideoXPipeline

        part = SimpleNamespace(
            vae_scale_factor_spatial=factor, transformer=SimpleNamespace(config=self.config)
        )
        rotary: tuple[Tensor, Tensor] = CogVideoXPipeline._prepare_rotary_positional_embeddings(
            part, *self.size, frames, torch.device("cpu")
        )
        return rotary

    def trained_process(self) -> Diffusion:
        self.scheduler = schedulers.discrete(self.place, "CogVideoXDDIMScheduler")
        return schedulers.discrete_process(self.scheduler)

    def own_grid(self) -> Grid:
        return schedulers.discrete_grid(self.scheduler)

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        rotary = self.rotary and tuple(sent(part, x.device) for part in self.rotary)
        output: Tensor = self.active()(
            hidden_states=self.cast(x),
            timestep=self.process.timestep(t),
            image_rotary_emb=rotary,
            encoder_hidden_states=self.cast(cond["text"]),
            return_dict=False,
        )[0]
        return output

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        videos: Tensor = vae.decode(
            latents[:, self.added :].transpose(1, 2) / vae.config.scaling_factor
        ).sample
        return videos

    def latents_of(self, vae: Any, pixels: Tensor) -> Tensor:
        """Encode to latents [B, F, C, H, W]; frames that only fill a token repeat the first."""
        mode: Tensor = vae.encode(pixels).latent_dist.mode()
        latents = mode.transpose(1, 2) * vae.config.scaling_factor
        return torch.cat([latents[:, :1]] * self.added + [latents], 1)

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        text, _ = pipe.encode_prompt(
            texts, None, False, max_sequence_length=self.text_length, device=device
        )
        return {"text": text}
