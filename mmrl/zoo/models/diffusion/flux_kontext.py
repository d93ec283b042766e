"""Trains FLUX.1 Kontext (Batifol et al. 2025): FLUX.1 conditioned on an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmrl.core.registry import POLICIES
from mmrl.core.types import Prompt
from mmrl.zoo.models.diffusion.flux import Flux, pack, places
from mmrl.zoo.models.diffusion.image_editing import EditPolicy


@POLICIES.register("flux_kontext")
class FluxKontext(EditPolicy, Flux):
    """Trains FLUX.1 Kontext from any diffusers folder or hub id of a FluxKontextPipeline."""

    pipeline = "FluxKontextPipeline"

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        return super().encode(prompts) | {"image": self.picture_latents(self.pictures(prompts))}

    def network_inputs(self, x: Tensor, cond: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Append the tokens of the image to those of the sample, with 1 as their first
        coordinate."""
        tokens, positions = super().network_inputs(x, cond)
        image = cond["image"]
        theirs = places(*image.shape[-2:])
        theirs[:, 0] = 1
        return torch.cat([tokens, pack(image).to(tokens)], 1), torch.cat([positions, theirs])
