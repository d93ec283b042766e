"""Trains models that predict noise, v or the sample in a discrete diffusion: Stable Diffusion 1, 2
and XL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.host import sent
from mmrl.core.registry import KERNELS, POLICIES
from mmrl.core.types import Kernel, Prompt, Rollout
from mmrl.policies.demonstrations import middle_of
from mmrl.policies.diffusion import schedulers
from mmrl.policies.diffusion.flow_policy import Grid
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy, vae_factor
from mmrl.policies.lora import TWO_ATTENTIONS
from samplers.kernels import ddim
from samplers.noise import Rng
from samplers.processes import Consistent, Diffusion


class UNetPolicy(FolderPolicy):
    """Trains a UNet that predicts noise (or v, or the sample) on latents of AutoencoderKL, on
    DDIM's time grid."""

    network = "UNet2DConditionModel"
    part = "unet"
    scheduler_class = "DDIMScheduler"
    mended: ClassVar[dict[str, Any]] = {}  # settings of the scheduler that the pipeline changes
    process: Diffusion
    attention = TWO_ATTENTIONS

    def __init__(
        self,
        path: str,
        sde_type: Annotated[Kernel, KERNELS] = ddim,
        noise_level: float = 1.0,
        embedded_guidance: Annotated[float, Ge(1)] | None = None,
        **options: Any,
    ):
        """Extend the options of ``FolderPolicy``. noise_level: 1 is ancestral sampling (DDPO), 0
        DDIM without noise. embedded_guidance: the guidance scale that a distilled network takes as
        an input (LCM-SDXL), which is the pipeline's guidance_scale; ``guidance_scale`` is on top of
        it. None: 1, and for networks that take none."""
        self.embedded_guidance = 1.0 if embedded_guidance is None else embedded_guidance
        super().__init__(path, sde_type=sde_type, noise_level=noise_level, **options)
        if self.config.time_cond_proj_dim is not None:
            self.guided_by = ""  # the pipeline has no guidance besides
        if self.config.time_cond_proj_dim is not None and embedded_guidance is None:
            self.report.notes += (
                "the network takes its guidance scale as an input, which is 1; policy option "
                "embedded_guidance sets it",
            )
        if self.config.time_cond_proj_dim is None and embedded_guidance is not None:
            raise UserError(
                f"policy option embedded_guidance: the network of {self.place!r} takes no guidance "
                "scale (its time_cond_proj_dim is null); leave it out"
            )

    def latent_shape(self) -> tuple[int, ...]:
        factor = vae_factor(self.vae)
        return (
            self.config.in_channels,
            *(self.latent_side(side, factor, factor) for side in self.size),
        )

    def trained_process(self) -> Diffusion:
        """Return the process of the folder's scheduler, whose timesteps are taken too, with its
        spacing and offset."""
        self.scheduler = schedulers.discrete(self.place, self.scheduler_class, **self.mended)
        known = schedulers.discrete_process(self.scheduler)
        if self.scheduler_class != "LCMScheduler":
            return known
        # its last step ends at the data, whatever alpha is there
        scaling = self.scheduler.config.timestep_scaling
        return Consistent(known.prediction, known.alphas, scaling=scaling)

    def own_grid(self) -> Grid:
        return schedulers.discrete_grid(self.scheduler)

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        added = {
            name: self.cast(cond[name]) for name in ("text_embeds", "time_ids") if name in cond
        }
        output: Tensor = self.active()(
            self.cast(x),
            self.process.timestep(t),
            encoder_hidden_states=self.cast(cond["text"]),
            added_cond_kwargs=added or None,
            timestep_cond=self.time_condition(x, cond),
            return_dict=False,
        )[0]
        return output

    def time_condition(self, x: Tensor, cond: dict[str, Any]) -> Tensor | None:
        """Return a distilled network's extra input: the guidance scale as [B, C] sines and cosines,
        by the pipeline's own function, as the angles are large."""
        from diffusers import LatentConsistencyModelPipeline

        wide = self.config.time_cond_proj_dim
        if wide is None:
            return None
        scales = (
            torch.as_tensor(self.embedded(cond, self.embedded_guidance)).float().cpu().reshape(-1)
        )
        embed = LatentConsistencyModelPipeline.get_guidance_scale_embedding
        return self.cast(sent(embed(self, scales - 1, wide), x.device)).expand(len(x), -1)

    def moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (mean, std) that latents are standardised by before they are scaled, [1, C, 1, 1];
        the pipeline reads no shift."""
        return like.new_zeros(()), like.new_ones(())

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        mean, std = self.moments(latents)
        pixels: Tensor = vae.decode(latents * std / vae.config.scaling_factor + mean).sample
        return pixels

    def latents_of(self, vae: Any, pixels: Tensor) -> Tensor:
        mode: Tensor = vae.encode(pixels).latent_dist.mode()
        mean, std = self.moments(mode)
        latents: Tensor = (mode - mean) * vae.config.scaling_factor / std
        return latents


@POLICIES.register("sd")
class SD(UNetPolicy):
    """Trains Stable Diffusion 1 and 2 from any diffusers folder or hub id of a
    StableDiffusionPipeline."""

    pipeline = "StableDiffusionPipeline"
    mended: ClassVar[dict[str, Any]] = {"steps_offset": 1, "clip_sample": False}

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
        return {"text": text, "text_embeds": pooled}

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        cond = super().encode(prompts)
        # original size, crop corner, size
        sizes = cond["text_embeds"].new_tensor([[*self.size, 0, 0, *self.size]])
        return cond | {"time_ids": sizes.repeat(len(prompts), 1)}

    def moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        config = self.vae.config
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if mean is None or std is None:
            return super().moments(like)
        return like.new_tensor(mean).view(1, -1, 1, 1), like.new_tensor(std).view(1, -1, 1, 1)

    def demonstrate(
        self, prompts: list[Prompt], answers: Sequence[Any], rng: Rng, *, score: bool = True
    ) -> Rollout:
        """Train on external pictures, with their original size and crop as conditions, as in
        pre-training."""
        rollout = super().demonstrate(prompts, answers, rng, score=score)
        conditions: Tensor = rollout.cond["time_ids"]
        rows = [
            row if picture is None else row.new_tensor([*self._origin(picture), *self.size])
            for row, picture in zip(conditions, answers, strict=True)
        ]
        return rollout.replace(cond={**rollout.cond, "time_ids": torch.stack(rows)})

    def _origin(self, picture: Any) -> tuple[int, int, int, int]:
        """Return height and width of a picture [3, H, W] as it came, and the corner at which it is
        cut once it has its new scale (diffusers' training scripts)."""
        pixels = torch.as_tensor(picture)
        (top, left), _, scale = middle_of(pixels, self.size)
        return pixels.shape[-2], pixels.shape[-1], round(top * scale), round(left * scale)

    def without(self) -> tuple[str, ...]:
        return ("feature_extractor", "image_encoder")
