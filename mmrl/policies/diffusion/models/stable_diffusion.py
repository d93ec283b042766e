"""Trains models that predict noise, v or the sample in a discrete diffusion: Stable Diffusion 1, 2
and XL."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import KERNELS, POLICIES
from mmrl.core.types import Kernel
from mmrl.policies.diffusion.flow_policy import Grid
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy, vae_factor
from samplers.kernels import ddim
from samplers.processes import Consistent, Diffusion


class UNetPolicy(FolderPolicy):
    """Trains a UNet that predicts noise (or v, or the sample) on latents of AutoencoderKL, on
    DDIM's time grid."""

    network = "UNet2DConditionModel"
    part = "unet"
    scheduler_class = "DDIMScheduler"
    process: Diffusion
    attention = tuple(
        f"{layer}.{name}"
        for layer in ("attn1", "attn2")
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    )

    def __init__(
        self,
        path: str,
        sde_type: Annotated[Kernel, KERNELS] = ddim,
        noise_level: float = 1.0,
        **options: Any,
    ):
        """Extend the options of ``FolderPolicy``. noise_level: 1 is ancestral sampling (DDPO), 0
        DDIM without noise."""
        super().__init__(path, sde_type=sde_type, noise_level=noise_level, **options)

    def latent_shape(self) -> tuple[int, ...]:
        factor = vae_factor(self.vae)
        return (
            self.config.in_channels,
            *(self.latent_side(side, factor, factor) for side in self.size),
        )

    def trained_process(self) -> Diffusion:
        """Return the process of the folder's scheduler, whose timesteps are taken too, with its
        spacing and offset."""
        self.scheduler = self.load_part(self.scheduler_class, "scheduler")
        config = self.scheduler.config
        if config.clip_sample or config.thresholding:
            raise UserError(
                f"the scheduler of {self.place!r} clips samples; set clip_sample and "
                f"thresholding to false"
            )
        known = discrete_process(self.scheduler)
        if self.scheduler_class != "LCMScheduler":
            return known
        # its last step ends at the data, whatever alpha is there
        scaling = config.timestep_scaling
        return Consistent(known.prediction, known.alphas, scaling=scaling)

    def own_grid(self) -> Grid:
        return discrete_grid(self.scheduler)

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        added = {
            name: self.cast(cond[name]) for name in ("text_embeds", "time_ids") if name in cond
        }
        output: Tensor = self.active()(
            self.cast(x),
            self.process.timestep(t),
            encoder_hidden_states=self.cast(cond["text"]),
            added_cond_kwargs=added or None,
            timestep_cond=self.time_condition(x),
            return_dict=False,
        )[0]
        return output

    def time_condition(self, x: Tensor) -> Tensor | None:
        """Return what the network takes beside the time, [B, C]."""
        return None


def discrete_process(scheduler: Any) -> Diffusion:
    """Return the process of one of diffusers' DDIM schedulers."""
    final = float(scheduler.final_alpha_cumprod)
    return Diffusion(scheduler.config.prediction_type, scheduler.alphas_cumprod.double(), final)


def discrete_grid(scheduler: Any) -> Grid:
    """Return the scheduler's own timesteps as a time grid."""

    def grid(steps: int) -> Tensor:
        scheduler.set_timesteps(steps)
        times = (scheduler.timesteps.double() + 1) / len(scheduler.alphas_cumprod)
        return torch.cat([times, times.new_zeros(1)])

    return grid


@POLICIES.register("sd")
class SD(UNetPolicy):
    """Trains Stable Diffusion 1 and 2 from any diffusers folder or hub id of a
    StableDiffusionPipeline."""

    pipeline = "StableDiffusionPipeline"

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        text, _ = pipe.encode_prompt(
            texts, device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"text": text}

    def without(self) -> tuple[str, ...]:
        return ("safety_checker", "feature_extractor", "image_encoder")


@POLICIES.register("sdxl")
class SDXL(UNetPolicy):
    """Trains Stable Diffusion XL from any diffusers folder or hub id of a
    StableDiffusionXLPipeline."""

    pipeline = "StableDiffusionXLPipeline"

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        text, _, pooled, _ = pipe.encode_prompt(
            texts, device=device, do_classifier_free_guidance=False
        )
        # as the pipeline does without a negative prompt
        if pipe.config.force_zeros_for_empty_prompt:
            empty = torch.tensor([not text for text in texts], device=text.device)
            text = text.masked_fill(empty[:, None, None], 0)
            pooled = pooled.masked_fill(empty[:, None], 0)
        # original size, crop corner, size
        sizes = torch.tensor([[*self.size, 0, 0, *self.size]], dtype=text.dtype)
        return {"text": text, "text_embeds": pooled, "time_ids": sizes.repeat(len(texts), 1)}

    def without(self) -> tuple[str, ...]:
        return ("feature_extractor", "image_encoder")
