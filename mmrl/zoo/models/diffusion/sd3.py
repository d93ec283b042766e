"""Trains Stable Diffusion 3 and 3.5 (Esser et al. 2024), and every model in their folder format."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES
from mmrl.policies.diffusion import diffusers_folder
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy, vae_factor
from mmrl.policies.diffusion.schedulers import shift_of


@POLICIES.register("sd3")
class SD3(FolderPolicy):
    """Trains Stable Diffusion 3 / 3.5 from any diffusers folder or hub id of a
    StableDiffusion3Pipeline."""

    pipeline = "StableDiffusion3Pipeline"
    network = "SD3Transformer2DModel"

    def __init__(self, path: str, t5: bool = True, **options: Any):
        """Extend the options of ``FolderPolicy``. t5: false leaves the largest text encoder out, as
        diffusers does for ``text_encoder_3=None``."""
        self.t5 = t5
        self.text_length = 256  # tokens of the third encoder
        super().__init__(path, **options)
        self.t5 = t5 and diffusers_folder.holds(self.place, "text_encoder_3")

    def latent_shape(self) -> tuple[int, ...]:
        factor = vae_factor(self.vae)
        patch = factor * self.config.patch_size
        sides = [self.latent_side(side, patch, factor) for side in self.size]
        largest = patch * self.config.pos_embed_max_size
        if max(self.size) > largest:
            raise UserError(
                f"policy option size {max(self.size)} is more than the {largest} pixels a side "
                "for which the model has positions"
            )
        return (self.config.in_channels, *sides)

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        output: Tensor = (
            self.active()(  # times stay in full precision: half of it moves 960.1 to 960
                hidden_states=self.cast(x),
                timestep=1000 * t,
                return_dict=False,
                encoder_hidden_states=self.cast(cond["text"]),
                pooled_projections=self.cast(cond["pooled"]),
            )[0]
        )
        return output

    def handed(self, steps: int, config: Any) -> dict[str, Any]:
        dynamic = (
            {"mu": shift_of(self.tokens(), config)} if config.get("use_dynamic_shifting") else {}
        )
        return super().handed(steps, config) | dynamic

    def without(self) -> tuple[str, ...]:
        return () if self.t5 else ("text_encoder_3", "tokenizer_3")

    def load_texts(self) -> Any:
        pipe = super().load_texts()
        # the pipeline reads the width of a T5 that was left out
        pipe.__dict__["transformer"] = SimpleNamespace(config=self.config)
        return pipe

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        length = (
            min(256, pipe.tokenizer_3.model_max_length) if pipe.tokenizer_3 is not None else 256
        )
        text, _, pooled, _ = pipe.encode_prompt(
            texts,
            texts,
            texts,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=length,
        )
        return {"text": text, "pooled": pooled}
