"""Scores human preference by PickScore (Kirstain et al. 2023, arXiv:2305.01569)."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as nnf
from torch import Tensor

from mmrl.core.registry import REWARDS
from rewards.base.frames import PromptReward
from rewards.base.hf import Eyes, Precision, Preprocess, load_model, load_processor
from rewards.base.scale import factor, raw, scaling
from rewards.base.truncation import of_transformers
from rewards.card import card

Named = Literal["logit", "flow_grpo", "mixgrpo", "cosine"]


@card(
    media="image video",
    needs="text",
    source="yuvalkirstain/PickScore_v1 on laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    licence="MIT (code); weights: see the model card",
    scaling="logit (about 18..24), flow_grpo = logit / 26 (also DiffusionNFT), mixgrpo = (logit "
    "- 18) / 8, "
    "cosine (DanceGRPO)",
)
@REWARDS.register("pickscore")
class PickScore(PromptReward):
    """Score a picture by PickScore: cosine of a CLIP ViT-H-14's embeddings of picture and prompt,
    scaled.

    For a video, the mean over its frames. (DanceGRPO's code compares every picture of a batch with
    the batch's first prompt; here each is compared with its own.)

    Args:
        model: a transformers CLIP, hub id or folder.
        processor: folder or hub id of its tokenizer and image processor; None: the model's.
        scale: a published scaling by name, or a factor on the logit.
        preprocess: ``pil`` as published (8 bits, PIL's bicubic), ``tensor`` on floats.
        dtype: of the model; float32 as published.

    Raises:
        UserError: the model is not on this machine and cannot be downloaded.
    """

    name = "pickscore"

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        scale: float | Named = "flow_grpo",
        preprocess: Preprocess = "pil",
        dtype: Precision = "float32",
        **options: Any,
    ):
        super().__init__(**options)
        self.model = load_model("CLIPModel", model, self.device, dtype)
        self.eyes = Eyes(processor or model, preprocess)
        self.tokenizer = load_processor("AutoTokenizer", processor or model)
        self.beginning = of_transformers("pickscore", self.tokenizer, 77)
        temperature = float(self.model.logit_scale.exp())
        known = {
            "logit": raw,
            "flow_grpo": factor(1 / 26),
            "mixgrpo": lambda logit: (logit - 18) / 8,
            "cosine": factor(1 / temperature),
        }
        self.temperature = temperature
        self.scale = scaling(scale, known, "pickscore")

    def score(self, pictures: Tensor, texts: list[str]) -> Tensor:
        cosines = (self.embed_images(pictures) * self.embed_texts(texts)).sum(-1)
        return self.scale(self.temperature * cosines)

    def embed_images(self, pictures: Tensor) -> Tensor:
        """Embed [N, 3, H, W] in 0..1 -> [N, E] unit vectors."""
        pixels = self.eyes(pictures, self.model.device).to(self.model.dtype)
        return nnf.normalize(self.model.get_image_features(pixels).pooler_output.float(), dim=-1)

    def embed_texts(self, texts: list[str]) -> Tensor:
        """Embed N texts -> [N, E] unit vectors, each text padded or truncated to 77 tokens."""
        self.beginning.look(texts)
        tokens = self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=77, return_tensors="pt"
        )
        features = self.model.get_text_features(**tokens.to(self.model.device)).pooler_output
        return nnf.normalize(features.float(), dim=-1)
