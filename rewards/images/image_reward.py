"""Scores by ImageReward (Xu et al. 2023, arXiv:2304.05977): BLIP encodes prompt and picture.

Weights named after BLIP's original modules are renamed to transformers' BLIP.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.weight_files import read_tensors
from rewards.base.frames import PromptReward
from rewards.base.hf import Preprocess, load_processor, to_pil
from rewards.base.media import normalize, resize_and_crop
from rewards.base.scale import raw, scaling
from rewards.base.tensors import fetch
from rewards.base.truncation import of_transformers
from rewards.card import card

# of the raw score on the training set, from the published code
MEAN = 0.16717362830052426
STD = 1.0333394966054072
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
TOKENS = 35
HEAD_WIDTH = 64
MLP = (0, 2, 4, 6, 7)  # of the linear layers in the published module, between its dropouts
Named = Literal["raw", "unirl"]
SCALES = {"raw": raw, "unirl": lambda score: (score + 2) / 4}
VISION = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^blocks\.(\d+)\.norm", r"encoder.layers.\1.layer_norm"),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.\1.self_attn.qkv."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"^blocks\.(\d+)\.mlp\.", r"encoder.layers.\1.mlp."),
    (r"^norm\.", "post_layernorm."),
)


@card(
    media="image video",
    needs="text",
    source="THUDM/ImageReward, ImageReward.pt",
    licence="Apache-2.0",
    scaling="raw (mean 0, std 1 on its training set; Flow-GRPO), unirl = (raw + 2) / 4",
)
@REWARDS.register("image_reward")
class ImageReward(PromptReward):
    """Score a picture by ImageReward-v1.0: a head on the first token of BLIP's text encoder.

    For a video, the mean over its frames.

    Args:
        weights: ``ImageReward.pt`` (or the same tensors as ``.safetensors``): a file, or ``hub
            id/file``.
        tokenizer: a BERT tokenizer, hub id or folder.
        scale: a published scaling by name, or a factor on the raw score.
        preprocess: ``pil`` as published (8 bits, PIL's bicubic), ``tensor`` on floats.

    Raises:
        UserError: a missing or foreign checkpoint.
    """

    name = "image_reward"

    def __init__(
        self,
        weights: str = "THUDM/ImageReward/ImageReward.pt",
        tokenizer: str = "bert-base-uncased",
        scale: float | Named = "raw",
        preprocess: Preprocess = "pil",
        **options: Any,
    ):
        super().__init__(**options)
        self.network = load_network(fetch(weights, "ImageReward")).to(self.device)
        self.tokenizer = load_processor("BertTokenizer", tokenizer)
        self.beginning = of_transformers("image_reward", self.tokenizer, TOKENS)
        self.scale = scaling(scale, SCALES, "image_reward")
        self.exact = preprocess == "pil"

    def score(self, pictures: Tensor, texts: list[str]) -> Tensor:
        self.beginning.look(texts)
        tokens = self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        ).to(self.network.device)
        raw = self.network(self.pixels(pictures), tokens.input_ids, tokens.attention_mask)
        return self.scale((raw - MEAN) / STD)

    def pixels(self, pictures: Tensor) -> Tensor:
        """Prepare [N, 3, H, W] in 0..1 -> [N, 3, S, S]: the shorter side to S, bicubic, centre
        crop, CLIP's normalisation."""
        size = (self.network.size, self.network.size)
        if self.exact:
            from torchvision.transforms.functional import InterpolationMode as Mode
            from torchvision.transforms.functional import center_crop, resize, to_tensor

            cut = [
                center_crop(resize(image, size[0], Mode.BICUBIC), size)
                for image in to_pil(pictures)
            ]
            fitted = torch.stack([to_tensor(image) for image in cut])
        else:
            fitted = resize_and_crop(pictures, size, "shortest", "bicubic")
        return normalize(fitted.to(self.network.device), CLIP_MEAN, CLIP_STD)


class Network(nn.Module):
    """Combines BLIP's vision transformer and text encoder with five linear layers."""

    def __init__(self, config: dict[str, dict[str, Any]], mlp: list[int]):
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        self.visual = BlipVisionModel(BlipVisionConfig(**config["vision"]))
        self.text = BlipTextModel(BlipTextConfig(**config["text"]), add_pooling_layer=False)
        self.mlp = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(mlp, mlp[1:], strict=False)))
        self.size = config["vision"]["image_size"]

    @property
    def device(self) -> torch.device:
        return next(self.mlp.parameters()).device

    def forward(self, pixels: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Map pixels [N, 3, S, S], tokens and mask [N, T] -> [N] scores, not standardised."""
        image_states = self.visual(pixels).last_hidden_state  # [N, P + 1, W]
        read = self.text(
            input_ids=tokens, attention_mask=mask, encoder_hidden_states=image_states
        ).last_hidden_state
        scores: Tensor = self.mlp(read[:, 0])
        return scores.squeeze(-1)


def load_network(file: Path) -> Network:
    """Load the network of a published checkpoint; all sizes are read from it, attention heads are
    64 wide."""
    tensors = read_tensors(file)
    parts = {
        part: under(tensors, prefix)
        for part, prefix in (
            ("vision", "blip.visual_encoder."),
            ("text", "blip.text_encoder."),
            ("mlp", "mlp.layers."),
        )
    }
    try:
        config = sizes(parts["vision"], parts["text"])
        mlp = [parts["mlp"]["0.weight"].shape[1]]
        mlp += [parts["mlp"][f"{place}.weight"].shape[0] for place in MLP]
        with torch.random.fork_rng(devices=[]):
            network = Network(config, mlp)
        network.visual.load_state_dict(
            {renamed(name): value for name, value in parts["vision"].items()}
        )
        text = {
            name: value
            for name, value in parts["text"].items()
            if not name.endswith("position_ids")
        }
        network.text.load_state_dict(text)
        heads = {
            f"{i}.{kind}": parts["mlp"][f"{place}.{kind}"]
            for i, place in enumerate(MLP)
            for kind in ("weight", "bias")
        }
        network.mlp.load_state_dict(heads)
    except (KeyError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"{file} is not an ImageReward checkpoint: {type(error).__name__}: {first}"
        ) from error
    return network.float().eval().requires_grad_(False)


def sizes(vision: dict[str, Tensor], text: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return options of the two BLIP configurations, from the shapes of the tensors."""
    width = vision["patch_embed.proj.weight"].shape[0]
    patch = vision["patch_embed.proj.weight"].shape[-1]
    side = round((vision["pos_embed"].shape[1] - 1) ** 0.5)
    words, hidden = text["embeddings.word_embeddings.weight"].shape
    return {
        "vision": {
            "hidden_size": width,
            "intermediate_size": vision["blocks.0.mlp.fc1.weight"].shape[0],
            "num_hidden_layers": depth(vision, r"blocks\.(\d+)\."),
            "num_attention_heads": width // HEAD_WIDTH,
            "image_size": side * patch,
            "patch_size": patch,
            "layer_norm_eps": 1e-6,
            "hidden_act": "gelu",
        },
        "text": {
            "vocab_size": words,
            "hidden_size": hidden,
            "encoder_hidden_size": width,
            "intermediate_size": text["encoder.layer.0.intermediate.dense.weight"].shape[0],
            "num_hidden_layers": depth(text, r"encoder\.layer\.(\d+)\."),
            "num_attention_heads": hidden // HEAD_WIDTH,
            "max_position_embeddings": text["embeddings.position_embeddings.weight"].shape[0],
            "layer_norm_eps": 1e-12,
            "hidden_act": "gelu",
            "is_decoder": True,
        },
    }


def depth(tensors: dict[str, Tensor], pattern: str) -> int:
    return 1 + max(int(match[1]) for name in tensors if (match := re.match(pattern, name)))


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def renamed(name: str) -> str:
    """Translate a name of BLIP's vision transformer to transformers' name."""
    for pattern, replacement in VISION:
        name = re.sub(pattern, replacement, name)
    return name
