"""The base of image-to-image families: images to edit are read, resized and encoded as latents."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy
from mmrl.policies.vlm.media import images_of, shown_image, where
from mmrl.zoo.models.diffusion.broken_pictures import refuse_broken


class EditPolicy(FolderPolicy):
    """Trains a model that sees an image: the prompt's ``image``, a PIL image or a path, beside its
    ``text``.

    The condition holds its latents under ``image``, once for each prompt.
    """

    def __init__(self, path: str, image_size: int | tuple[int, int] | None = None, **options: Any):
        """Extend the options of ``FolderPolicy``. image_size: pixels that the image is brought to,
        one side or [height, width]; None: those of the sample."""
        super().__init__(path, **options)
        chosen = self.size if image_size is None else image_size
        self.image_size = (chosen, chosen) if isinstance(chosen, int) else (chosen[0], chosen[1])
        factor = self.size[0] // self.shape[-2]
        for side in self.image_size:
            self.latent_side(side, 2 * factor, factor, "image_size")

    def admit(self, prompts: list[Prompt]) -> list[Prompt]:
        refuse_broken(prompts, self.unfit)
        return super().admit(prompts)

    def unfit(self, prompt: Prompt) -> str | None:
        """Say why a prompt cannot be edited; None: it can."""
        count = len(images_of(prompt))
        if count != 1:
            return f"this model edits the one image under 'image', and got {count}"
        return None

    def pictures(self, prompts: list[Prompt]) -> list[Any]:
        """Return the image of every prompt at ``image_size``. UserError names a prompt that has
        none, or several."""
        sources = [images_of(prompt) for prompt in prompts]
        for prompt in prompts:
            if why := self.unfit(prompt):
                raise UserError(f"{where(prompt)}: {why}")
        opened = [shown_image(images[0], prompt) for images, prompt in zip(sources, prompts)]
        resized: list[Any] = self.processor().resize(opened, *self.image_size)
        return resized

    @torch.no_grad()
    def picture_latents(self, pictures: list[Any]) -> Tensor:
        """Return the autoencoder's most likely latents [P, C, h, w], each image encoded by itself,
        so that it does not depend on the others."""
        vae = self.vae.to(self.device)
        processor = self.processor()
        pixels = processor.preprocess(pictures, *self.image_size).to(self.device, vae.dtype)
        return torch.cat([self.latents_of(vae, image) for image in pixels.split(1)]).to(self.dtype)

    def processor(self) -> Any:
        from diffusers.image_processor import VaeImageProcessor

        return VaeImageProcessor(vae_scale_factor=2 * self.size[0] // self.shape[-2])


class Request(str):
    """Pairs a text with an image as a cache key: pairs are equal if both parts are."""

    text: str
    image: Any

    def __new__(cls, text: str, image: Any) -> Request:
        digest = hashlib.sha256(image.tobytes()).hexdigest()
        request = super().__new__(cls, f"{image.size} {digest} {text}")
        request.text = text
        request.image = image
        return request
