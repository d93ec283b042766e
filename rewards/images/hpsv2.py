"""Scores human preference by HPS, version 2 and 2.1 (Wu et al. 2023, arXiv:2306.09341)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from rewards.base.clip import Clip, load_clip
from rewards.base.frames import BatchSize, PromptReward
from rewards.base.hf import Preprocess
from rewards.base.scale import factor, raw, scaling
from rewards.card import card

WEIGHTS = "~/.cache/mmrl/HPS_v2.1_compressed.pt"
SOURCE = "https://huggingface.co/xswu/HPSv2"
Named = Literal["cosine", "percent"]
SCALES = {"cosine": raw, "percent": factor(100)}


@card(
    media="image video",
    needs="text",
    low=-1,
    high=1,
    source="xswu/HPSv2, HPS_v2.1_compressed.pt on open_clip ViT-H-14",
    licence="Apache-2.0",
    scaling="cosine (about 0.2..0.35; DanceGRPO, DiffusionNFT), percent = 100 cos (the paper's "
    "tables)",
)
@REWARDS.register("hpsv2")
class HPSv2(PromptReward):
    """Score a picture by a CLIP ViT-H-14 fine-tuned on human choices: cosine with the prompt.

    As published, the longer side of the picture is resized to 224 and the rest padded with black; a
    square one is just resized. For a video, the mean over its frames.

    Args:
        weights: the published checkpoint (``HPS_v2.1_compressed.pt`` or ``HPS_v2_compressed.pt``).
        model: the open_clip model it belongs to; a folder or hub id brings its own weights.
        scale: a published scaling by name, or a factor on the cosine.
        preprocess: ``pil`` as published (8 bits, PIL's bicubic), ``tensor`` on floats as in
            DiffusionNFT.

    Raises:
        UserError: the checkpoint is missing; says where to get it.
    """

    name = "hpsv2"

    def __init__(
        self,
        weights: str = WEIGHTS,
        model: str = "ViT-H-14",
        scale: float | Named = "cosine",
        preprocess: Preprocess = "pil",
        batch_size: BatchSize = 64,
        **options: Any,
    ):
        super().__init__(batch_size, **options)
        import open_clip

        if model in open_clip.list_models() and not Path(weights).expanduser().is_file():
            name = Path(WEIGHTS).name
            raise UserError(
                f"no HPSv2 checkpoint at {weights}; download {name} from {SOURCE} and put it there"
            )
        self.clip = padding(load_clip(model, weights, self.device))
        self.exact = preprocess == "pil"
        self.scale = scaling(scale, SCALES, "hpsv2")

    def score(self, pictures: Tensor, texts: list[str]) -> Tensor:
        images = self.clip.embed_images(pictures, self.batch_size, self.exact)
        words = self.clip.embed_texts(texts, self.batch_size)
        return self.scale((images * words).sum(-1))


def padding(clip: Clip) -> Clip:
    """Return the same network and texts with HPSv2's preprocessing: longer side to size, padded
    with black."""
    padded = Clip(clip.model, clip.tokenizer, clip.device)
    padded.preprocess_cfg |= {"resize_mode": "longest", "fill_color": 0, "interpolation": "bicubic"}
    padded.shared = clip
    return padded
