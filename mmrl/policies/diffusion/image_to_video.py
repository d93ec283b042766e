"""Gives image-to-video families what they share: the prompt's first frame is encoded once and held
beside its text."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt, Rollout
from mmrl.policies.diffusion.text_encoding import PromptCache
from mmrl.policies.diffusion.video_pipeline import VideoFolderPolicy
from mmrl.policies.vlm.media import images_of, shown_image, where
from samplers.processes import per_row


@dataclass(frozen=True)
class Picture:
    """Wraps an image as a key of a cache: equal pixels are equal."""

    digest: bytes
    image: Any = field(compare=False, repr=False)  # PIL, RGB

    @classmethod
    def of(cls, image: Any) -> Picture:
        digest = blake2b(repr(image.size).encode(), digest_size=16)
        digest.update(image.tobytes())
        return cls(digest.digest(), image)


def pictures_of(prompts: list[Prompt]) -> list[Picture]:
    """Read the ``image`` of every prompt, PIL or a path. UserError names the first prompt that has
    not exactly one."""
    for i, prompt in enumerate(prompts):
        if len(images_of(prompt)) != 1:
            raise UserError(
                f"prompt {i} ({where(prompt)}) has {len(images_of(prompt))} images; this "
                f"model animates one, under "
                "'image': a path or a PIL image"
            )
    return [Picture.of(shown_image(images_of(prompt)[0], prompt)) for prompt in prompts]


class FirstFrame(VideoFolderPolicy):
    """Adds a first frame to a text-to-video family: prompts have a ``text`` and an ``image``.

    The pass without the prompt sees the same image.
    """

    @property
    @abstractmethod
    def holds(self) -> bool:
        """Tell whether the first latent frame is the image itself, whatever the network says."""

    def __init__(self, path: str, **options: Any):
        super().__init__(path, **options)
        cache = self.texts
        self.pictures = PromptCache(
            self._pipeline, self.encode_pictures, cache.placement, cache.limit, batch=1
        )

    @abstractmethod
    def encode_pictures(
        self, pipe: Any, pictures: list[Picture], device: torch.device
    ) -> dict[str, Tensor]:
        """Encode images to a nest of tensors [n, *], by the text pipeline and the autoencoder."""

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        return super().encode(prompts) | self.pictures(pictures_of(prompts), self.device)

    def prepare(self, prompts: list[Prompt]) -> None:
        super().prepare(prompts)
        if self.texts.placement == "release":
            self.pictures(list(dict.fromkeys(pictures_of(prompts))), self.device)

    def toward_image(self, v: Tensor, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        """Return the velocity ``v`` of the network; where the image holds, with its first frame's
        that leads there."""
        return held(v, x, t, cond["condition"]) if self.holds else v

    def decode(self, rollout: Rollout) -> Tensor:
        if self.holds:  # a last step with noise moved it
            frame = rollout.cond["condition"][rollout.group].to(rollout.sample)
            rollout = rollout.replace(sample=torch.cat([frame, rollout.sample[:, :, 1:]], 2))
        return super().decode(rollout)

    def frames_of(self, pictures: list[Picture], device: torch.device) -> Tensor:
        """Return pixels [n, 3, 1, H, W] in -1..1 at the video's size, resized as diffusers does."""
        from diffusers.video_processor import VideoProcessor

        height, width = self.size
        images = [
            VideoProcessor().preprocess(p.image, height=height, width=width) for p in pictures
        ]
        return torch.cat(images)[:, :, None].to(device, self.vae.dtype)

    def _pipeline(self) -> Any:
        return self.texts.pipeline or self.load_texts()


def held(v: Tensor, x: Tensor, t: Tensor, frame: Tensor) -> Tensor:
    """Return the velocity [B, C, F, H, W] under which the clean latents begin with ``frame`` [B, C,
    1, H, W].

    Any solver reaches it exactly, and no gradient comes from it.
    """
    first = (x[:, :, :1] - frame) / per_row(t, x)
    return torch.cat([first, v[:, :, 1:].to(first)], 2)
