"""Trains Qwen-Image-Edit (Wu et al. 2025): the image to edit goes into the text encoder and, as
latents, into the network."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES
from mmrl.core.types import Prompt
from mmrl.policies.diffusion.pipeline_policy import padded
from mmrl.policies.diffusion.text_encoding import texts_of
from mmrl.zoo.models.diffusion.flux import pack
from mmrl.zoo.models.diffusion.image_editing import EditPolicy, Request
from mmrl.zoo.models.diffusion.qwen_image import QwenImage


@POLICIES.register("qwen_edit")
class QwenEdit(EditPolicy, QwenImage):
    """Trains Qwen-Image-Edit from any diffusers folder or hub id of a QwenImageEditPipeline."""

    pipeline = "QwenImageEditPipeline"

    def __init__(self, path: str, text_length: Annotated[int, Ge(1)] = 1024, **options: Any):
        """Extend the options of ``EditPolicy``. text_length: tokens of a prompt with its image,
        which takes one for every 28 by 28 pixels."""
        super().__init__(path, text_length=text_length, **options)
        self.texts = self.texts.of(self.encode_requests)

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Encode texts with their images; ``negative`` is the empty prompt with each image."""
        settings = self.row_settings(prompts)
        pictures = self.pictures(prompts)
        requests, empty = self._requests(prompts, pictures)
        cond = (
            settings | self.texts(requests, self.device) | {"image": self.picture_latents(pictures)}
        )
        return cond | {"negative": self.texts(empty, self.device)}

    def _requests(
        self, prompts: list[Prompt], pictures: list[Any]
    ) -> tuple[list[Request], list[Request]]:
        requests = [Request(text, image) for text, image in zip(texts_of(prompts), pictures)]
        return requests, [
            Request(text, image) for text, image in zip(self.negatives_of(prompts), pictures)
        ]

    def prepare(self, prompts: list[Prompt]) -> None:
        if self.texts.placement == "release":
            requests, empty = self._requests(prompts, self.pictures(prompts))
            self.texts([*requests, *empty], self.device)

    def unconditional(self, row_cond: dict[str, Any], cond: dict[str, Any]) -> dict[str, Any]:
        negative: dict[str, Any] = row_cond["negative"]
        return row_cond | negative

    def network_inputs(
        self, x: Tensor, cond: dict[str, Any]
    ) -> tuple[Tensor, list[tuple[int, int, int]]]:
        tokens, shapes = super().network_inputs(x, cond)
        image = cond["image"]
        h, w = image.shape[-2:]
        return torch.cat([tokens, pack(image).to(tokens)], 1), [*shapes, (1, h // 2, w // 2)]

    def encode_requests(
        self, pipe: Any, texts: list[Request], device: torch.device
    ) -> dict[str, Tensor]:
        text, mask = pipe.encode_prompt([t.text for t in texts], [t.image for t in texts], device)
        if text.shape[1] > self.text_length:
            raise UserError(
                f"policy option text_length {self.text_length}: a prompt and its image "
                f"have {text.shape[1]} tokens; "
                "raise it, or lower image_size"
            )
        return padded(text, mask, self.text_length)
