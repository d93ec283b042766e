"""Trains FLUX.1 (Black Forest Labs 2024): dev with embedded guidance, schnell without."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.host import sent
from mmrl.core.registry import POLICIES
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy, vae_factor
from mmrl.policies.diffusion.row_settings import GUIDANCE, NEGATIVE, SEED, SIZE, TRUE_CFG
from mmrl.policies.diffusion.schedulers import own_spacing, shift_of, stepwise


@POLICIES.register("flux")
class Flux(FolderPolicy):
    """Trains FLUX.1 from any diffusers folder or hub id of a FluxPipeline."""

    pipeline = "FluxPipeline"
    network = "FluxTransformer2DModel"
    guided_by = TRUE_CFG
    reads: tuple[str, ...] = (NEGATIVE, GUIDANCE, TRUE_CFG, SEED, SIZE)

    def __init__(
        self,
        path: str,
        embedded_guidance: Annotated[float, Ge(0)] = 3.5,
        text_length: int = 512,
        **options: Any,
    ):
        """Extend the options of ``FolderPolicy``. embedded_guidance: the guidance scale that
        FLUX.1-dev takes as an input (``guidance_scale`` is classifier-free guidance on top, as
        diffusers' ``true_cfg_scale``). text_length: T5 tokens."""
        self.embedded_guidance = embedded_guidance
        self.text_length = text_length
        super().__init__(path, **options)
        if not self.config.guidance_embeds:
            self.reads = tuple(name for name in self.reads if name != GUIDANCE)

    def latent_shape(self) -> tuple[int, ...]:
        factor = vae_factor(self.vae)
        return (
            self.config.in_channels // 4,
            *(self.latent_side(side, 2 * factor, factor) for side in self.size),
        )

    def tokens(self) -> int:
        return self.shape[-2] * self.shape[-1] // 4

    def handed(self, steps: int, config: Any) -> dict[str, Any]:
        arguments = stepwise(steps, mu=shift_of(self.tokens(), config))
        return arguments if not config.get("use_flow_sigmas") else own_spacing(steps, arguments)

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        text, (tokens, positions) = cond["text"], self.network_inputs(x, cond)
        guidance = None
        if self.config.guidance_embeds:
            guidance = torch.ones_like(t) * self.embedded(cond, self.embedded_guidance)
        output = self.active()(
            hidden_states=self.cast(tokens),
            timestep=t,
            guidance=guidance,
            return_dict=False,
            encoder_hidden_states=self.cast(text),
            pooled_projections=self.cast(cond["pooled"]),
            txt_ids=text.new_zeros(text.shape[1], 3),
            img_ids=sent(positions.to(text.dtype), text.device),
        )[0]
        return unpack(output[:, : self.tokens()], *self.shape[-2:])

    def network_inputs(self, x: Tensor, cond: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Pack the latents, and any further image to look at, to tokens [B, N, 4 C] with their
        positions [N, 3]."""
        return pack(x), places(*self.shape[-2:])

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        text, pooled, _ = pipe.encode_prompt(
            texts, texts, device=device, max_sequence_length=self.text_length
        )
        return {"text": text, "pooled": pooled}


def pack(x: Tensor) -> Tensor:
    """Pack latents [B, C, H, W] to tokens [B, H/2 W/2, 4 C] of two by two."""
    b, c, h, w = x.shape
    return (
        x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)
    )


def unpack(tokens: Tensor, h: int, w: int) -> Tensor:
    """Invert ``pack`` for latents of h by w."""
    b, _, c = tokens.shape
    return (
        tokens.view(b, h // 2, w // 2, c // 4, 2, 2)
        .permute(0, 3, 1, 4, 2, 5)
        .reshape(b, c // 4, h, w)
    )


def places(h: int, w: int) -> Tensor:
    """Return the position of every token, [H/2 W/2, 3]: 0, row, column."""
    rows, columns = torch.meshgrid(torch.arange(h // 2), torch.arange(w // 2), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1)
