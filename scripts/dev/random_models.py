"""Builds models of published sizes with random weights, random texts and a small decoder, for GPU
timing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import bench_iteration as bench
import torch
from torch import Tensor

from mmrl.core.types import Prompt
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy
from mmrl.policies.quantization import Quantization, quantize
from mmrl.zoo.models.diffusion.sd3 import SD3
from mmrl.zoo.models.diffusion.video_pipeline import standardised
from mmrl.zoo.models.diffusion.wan import Wan
from samplers.noise import Rng
from samplers.schedules import flow_match_euler, shifted


@dataclass(frozen=True)
class Scale:
    """Holds the sizes of the two models: published, or small ones for testing."""

    sd3_layers: int = 24
    sd3_heads: int = 24
    size: int = 512  # pixels of images
    tokens: int = 333  # of a prompt of SD3: 77 of CLIP, 256 of T5
    wan_layers: int = 30
    wan_heads: int = 12
    video: tuple[int, int, int] = (33, 240, 416)  # frames, height, width
    words: int = 512  # tokens of a prompt of Wan
    copies: int = 8


SMALL = Scale(2, 2, 64, 8, 2, 2, (5, 32, 32), 8, 2)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Random:
    """Replaces a family's text encoders by normal random numbers seeded by the text."""

    sizes: dict[str, tuple[int, ...]]

    def begin_with(
        self, net: torch.nn.Module, attention: str, compile: bool | str, options: dict[str, Any]
    ) -> None:
        FlowPolicy.__init__(self, net, **options)
        self.set_kernels(attention, compile)

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        return self._texts([p["text"] for p in prompts]) | {"uncond": self._texts([""])}

    def _texts(self, texts: list[str]) -> dict[str, Tensor]:
        rows = torch.arange(1, device=self.device)
        drawn = {
            name: [Rng.of(name, text).normal(rows, size, 0, torch.bfloat16) for text in texts]
            for name, size in self.sizes.items()
        }
        return {name: torch.cat(each) for name, each in drawn.items()}


class RandomSD3(Random, SD3):
    """Builds Stable Diffusion 3.5 medium, weights in bf16."""

    def __init__(
        self,
        scale: Scale,
        attention: str = "auto",
        compile: bool | str = False,
        quantization: Quantization | None = None,
        **options: Any,
    ):
        from diffusers import AutoencoderKL, SD3Transformer2DModel

        self.compute = torch.bfloat16
        side = scale.size // 8
        self.sizes = {"text": (scale.tokens, 4096), "pooled": (2048,)}
        self.shape = (16, side, side)
        torch.manual_seed(0)
        with torch.device(device()):
            net = SD3Transformer2DModel(
                sample_size=128,
                patch_size=2,
                in_channels=16,
                out_channels=16,
                num_layers=scale.sd3_layers,
                attention_head_dim=64,
                num_attention_heads=scale.sd3_heads,
                caption_projection_dim=64 * scale.sd3_heads,
                joint_attention_dim=4096,
                pooled_projection_dim=2048,
                pos_embed_max_size=384,
                qk_norm="rms_norm",
                dual_attention_layers=tuple(range(min(13, scale.sd3_layers))),
            ).to(torch.bfloat16)
            self.vae = AutoencoderKL(
                block_out_channels=(8, 8, 8, 8),
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                latent_channels=16,
                norm_num_groups=8,
                scaling_factor=1.5,
                shift_factor=0.06,
            )
        quantize(net, quantization)
        self.begin_with(
            net,
            attention,
            compile,
            {"timestep_schedule": partial(flow_match_euler, shift=3.0)} | options,
        )


class RandomWan(Random, Wan):
    """Builds Wan 2.1 1.3B, text to video, weights in bf16."""

    guidance_scale_2 = None
    expand = False

    def __init__(
        self, scale: Scale, attention: str = "auto", compile: bool | str = False, **options: Any
    ):
        from diffusers import AutoencoderKLWan, WanTransformer3DModel

        frames, height, width = scale.video
        self.compute = torch.bfloat16
        self.sizes = {"text": (scale.words, 4096)}
        self.shape = (16, (frames - 1) // 4 + 1, height // 8, width // 8)
        torch.manual_seed(0)
        with torch.device(device()):
            net = WanTransformer3DModel(
                num_attention_heads=scale.wan_heads,
                num_layers=scale.wan_layers,
                ffn_dim=8960 * scale.wan_heads // 12,
            ).to(torch.bfloat16)
            self.vae = AutoencoderKLWan(base_dim=8, num_res_blocks=1)
        self.config = net.config
        self.begin_with(
            net,
            attention,
            compile,
            {"timestep_schedule": partial(shifted, shift=3.0), "offload_trajectory": True}
            | options,
        )


class PlainWan(bench.PlainLoop):
    """Runs the straightforward loop for Wan's network."""

    def call(self, x: Tensor, times: Tensor, cond: dict[str, Tensor]) -> Tensor:
        return self.net(
            hidden_states=x, timestep=times, encoder_hidden_states=cond["text"], return_dict=False
        )[0]

    def pixels(self, latents: Tensor) -> Tensor:
        mean, std = standardised(self.vae, latents)
        return self.vae.decode(latents * std + mean).sample


def sd3(scale: Scale, **options: Any) -> FolderPolicy:
    return RandomSD3(scale, **{"steps": 4, "guidance_scale": 4.5, "lora": 32} | options)


def wan(scale: Scale, **options: Any) -> FolderPolicy:
    return RandomWan(scale, **{"steps": 4, "guidance_scale": 4.5, "lora": 32} | options)
