"""The base of image-to-video families: the prompt's first frame is encoded once and kept with its
text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.media.clips import is_frames
from mmrl.core.types import Prompt, Rollout
from mmrl.policies.demonstrations import framed
from mmrl.policies.diffusion.row_settings import GUIDANCE, NEGATIVE, SEED
from mmrl.policies.diffusion.text_encoding import PromptCache
from mmrl.policies.vlm.media import images_of, shown_image, where
from mmrl.zoo.models.diffusion.broken_pictures import refuse_broken
from mmrl.zoo.models.diffusion.video_pipeline import VideoFolderPolicy
from samplers.noise import Rng
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
        if why := _miscounted(prompt):
            raise UserError(f"prompt {i} ({where(prompt)}) {why}")
    return [Picture.of(shown_image(images_of(prompt)[0], prompt)) for prompt in prompts]


def _miscounted(prompt: Prompt) -> str | None:
    """Say why a prompt has not exactly one image; None: it has."""
    count = len(images_of(prompt))
    if count == 1:
        return None
    return (
        f"has {count} images; this model animates one, under 'image': a path or a PIL image; with "
        "the video that it begins under 'answer' it may be left out"
    )


class FirstFrame(VideoFolderPolicy):
    """Adds a first frame to a text-to-video family: prompts have a ``text`` and an ``image``.

    The pass without the prompt sees the same image.
    """

    reads = (NEGATIVE, GUIDANCE, SEED)  # images are encoded for one size

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

    def admit(self, prompts: list[Prompt]) -> list[Prompt]:
        refuse_broken(prompts, self._unfit)
        return super().admit(prompts)

    def _unfit(self, prompt: Prompt) -> str | None:
        """Say why a prompt has no first frame; one that an answer begins with is seen later."""
        return None if not images_of(prompt) and "answer" in prompt else _miscounted(prompt)

    @abstractmethod
    def encode_pictures(
        self, pipe: Any, pictures: list[Picture], device: torch.device
    ) -> dict[str, Tensor]:
        """Encode images to a nest of tensors [n, *], by the text pipeline and the autoencoder."""

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        return super().encode(prompts) | self.pictures(self.shown(prompts), self.device)

    def prepare(self, prompts: list[Prompt]) -> None:
        super().prepare(prompts)
        if self.texts.placement == "release":
            self.pictures(list(dict.fromkeys(self.shown(prompts))), self.device)

    def shown(self, prompts: list[Prompt]) -> list[Picture]:
        """Read the image of every prompt; of one that has none the first frame of the video under
        ``answer``, where the data are clips with captions."""
        return pictures_of([self._of_clip(prompt) for prompt in prompts])

    def _of_clip(self, prompt: Prompt) -> Prompt:
        clip = prompt.get("answer")
        # a right answer is none
        is_media = isinstance(clip, (str, Path, Tensor, np.ndarray)) or is_frames(clip)
        if images_of(prompt) or not is_media or self.unreadable(prompt, clip):
            return prompt
        return self._beginning(prompt, self.open_answer(prompt, clip))

    def demonstrate(
        self, prompts: list[Prompt], answers: Sequence[Any], rng: Rng, *, score: bool = True
    ) -> Rollout:
        """Train on external videos, whose image is cropped and scaled like the video: stretched, as
        sampling does with images of another aspect ratio, it would not match the first frame."""
        rows = zip(prompts, answers, strict=True)
        shown = [self._beginning(prompt, answer) for prompt, answer in rows]
        return super().demonstrate(shown, answers, rng, score=score)

    def _beginning(self, prompt: Prompt, answer: Any) -> Prompt:
        """Show the prompt with the image that its answer, a video [F, 3, H, W], begins with."""
        if answer is None:
            return prompt
        if not images_of(prompt):
            return prompt | {"image": pictured(framed(answer[0], self.size))}
        (picture,) = pictures_of([prompt])
        pixels = torch.from_numpy(np.array(picture.image)).permute(2, 0, 1) / 255
        rest = {key: value for key, value in prompt.items() if key not in ("images", "pixel_noise")}
        return rest | {"image": pictured(framed(pixels, self.size))}

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


def pictured(pixels: Tensor) -> Any:
    """Return pixels [3, H, W] in 0..1 as a PIL image."""
    from PIL import Image

    rounded = (pixels * 255).round().byte().permute(1, 2, 0)
    return Image.fromarray(rounded.cpu().numpy())


def held(v: Tensor, x: Tensor, t: Tensor, frame: Tensor) -> Tensor:
    """Return the velocity [B, C, F, H, W] under which the clean latents begin with ``frame`` [B, C,
    1, H, W].

    Any solver reaches it exactly, and no gradient comes from it.
    """
    first = (x[:, :, :1] - frame) / per_row(t, x)
    return torch.cat([first, v[:, :, 1:].to(first)], 2)
