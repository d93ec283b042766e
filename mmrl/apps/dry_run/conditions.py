"""Defines the shapes of conditions of every family in diffusers' format, so that a network can be
measured without text encoders and tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.apps.dry_run.fakes import Fakes
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy
from mmrl.zoo.models.diffusion.image_editing import EditPolicy

CLIP_WORDS = 77
T5_WORDS = 256  # of Stable Diffusion 3, in addition to CLIP's
IMAGE_WORDS = 257  # of CLIP's vision tower at 224 pixels
# of HunyuanVideo's image to video: LLaVA has 576 tokens an image, of which every 4th or 2nd stays
LLAVA_WORDS = 576


def conditions(policy: FolderPolicy, prompts: int, fakes: Fakes) -> dict[str, Any]:
    """Build the conditions [P, *] of ``policy.encode``, with real masks and everything else
    fake."""
    config: Any = policy.config
    widths = (
        "joint_attention_dim",
        "caption_channels",
        "cap_feat_dim",
        "text_embed_dim",
        "text_dim",
        "cross_attention_dim",
    )
    width = next(value for name in widths if (value := config.get(name)))
    length = _words(policy)
    cond: dict[str, Any] = {"text": fakes.empty(prompts, length, width, dtype=policy.compute)}
    if policy.pipeline.startswith(("Qwen", "ZImage", "Sana", "Hunyuan", "LTX")):
        cond["mask"] = torch.ones(prompts, length, dtype=torch.bool)
    if pooled := config.get("pooled_projection_dim"):
        cond["pooled"] = fakes.empty(prompts, pooled, dtype=policy.compute)
    if policy.pipeline.startswith("StableDiffusionXL"):
        cond["text_embeds"] = fakes.empty(
            prompts,
            config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim,
        )
        cond["time_ids"] = fakes.empty(prompts, 6)
    cond |= _pictures(policy, prompts, fakes)
    empty = {name: value[:1] for name, value in cond.items() if name not in ("image", "condition")}
    if policy.pipeline == "QwenImageEditPipeline":
        return cond | {"negative": {name: cond[name] for name in ("text", "mask")}}
    return cond | {"uncond": empty}


def _words(policy: Any) -> int:
    """Count the text tokens of a prompt."""
    clip = _longest(policy, "tokenizer", CLIP_WORDS)
    if policy.pipeline == "StableDiffusion3Pipeline":
        return clip + (_longest(policy, "tokenizer_3", T5_WORDS) if policy.t5 else T5_WORDS)
    if policy.text_length is None:
        return clip
    words: int = policy.text_length
    if policy.pipeline == "HunyuanVideoImageToVideoPipeline":
        words += LLAVA_WORDS // (2 if policy.joined else 4)
    return words


def _longest(policy: Any, tokenizer: str, usual: int) -> int:
    """Return the maximum tokens of a folder's tokenizer; the default without one."""
    file = Path(policy.place) / tokenizer / "tokenizer_config.json"
    if not file.is_file():
        return usual
    return min(usual, json.loads(file.read_text()).get("model_max_length") or usual)


def _pictures(policy: Any, prompts: int, fakes: Fakes) -> dict[str, Tensor]:
    """Build the latents of an image to edit, or of a first frame."""
    channels, *sides = policy.shape
    if isinstance(policy, EditPolicy):
        factor = policy.size[0] // policy.shape[-2]
        height, width = (side // factor for side in policy.image_size)
        return {"image": fakes.empty(prompts, channels, height, width)}
    if policy.pipeline == "HunyuanVideoImageToVideoPipeline":
        return {"condition": fakes.empty(prompts, channels, 1, *sides[1:])}
    if "ImageToVideo" not in policy.pipeline:
        return {}
    if policy.expand:
        return {"condition": fakes.empty(prompts, channels, 1, *sides[1:])}
    joined = policy.vae.config.scale_factor_temporal + channels
    cond = {"condition": fakes.empty(prompts, joined, *sides)}
    if policy.config.image_dim is not None:
        cond["image"] = fakes.empty(prompts, IMAGE_WORDS, policy.config.image_dim)
    return cond
