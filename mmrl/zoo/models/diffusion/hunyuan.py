"""Trains HunyuanVideo (Kong et al. 2024), text to video and image to video: a language model reads
the prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.registry import POLICIES
from mmrl.core.types import Prompt
from mmrl.policies.base import MediaFormat
from mmrl.policies.diffusion.row_settings import GUIDANCE, NEGATIVE, SEED, SIZE, TRUE_CFG
from mmrl.policies.diffusion.schedulers import stepwise
from mmrl.policies.diffusion.text_encoding import texts_of
from mmrl.zoo.models.diffusion.image_to_video import FirstFrame, Picture
from mmrl.zoo.models.diffusion.video_pipeline import VideoFolderPolicy

LEFT_OUT = 4  # frames at the start of a video that is joined to its picture


@POLICIES.register("hunyuan_video")
class HunyuanVideo(VideoFolderPolicy):
    """Trains HunyuanVideo text to video from any diffusers folder or hub id of a
    HunyuanVideoPipeline."""

    pipeline = "HunyuanVideoPipeline"
    network = "HunyuanVideoTransformer3DModel"
    media = MediaFormat(fps=24.0)
    autoencoder = "AutoencoderKLHunyuanVideo"
    guided_by = TRUE_CFG
    reads: tuple[str, ...] = (NEGATIVE, GUIDANCE, TRUE_CFG, SEED, SIZE)

    def __init__(
        self,
        path: str,
        embedded_guidance: Annotated[float, Ge(0)] = 6.0,
        text_length: int = 256,
        **options: Any,
    ):
        """Extend the options of ``VideoFolderPolicy``. embedded_guidance: the guidance scale that
        the network takes as an input (``guidance_scale`` is classifier-free guidance on top, as
        diffusers' ``true_cfg_scale``). text_length: tokens of the language model after its
        template."""
        self.embedded_guidance = embedded_guidance
        self.text_length = text_length
        super().__init__(path, **options)

    def latent_shape(self) -> tuple[int, ...]:
        factor = self.vae.spatial_compression_ratio
        sides = (
            self.latent_side(side, factor * self.config.patch_size, factor) for side in self.size
        )
        return (
            self.vae.config.latent_channels,
            self.latent_frames(self.vae.temporal_compression_ratio),
            *sides,
        )

    def handed(self, steps: int, config: Any) -> dict[str, Any]:
        return stepwise(steps)

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        guidance = None
        if self.config.guidance_embeds:
            guidance = torch.ones_like(t) * self.embedded(cond, self.embedded_guidance) * 1000
        output: Tensor = self.active()(
            hidden_states=self.cast(self.network_inputs(x, cond)),
            timestep=1000 * t,
            guidance=guidance,
            return_dict=False,
            encoder_hidden_states=self.cast(cond["text"]),
            encoder_attention_mask=cond["mask"],
            pooled_projections=self.cast(cond["pooled"]),
        )[0]
        return output

    def network_inputs(self, x: Tensor, cond: dict[str, Any]) -> Tensor:
        """Return the network's input for latents."""
        return x

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        text, pooled, mask = pipe.encode_prompt(
            texts, device=device, max_sequence_length=self.text_length
        )
        return {"text": text, "pooled": pooled, "mask": mask}


@POLICIES.register("hunyuan_i2v")
class HunyuanI2V(FirstFrame, HunyuanVideo):
    """Trains HunyuanVideo image to video from a folder or hub id of a
    HunyuanVideoImageToVideoPipeline.

    Takes both kinds of checkpoint: ``token_replace`` sees the image in place of the first frame,
    ``latent_concat`` (33 channels) as further channels; the latter's videos begin after the image,
    so they have 4 frames fewer. The language model reads the image with the text, a black one for
    the empty prompt. Paths start from noise with a thousandth of the image. Every 4th of the
    image's tokens is kept (``latent_concat``: 2nd), for the empty prompt as well, where diffusers
    0.42 keeps every 2nd.
    """

    pipeline = "HunyuanVideoImageToVideoPipeline"
    reads = (GUIDANCE, TRUE_CFG, SEED)

    def __init__(self, path: str, **options: Any):
        super().__init__(path, **options)
        frames = self.frames - (LEFT_OUT if self.joined else 0)
        self.media = replace(self.media, frames=frames)
        self.texts = self.texts.of(self.encode_requests)

    @property
    def joined(self) -> bool:
        return bool(self.config.image_condition_type == "latent_concat")

    @property
    def holds(self) -> bool:
        return not self.joined

    @cached_property
    def black(self) -> Picture:
        from PIL import Image

        height, width = self.size
        return Picture.of(Image.new("RGB", (width, height)))

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        pictures = self.shown(prompts)
        cond = self.texts(list(zip(texts_of(prompts), pictures)), self.device)
        return (
            self.row_settings(prompts)
            | cond
            | self.pictures(pictures, self.device)
            | {"uncond": self.texts([(self.negative_prompt, self.black)], self.device)}
        )

    def prepare(self, prompts: list[Prompt]) -> None:
        if self.texts.placement == "release":
            pictures = self.shown(prompts)
            self.texts(
                list(
                    dict.fromkeys(
                        [(self.negative_prompt, self.black), *zip(texts_of(prompts), pictures)]
                    )
                ),
                self.device,
            )
            self.pictures(list(dict.fromkeys(pictures)), self.device)

    def encode_requests(
        self, pipe: Any, texts: list[tuple[str, Picture]], device: torch.device
    ) -> dict[str, Tensor]:
        """Encode texts one at a time: the pipeline takes one image only for several prompts."""
        encodings = [
            pipe.encode_prompt(
                picture.image,
                [text],
                device=device,
                max_sequence_length=self.text_length,
                image_embed_interleave=2 if self.joined else 4,
            )
            for text, picture in texts
        ]
        return {
            key: torch.cat(parts) for key, parts in zip(("text", "pooled", "mask"), zip(*encodings))
        }

    @torch.no_grad()
    def encode_pictures(
        self, pipe: Any, pictures: list[Picture], device: torch.device
    ) -> dict[str, Tensor]:
        vae = self.vae.to(device)
        latents: Tensor = vae.encode(self.frames_of(pictures, device)).latent_dist.mode()
        return {"condition": latents * vae.config.scaling_factor}

    def begin(self, noise: Tensor, cond: dict[str, Any]) -> Tensor:
        image: Tensor = cond["condition"].to(noise)
        return 0.999 * noise + 0.001 * image

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        return self.toward_image(super().velocity(x, t, cond), x, t, cond)

    def network_inputs(self, x: Tensor, cond: dict[str, Any]) -> Tensor:
        image = cond["condition"].to(x)
        if not self.joined:
            return torch.cat([image, x[:, :, 1:]], 2)
        rest = torch.zeros_like(x[:, :, 1:])
        mask = torch.cat([torch.ones_like(x[:, :1, :1]), rest[:, :1]], 2)
        return torch.cat([x, torch.cat([image, rest], 2), mask], 1)

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        video = super().pixels(vae, latents)
        return video[:, :, LEFT_OUT:] if self.joined else video

    def latents_of(self, vae: Any, pixels: Tensor) -> Tensor:
        """Encode a video; the frames that ``pixels`` leaves out repeat the first."""
        lead = [pixels[:, :, :1]] * (LEFT_OUT if self.joined else 0)
        return super().latents_of(vae, torch.cat([*lead, pixels], 2))
