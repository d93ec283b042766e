"""Trains Qwen-Image (Wu et al. 2025): packed latents of a video autoencoder, texts encoded by
Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from mmrl.core.registry import POLICIES
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy, padded
from mmrl.policies.diffusion.row_settings import NEGATIVE, SEED, SIZE, TRUE_CFG
from mmrl.policies.diffusion.schedulers import shift_of, stepwise
from mmrl.zoo.models.diffusion.flux import pack, unpack
from mmrl.zoo.models.diffusion.video_pipeline import standardised


@POLICIES.register("qwen_image")
class QwenImage(FolderPolicy):
    """Trains Qwen-Image from any diffusers folder or hub id of a QwenImagePipeline."""

    pipeline = "QwenImagePipeline"
    network = "QwenImageTransformer2DModel"
    autoencoder = "AutoencoderKLQwenImage"
    guided_by = TRUE_CFG
    reads = (NEGATIVE, TRUE_CFG, SEED, SIZE)

    text_length: int

    def __init__(self, path: str, text_length: Annotated[int, Ge(1)] = 512, **options: Any):
        """Extend the options of ``FolderPolicy``. text_length: tokens of a prompt; shorter ones are
        padded and masked."""
        self.text_length = text_length
        super().__init__(path, **options)

    def unused(self, net: Any) -> Iterator[nn.Parameter]:
        """Name what follows the last attention on the text's side."""
        last = net.transformer_blocks[-1]
        return chain(last.attn.to_add_out.parameters(), last.txt_mlp.parameters())

    def latent_shape(self) -> tuple[int, ...]:
        factor = 2 ** len(self.vae.temperal_downsample)
        return (
            self.config.in_channels // 4,
            *(self.latent_side(side, 2 * factor, factor) for side in self.size),
        )

    def tokens(self) -> int:
        return self.shape[-2] * self.shape[-1] // 4

    def handed(self, steps: int, config: Any) -> dict[str, Any]:
        return stepwise(steps, mu=shift_of(self.tokens(), config))

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        tokens, pictures = self.network_inputs(x, cond)
        output = self.active()(
            hidden_states=self.cast(tokens),
            timestep=t,
            encoder_hidden_states=self.cast(cond["text"]),
            encoder_hidden_states_mask=cond["mask"],
            img_shapes=[pictures] * len(x),
            return_dict=False,
        )[0]
        return unpack(output[:, : self.tokens()], *self.shape[-2:])

    def network_inputs(
        self, x: Tensor, cond: dict[str, Any]
    ) -> tuple[Tensor, list[tuple[int, int, int]]]:
        """Pack the latents, and any further image to look at, to tokens [B, N, 4 C], with frames,
        height and width of each."""
        h, w = self.shape[-2:]
        return pack(x), [(1, h // 2, w // 2)]

    def combine(self, v: Tensor, empty: Tensor, scale: float | Tensor) -> Tensor:
        """Guide, and rescale every token to the length it has in the conditional velocity."""
        guided = pack(empty + scale * (v - empty))
        length = pack(v).norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        return unpack(guided * length, *self.shape[-2:])

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        frame = latents[:, :, None]
        mean, std = standardised(vae, frame)
        images: Tensor = vae.decode(frame * std + mean).sample
        return images[:, :, 0]

    def latents_of(self, vae: Any, pixels: Tensor) -> Tensor:
        latents: Tensor = vae.encode(pixels[:, :, None]).latent_dist.mode()
        mean, std = standardised(vae, latents)
        return ((latents - mean) / std)[:, :, 0]

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        text, mask = pipe.encode_prompt(texts, device, max_sequence_length=self.text_length)
        return padded(text, mask, self.text_length)
