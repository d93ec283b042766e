"""Scores how well a picture matches the prompt, by a CLIP model (Hessel et al. 2021, CLIPScore,
arXiv:2104.08718)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.clip import load_clip
from rewards.base.frames import BatchSize, FrameReward
from rewards.base.hf import Preprocess
from rewards.base.scale import factor, raw, scaling
from rewards.card import card

Named = Literal["cosine", "logit", "flow_grpo", "clipscore"]
SCALES = {
    "cosine": raw,
    "logit": factor(100),
    "flow_grpo": factor(100 / 30),
    "clipscore": lambda c: 2.5 * c.clamp(min=0),
}


@card(
    media="image video",
    needs="text",
    differentiable=True,
    source="any open_clip model; ViT-L-14/openai: OpenAI",
    licence="MIT",
    scaling="cosine = 1 (DiffusionNFT's 100 cos / 100, MixGRPO), logit = 100, flow_grpo = 100 "
    "cos / 30 (also DGPO), "
    "clipscore = 2.5 max(0, cos)",
)
@REWARDS.register("clip_score")
class ClipScore(FrameReward):
    """Score a picture by the cosine of its CLIP embedding and the prompt's, scaled.

    For a video, the mean over its frames. Published scalings: ``cosine`` (also 100 cos / 100,
    DiffusionNFT), ``logit`` 100 cos as in OpenAI's models, ``flow_grpo`` 100 cos / 30 (also DGPO),
    ``clipscore`` 2.5 max(0, cos), the paper's equation 1.

    Args:
        model: an open_clip name, ``hf-hub:org/repo``, a local folder with
            ``open_clip_config.json``, or ``world:digits/clip``.
        pretrained: open_clip's tag for the weights, or a weights file; not used for folders and hub
            ids.
        scale: a published scaling by name, or a factor on the cosine.
        preprocess: ``tensor`` resizes the floats with antialiasing; ``pil`` rounds to 8 bits and
            resizes with PIL, exactly open_clip's own evaluation transform, slower.
        batch_size: pictures (or texts) in one forward pass.
        device: ``auto`` is CUDA if there is one.

    Raises:
        UserError: the model is not on this machine and cannot be downloaded; names what to fetch.
    """

    name = "clip_score"

    def __init__(
        self,
        model: str = "ViT-L-14",
        pretrained: str = "openai",
        scale: float | Named = 1.0,
        preprocess: Preprocess = "tensor",
        batch_size: BatchSize = 64,
        device: str = "auto",
    ):
        super().__init__(batch_size, device)
        self.scale = scaling(scale, SCALES, "clip_score")
        self.exact = preprocess == "pil"
        self.clip = load_clip(model, pretrained, self.device)

    def conditions(self, prompts: list[Prompt]) -> Tensor:
        return self.clip.embed_texts([text_of(prompt) for prompt in prompts], self.batch_size)

    def score(self, pictures: Tensor, words: Tensor) -> Tensor:
        images = self.clip.embed_images(pictures, self.batch_size, self.exact)
        return self.scale((images * words).sum(-1))


def text_of(prompt: Prompt) -> str:
    text = prompt.get("text")
    if not isinstance(text, str):
        raise UserError(f"reward 'clip_score' needs a \"text\" in every prompt, got {prompt!r}")
    return text
