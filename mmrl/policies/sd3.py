"""Stable Diffusion 3 and 3.5 (Esser et al. 2024), and everything in their folder format."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
from torch import Tensor

from samplers.batching import chunks
from samplers.schedules import dynamic, flow_match_euler

from ..registry import GRIDS, POLICIES, UserError
from ..types import Media, Prompt, Rollout
from . import diffusers_folder
from .flow import FlowPolicy, Grid, Storage
from .prompts import Placement, PromptCache, texts_of


@POLICIES.register("sd3")
class SD3(FlowPolicy):
    """Stable Diffusion 3 / 3.5: any diffusers folder or hub id of a StableDiffusion3Pipeline."""

    makes = "image"

    def __init__(
        self,
        path: str,
        size: int = 512,
        grid: Annotated[Grid, GRIDS] | None = None,
        dtype: Storage = "float32",
        text_encoders: Placement = "offload",
        text_cache: int = 20000,
        t5: bool = True,
        **options: Any,
    ):
        """path: folder, hub id or world:NAME. size: image side in pixels. grid: None is the folder's own scheduler.
        dtype: of the frozen weights. text_encoders: where they go after use. text_cache: encoded prompts kept.
        t5: false leaves the largest text encoder out, as diffusers does for ``text_encoder_3=None``."""
        from diffusers import AutoencoderKL, SD3Transformer2DModel

        self.place, self.compute = diffusers_folder.resolve(path, "StableDiffusion3"), getattr(torch, dtype)
        self.t5 = t5 and diffusers_folder.holds(self.place, "text_encoder_3")
        net = diffusers_folder.load_part(SD3Transformer2DModel, self.place, "transformer", self.compute)
        self.vae = diffusers_folder.load_part(AutoencoderKL, self.place, "vae").requires_grad_(False).eval()
        side = _latent_side(size, 2 ** (len(self.vae.config.block_out_channels) - 1), net.config.patch_size)
        self.shape = (net.config.in_channels, side, side)
        self.texts = PromptCache(self._load_texts, self._encode_texts, text_encoders, text_cache)
        super().__init__(net, grid=grid or self._own_grid((side // net.config.patch_size) ** 2), **options)

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        cond = self.texts(texts_of(prompts), self.device)
        return cond | {"uncond": self.texts([""], self.device)}

    def prepare(self, prompts: list[Prompt]) -> None:
        if self.texts.placement == "release":
            self.texts(["", *dict.fromkeys(texts_of(prompts))], self.device)

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        net_dtype = self.dtype if self.dtype == torch.float64 else self.compute
        return self.active()(  # times stay in full precision: half of it moves 960.1 to 960
            hidden_states=x.to(net_dtype), timestep=1000 * t, return_dict=False,
            encoder_hidden_states=cond["text"].to(net_dtype), pooled_projections=cond["pooled"].to(net_dtype),
        )[0]  # fmt: skip

    def decode(self, rollout: Rollout) -> Media:
        vae, parts = self.vae.to(self.device), chunks(len(rollout), self.width or len(rollout))
        scaled = rollout.sample.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        with torch.no_grad():
            return torch.cat([(vae.decode(scaled[p]).sample / 2 + 0.5).clamp(0, 1) for p in parts])

    def export(self, folder: Path) -> None:
        """LoRA for ``pipe.load_lora_weights``, or the whole pipeline when all weights were trained."""
        from diffusers import StableDiffusion3Pipeline

        if getattr(self.net, "peft_config", None):
            diffusers_folder.save_lora(StableDiffusion3Pipeline, self.net, folder)
        else:
            diffusers_folder.save_full(StableDiffusion3Pipeline, self.place, self.net, folder)

    def _load_texts(self) -> Any:
        from diffusers import StableDiffusion3Pipeline

        without = () if self.t5 else ("text_encoder_3", "tokenizer_3")
        pipe = diffusers_folder.load_text_pipeline(StableDiffusion3Pipeline, self.place, self.compute, without)
        pipe.__dict__["transformer"] = SimpleNamespace(config=self.net.config)  # asked for a width if there is no T5
        return pipe

    def _encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        length = min(256, pipe.tokenizer_3.model_max_length) if pipe.tokenizer_3 is not None else 256
        text, _, pooled, _ = pipe.encode_prompt(
            texts, texts, texts, device=device, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return {"text": text, "pooled": pooled}

    def _own_grid(self, tokens: int) -> Grid:
        """The folder's scheduler: static shift, or the shift that depends on the number of image tokens."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        config = diffusers_folder.load_part(FlowMatchEulerDiscreteScheduler, self.place, "scheduler").config
        if not config.use_dynamic_shifting:
            return partial(flow_match_euler, shift=config.shift, train_steps=config.num_train_timesteps)
        names = {"base_tokens": "base_image_seq_len", "max_tokens": "max_image_seq_len"}
        ends = {ours: config[theirs] for ours, theirs in names.items()}
        shifts = {"base_shift": config.base_shift, "max_shift": config.max_shift, "time_shift": config.time_shift_type}
        return partial(dynamic, tokens=tokens, smallest=1 / config.num_train_timesteps, **ends, **shifts)


def _latent_side(size: int, vae_factor: int, patch: int) -> int:
    step = vae_factor * patch
    if size < step or size % step:
        down, up = max(step, size // step * step), math.ceil(size / step) * step
        raise UserError(f"policy.sd3.size {size} is not a multiple of {step}; the nearest are {down} and {up}")
    return size // vae_factor
