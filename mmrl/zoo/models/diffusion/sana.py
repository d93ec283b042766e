"""Trains Sana (Xie et al. 2024): linear attention on the latents of a deep-compression
autoencoder."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.registry import POLICIES
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy
from mmrl.policies.lora import TWO_ATTENTIONS


@POLICIES.register("sana")
class Sana(FolderPolicy):
    """Trains Sana from any diffusers folder or hub id of a SanaPipeline."""

    pipeline = "SanaPipeline"
    network = "SanaTransformer2DModel"
    autoencoder = "AutoencoderDC"
    attention = TWO_ATTENTIONS

    def __init__(
        self,
        path: str,
        text_length: Annotated[int, Ge(2)] = 300,
        instruct: bool = True,
        **options: Any,
    ):
        """Extend the options of ``FolderPolicy``. text_length: tokens. instruct: put the pipeline's
        instruction to enhance the prompt before it."""
        self.text_length = text_length
        self.instruct = instruct
        super().__init__(path, **options)
        self.plain_texts = self.texts.of(self._encode_plain)

    def latent_shape(self) -> tuple[int, ...]:
        factor = 2 ** (len(self.vae.config.encoder_block_out_channels) - 1)
        sides = (
            self.latent_side(side, factor * self.config.patch_size, factor) for side in self.size
        )
        return (self.config.in_channels, *sides)

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        output: Tensor = self.active()(
            self.cast(x),
            timestep=1000 * t * self.config.timestep_scale,
            return_dict=False,
            encoder_hidden_states=self.cast(cond["text"]),
            encoder_attention_mask=cond["mask"],
        )[0]
        return output[:, : x.shape[1]]  # some networks also give a variance

    def latents_of(self, vae: Any, pixels: Tensor) -> Tensor:
        latents: Tensor = vae.encode(pixels).latent * vae.config.scaling_factor
        return latents

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        """Encode texts; the empty prompt goes without instruction, as the pipeline's negative
        prompt does."""
        default = inspect.signature(pipe.__call__).parameters["complex_human_instruction"].default
        parts = [
            self._encode(pipe, text, device, default if text and self.instruct else None)
            for text in texts
        ]
        text, mask = (torch.cat(part) for part in zip(*parts))
        return {"text": text, "mask": mask}

    def negatives(self, texts: list[str]) -> dict[str, Tensor]:
        """Encode without the instruction, as the pipeline does."""
        return self.plain_texts(texts, self.device)

    def _encode_plain(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        text, mask = (
            torch.cat(p) for p in zip(*(self._encode(pipe, t, device, None) for t in texts))
        )
        return {"text": text, "mask": mask}

    def _encode(
        self, pipe: Any, text: str, device: torch.device, instruction: list[str] | None
    ) -> tuple[Tensor, Tensor]:
        encoded, mask = pipe.encode_prompt(
            text,
            False,
            device=device,
            max_sequence_length=self.text_length,
            complex_human_instruction=instruction,
        )[:2]
        return encoded, mask
