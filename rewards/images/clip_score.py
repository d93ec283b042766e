"""Scores whether a picture shows what the prompt says, by a CLIP model (Hessel et al. 2021,
CLIPScore, arXiv:2104.08718)."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.clip import load_clip
from rewards.base.media import frame_mean, frames
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
class ClipScore:
    """Score a picture by the cosine of its CLIP embedding and the prompt's, scaled.

    Of a video, the mean over its frames. Published scalings: ``cosine`` (also 100 cos / 100,
    DiffusionNFT), ``logit`` 100 cos as OpenAI's models have it, ``flow_grpo`` 100 cos / 30 (DGPO
    too), ``clipscore`` 2.5 max(0, cos), the paper's equation 1.

    Args:
        model: an open_clip name, ``hf-hub:org/repo``, a local folder with
            ``open_clip_config.json``, or ``world:digits/clip``.
        pretrained: open_clip's tag for the weights, or a weights file; not used for folders and hub
            ids.
        scale: a published scaling by name, or what the cosine is multiplied by.
        preprocess: ``tensor`` resizes the floats with antialiasing; ``pil`` rounds to 8 bits and
            resizes with PIL, exactly open_clip's own evaluation transform, slower.
        batch_size: pictures (or texts) in one forward pass.
        device: ``auto`` is CUDA if there is one.

    Raises:
        UserError: when the model is not on this machine and cannot be downloaded, with what to
            fetch.
    """

    def __init__(
        self,
        model: str = "ViT-L-14",
        pretrained: str = "openai",
        scale: float | Named = 1.0,
        preprocess: Literal["tensor", "pil"] = "tensor",
        batch_size: Annotated[int, Ge(1)] = 64,
        device: str = "auto",
    ):
        self.scale = scaling(scale, SCALES, "clip_score")
        self.exact = preprocess == "pil"
        self.batch_size = batch_size
        self.clip = load_clip(model, pretrained, device)

    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 -> [B] float32 on the CPU."""
        stack = frames(media, "clip_score")
        texts = [text_of(prompt) for prompt in prompts]
        # [B F, E]
        images = self.clip.embed_images(stack.flatten(0, 1), self.batch_size, self.exact)
        words = self.clip.embed_texts(texts, self.batch_size)  # [B, E]
        cosines = (images * words.repeat_interleave(stack.shape[1], dim=0)).sum(-1)
        return frame_mean(self.scale(cosines), stack.shape[1]).cpu()


def text_of(prompt: Prompt) -> str:
    text = prompt.get("text")
    if not isinstance(text, str):
        raise UserError(f"reward 'clip_score' needs a \"text\" in every prompt, got {prompt!r}")
    return text
