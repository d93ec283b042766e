"""Trains FLUX.2 klein (Black Forest Labs 2026): patches as channels, normalised by the
autoencoder's own statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.host import sent
from mmrl.core.registry import POLICIES
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy, vae_factor
from mmrl.policies.diffusion.schedulers import own_spacing, stepwise
from mmrl.policies.lora import ATTENTION


@POLICIES.register("flux2")
class Flux2(FolderPolicy):
    """Trains FLUX.2 klein from any diffusers folder or hub id of a Flux2KleinPipeline."""

    pipeline = "Flux2KleinPipeline"
    network = "Flux2Transformer2DModel"
    autoencoder = "AutoencoderKLFlux2"
    # Blocks of one stream make queries, keys, values and the feed-forward's entry by one
    # projection.
    attention = (*ATTENTION, "attn.to_qkv_mlp_proj")

    def __init__(
        self,
        path: str,
        text_length: Annotated[int, Ge(1)] = 512,
        text_layers: Sequence[int] = (9, 18, 27),
        **options: Any,
    ):
        """Extend the options of ``FolderPolicy``. text_length: tokens. text_layers: of the text
        encoder, whose states are concatenated."""
        self.text_length = text_length
        self.text_layers = tuple(text_layers)
        super().__init__(path, **options)

    def latent_shape(self) -> tuple[int, ...]:
        patch = 2 * vae_factor(self.vae)
        return (
            self.config.in_channels,
            *(self.latent_side(side, patch, patch) for side in self.size),
        )

    def tokens(self) -> int:
        return self.shape[-2] * self.shape[-1]

    def handed(self, steps: int, config: Any) -> dict[str, Any]:
        arguments = stepwise(steps, mu=empirical_mu(self.tokens(), steps))
        return arguments if not config.get("use_flow_sigmas") else own_spacing(steps, arguments)

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        text = self.cast(cond["text"])
        output: Tensor = self.active()(
            hidden_states=self.cast(x).flatten(2).mT,
            timestep=t,
            guidance=None,
            encoder_hidden_states=text,
            txt_ids=sent(places(1, 1, text.shape[1]), x.device)[None],
            img_ids=sent(places(*self.shape[-2:]), x.device)[None],
            return_dict=False,
        )[0]
        return output.mT.reshape(x.shape)

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        images: Tensor = vae.decode(self.unpatched(vae, latents)).sample
        return images

    def latents_of(self, vae: Any, pixels: Tensor) -> Tensor:
        """Encode to latents [B, C, H, W]: the autoencoder, then the inverse of ``unpatched``."""
        patches = torch.pixel_unshuffle(vae.encode(pixels).latent_dist.mode(), 2)
        mean, var = (
            x.view(1, -1, 1, 1).to(patches) for x in (vae.bn.running_mean, vae.bn.running_var)
        )
        latents: Tensor = (patches - mean) / (var + vae.config.batch_norm_eps).sqrt()
        return latents

    def unpatched(self, vae: Any, latents: Tensor) -> Tensor:
        """Return the latents that the autoencoder decodes, [B, C / 4, 2 H, 2 W]."""
        mean, var = (
            x.view(1, -1, 1, 1).to(latents) for x in (vae.bn.running_mean, vae.bn.running_var)
        )
        return torch.pixel_shuffle(latents * (var + vae.config.batch_norm_eps).sqrt() + mean, 2)

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        text, _ = pipe.encode_prompt(
            texts,
            device,
            max_sequence_length=self.text_length,
            text_encoder_out_layers=self.text_layers,
        )
        return {"text": text}


def places(h: int, w: int, words: int = 1) -> Tensor:
    """Return the position of every token, [h w words, 4]: 0, row, column, word."""
    return torch.cartesian_prod(*(torch.arange(n) for n in (1, h, w, words)))


def empirical_mu(tokens: int, steps: int) -> float:
    """Compute the shift's logarithm as fitted for FLUX.2: linear in tokens at 10 and at 200 steps,
    and linear in steps between these.

    Above 4,300 tokens the line of 200 steps holds for all.
    """
    many = 1.6927e-4 * tokens + 0.45666666
    if tokens > 4300:
        return many
    few = 8.73809524e-5 * tokens + 1.89833333
    return few + (many - few) * (steps - 10) / 190
