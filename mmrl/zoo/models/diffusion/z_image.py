"""Trains Z-Image (Z-Image team 2025): a single-stream transformer that counts time from noise to
data."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmrl.core.registry import POLICIES
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy, padded, vae_factor
from mmrl.policies.diffusion.schedulers import shift_of, stepwise


@POLICIES.register("z_image")
class ZImage(FolderPolicy):
    """Trains Z-Image from any diffusers folder or hub id of a ZImagePipeline."""

    pipeline = "ZImagePipeline"
    network = "ZImageTransformer2DModel"
    attention = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")

    text_length: int

    def __init__(
        self,
        path: str,
        normalise: Annotated[float, Ge(0)] = 0.0,
        text_length: Annotated[int, Ge(1)] = 512,
        **options: Any,
    ):
        """Extend the options of ``FolderPolicy``. normalise: the most a guided velocity may be
        longer than the conditional one, as a factor (the pipeline's ``cfg_normalization``); 0: no
        limit. text_length: tokens. ``guidance_scale`` is the pipeline's scale plus 1."""
        self.normalise = normalise
        self.text_length = text_length
        super().__init__(path, **options)

    def latent_shape(self) -> tuple[int, ...]:
        factor = vae_factor(self.vae)
        return (
            self.config.in_channels,
            *(self.latent_side(side, 2 * factor, factor) for side in self.size),
        )

    def tokens(self) -> int:
        return self.shape[-2] * self.shape[-1] // 4

    def handed(self, steps: int, config: Any) -> dict[str, Any]:
        return stepwise(steps, mu=shift_of(self.tokens(), config))

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        """Compute the velocity by a network that takes lists and the time from noise (0) to data
        (1), and returns data minus noise."""
        captions = [text[mask] for text, mask in zip(self.cast(cond["text"]), cond["mask"])]
        outputs = self.active()(
            list(self.cast(x)[:, :, None].unbind()), 1 - t, captions, return_dict=False
        )[0]
        return -torch.stack(list(outputs))[:, :, 0]

    def scale_of(self, guidance: Tensor) -> Tensor:
        return 1 + guidance

    def combine(self, v: Tensor, empty: Tensor, scale: float | Tensor) -> Tensor:
        guided = empty + scale * (v - empty)
        if not self.normalise:
            return guided
        dims = tuple(range(1, v.ndim))
        longest: Tensor = self.normalise * torch.linalg.vector_norm(v, dim=dims, keepdim=True)
        length: Tensor = torch.linalg.vector_norm(guided, dim=dims, keepdim=True)
        return guided * (longest / length).clamp_max(1)

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        encodings, _ = pipe.encode_prompt(
            list(texts), device, False, max_sequence_length=self.text_length
        )
        mask = pad_sequence([text.new_ones(len(text)) for text in encodings], batch_first=True)
        return padded(pad_sequence(encodings, batch_first=True), mask, self.text_length)
