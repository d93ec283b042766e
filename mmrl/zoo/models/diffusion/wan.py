"""Trains Wan 2.1 and 2.2 (Wan team 2025), text to video: one network, two experts by noise level,
or a time for every token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from mmrl.core.distributed import all_max
from mmrl.core.errors import UserError
from mmrl.core.libraries import library_class
from mmrl.core.registry import POLICIES
from mmrl.core.sharding import shards, whole_blocks
from mmrl.core.types import Query
from mmrl.policies.diffusion import diffusers_folder
from mmrl.policies.lora import TWO_ATTENTIONS, adapters_of
from mmrl.zoo.models.diffusion.video_pipeline import VideoFolderPolicy, standardised


class Experts(nn.Module):
    """Runs one of two networks for every row: ``transformer`` above the boundary time,
    ``transformer_2`` below.

    A pass may need one of them only. Sharded by FSDP2, all processes run those that any of them
    needs, in one order, since gathering weights and reducing gradients are collective calls. As
    copies (DDP) a pass leaves weights out, which ``Wan.find_unused_parameters`` announces to the
    wrapper.
    """

    def __init__(self, high: Any, low: Any, boundary: float):
        super().__init__()
        self.transformer = high
        self.transformer_2 = low
        self.boundary = boundary
        self.config = high.config

    def add_adapter(self, config: Any) -> None:
        """Add the same kind of adapter to each expert."""
        self.transformer.add_adapter(config)
        self.transformer_2.add_adapter(config)

    @property
    def peft_config(self) -> Any:
        return adapters_of(self.transformer)

    @property
    def _no_split_modules(self) -> list[str]:
        """Name the blocks that FSDP2 wraps one by one; without, it would gather both experts at
        once."""
        return whole_blocks(self.transformer)

    def forward(self, hidden_states: Tensor, timestep: Tensor, **cond: Tensor) -> Tensor:
        noisy = timestep.flatten(1).amax(1) if timestep.ndim > 1 else timestep
        above = noisy >= self.boundary
        shape = (len(above), self.config.out_channels, *hidden_states.shape[2:])
        velocity = hidden_states.new_zeros(shape)
        experts = (self.transformer, self.transformer_2)
        masks = torch.stack([above, ~above])
        used = masks.any(1).int()
        needed = all_max(used) if shards(self) else used
        flags = torch.stack([used, needed], 1).tolist()  # one wait for the device
        for expert, mask, (is_used, is_needed) in zip(experts, masks, flags, strict=True):
            if not is_needed:
                continue
            rows = mask if is_used else slice(0, 1)
            chosen = {name: value[rows] for name, value in cond.items()}
            predicted = expert(hidden_states[rows], timestep[rows], return_dict=False, **chosen)[0]
            if is_used:
                velocity[rows] = predicted
            # a dummy pass, so that this process joins the collective calls for this expert
            else:
                nowhere = torch.zeros_like(predicted, dtype=torch.bool)
                velocity[rows] = torch.where(nowhere, predicted, velocity[rows])
        return velocity

    def enable_gradient_checkpointing(self) -> None:
        self.transformer.enable_gradient_checkpointing()
        self.transformer_2.enable_gradient_checkpointing()


@POLICIES.register("wan")
class Wan(VideoFolderPolicy):
    """Trains Wan 2.1 and 2.2 text to video from any diffusers folder or hub id of a WanPipeline."""

    pipeline = "WanPipeline"
    network = "WanTransformer3DModel"
    autoencoder = "AutoencoderKLWan"
    attention = TWO_ATTENTIONS

    def __init__(
        self,
        path: str,
        text_length: int = 512,
        guidance_scale_2: Annotated[float, Ge(0)] | None = None,
        **options: Any,
    ):
        """Extend the options of ``VideoFolderPolicy``. text_length: tokens of the text encoder.
        guidance_scale_2: the guidance scale of the second expert of Wan 2.2 A14B, which has the
        less noisy times; None: ``guidance_scale`` is that of both. At ``guidance_scale`` 1 neither
        is guided."""
        self.text_length = text_length
        self.guidance_scale_2 = guidance_scale_2
        super().__init__(path, **options)
        # a pass holds one time, so it may need one expert only
        self.find_unused_parameters = self.two
        if guidance_scale_2 is not None and not self.two:
            raise UserError(
                f"policy option guidance_scale_2: {self.place} has one network only; leave it out"
            )

    def strength(self, point: Query, scale: float | Tensor) -> float | Tensor:
        """Return the guidance scale of each row's expert, unless one scale is set for both."""
        if self.guidance_scale_2 is None or point.guidance is not None:
            return scale
        high, low = (torch.as_tensor(w).to(point.state) for w in (scale, self.guidance_scale_2))
        is_high = (1000 * point.time >= self.net.boundary).view(-1, *[1] * len(self.shape))
        return torch.where(is_high, high, low)

    @contextmanager
    def evaluating(self, guidance: float | None = None) -> Iterator[None]:
        """Sample as every family evaluates; a guidance scale given here is that of both experts."""
        before = self.guidance_scale_2
        self.guidance_scale_2 = before if guidance is None else None
        try:
            with super().evaluating(guidance):
                yield
        finally:
            self.guidance_scale_2 = before

    def latent_shape(self) -> tuple[int, ...]:
        config, (_, *patch) = self.vae.config, self.config.patch_size
        factor = config.scale_factor_spatial
        sides = (self.latent_side(side, factor * p, factor) for side, p in zip(self.size, patch))
        return (config.z_dim, self.latent_frames(config.scale_factor_temporal), *sides)

    def load_network(self) -> Any:
        """Load the network; both experts of a folder that has two."""
        index = diffusers_folder.index(self.place)
        high = super().load_network()
        self.expand = bool(index.get("expand_timesteps"))
        if self.expand:  # TI2V
            self.media = replace(self.media, fps=24.0)
        if index.get("boundary_ratio") is None:
            return high
        low = self.load_part(self.network, "transformer_2", self.compute)
        return Experts(high, low, 1000 * index["boundary_ratio"])

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        conditions = {name: self.cast(value) for name, value in self.conditions(cond).items()}
        hidden, times = self.network_inputs(x, 1000 * t, cond)
        output = self.active()(
            self.cast(hidden), times, **conditions, **({} if self.two else {"return_dict": False})
        )
        predicted: Tensor = output if self.two else output[0]
        return predicted

    @property
    def two(self) -> bool:
        return isinstance(self.net, Experts)

    def conditions(self, cond: dict[str, Any]) -> dict[str, Tensor]:
        return {"encoder_hidden_states": cond["text"]}

    def network_inputs(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the network's inputs for latents at timesteps t [B]: Wan 2.2 TI2V has a time for
        every token."""
        if not self.expand:
            return x, t
        _, *patch = self.config.patch_size
        tokens = x.shape[2] * (x.shape[3] // patch[0]) * (x.shape[4] // patch[1])
        return x, t[:, None].expand(-1, tokens)

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        mean, std = standardised(vae, latents)
        videos: Tensor = vae.decode(latents * std + mean).sample
        return videos

    def latents_of(self, vae: Any, pixels: Tensor) -> Tensor:
        mode: Tensor = vae.encode(pixels).latent_dist.mode()
        mean, std = standardised(vae, mode)
        return (mode - mean) / std

    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        text, _ = pipe.encode_prompt(
            texts, None, False, max_sequence_length=self.text_length, device=device
        )
        return {"text": text}

    def without(self) -> tuple[str, ...]:
        return ("transformer_2",)

    def export(self, folder: Path) -> None:
        """Write the weights as every family does; both experts of a folder that has two."""
        if not self.two:
            return super().export(folder)

        pipeline = library_class("diffusers", self.pipeline)
        parts = {"transformer": self.net.transformer, "transformer_2": self.net.transformer_2}
        if not self.net.peft_config:
            return diffusers_folder.save_parts(pipeline, self.place, parts, folder)
        for name, net in parts.items():
            diffusers_folder.save_lora(pipeline, net, folder / name)
        return None
