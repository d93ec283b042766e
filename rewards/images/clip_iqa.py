"""Scores pictures by CLIP-IQA: which of two opposite descriptions fits (Wang et al. 2023,
arXiv:2207.12396)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import REWARDS
from rewards.base.clip import load_clip
from rewards.base.frames import BatchSize, FrameReward
from rewards.base.hf import Preprocess
from rewards.card import card

PAIRS = {  # the paper's section 3.2 and figure 5
    "quality": ("Good photo.", "Bad photo."),
    "brightness": ("Bright photo.", "Dark photo."),
    "noisiness": ("Clean photo.", "Noisy photo."),
    "colorfulness": ("Colorful photo.", "Dull photo."),
    "sharpness": ("Sharp photo.", "Blurry photo."),
    "contrast": ("High contrast photo.", "Low contrast photo."),
    "complexity": ("Complex photo.", "Simple photo."),
    "natural": ("Natural photo.", "Synthetic photo."),
    "happy": ("Happy photo.", "Sad photo."),
    "scary": ("Scary photo.", "Peaceful photo."),
    "new": ("New photo.", "Old photo."),
    "real": ("Real photo.", "Abstract photo."),
    "beautiful": ("Beautiful photo.", "Ugly photo."),
    "lonely": ("Lonely photo.", "Sociable photo."),
    "relaxing": ("Relaxing photo.", "Stressful photo."),
}


@card(
    media="image video",
    low=0,
    high=1,
    source="any open_clip model; the paper: RN50/openai",
    licence="MIT (OpenAI's)",
)
@REWARDS.register("clip_iqa")
class ClipIQA(FrameReward):
    """Compare a picture with opposite descriptions: mean probability of the good one over
    ``pairs``.

    The prompt is ignored. The softmax has the model's temperature (100 for OpenAI's). The paper's
    RN50 was used without position embedding at any size; here, as in torchmetrics' CLIP variants,
    the model's own preprocessing is used. For a video, the mean over its frames.

    Args:
        pairs: names of the paper's pairs (quality, brightness, ...) or ``"positive | negative"``.
        model: an open_clip name, ``hf-hub:org/repo`` or a local folder.
        pretrained: open_clip's tag for the weights; not used for folders and hub ids.
        preprocess: ``tensor`` or ``pil``, see ``ClipScore``.
    """

    name = "clip_iqa"

    def __init__(
        self,
        pairs: list[str] = ["quality"],  # noqa: B006
        model: str = "ViT-L-14",
        pretrained: str = "openai",
        preprocess: Preprocess = "tensor",
        batch_size: BatchSize = 64,
        **options: Any,
    ):
        super().__init__(batch_size, **options)
        self.clip = load_clip(model, pretrained, self.device)
        self.exact = preprocess == "pil"
        # [2 P, E]
        self.words = self.clip.embed_texts([text for pair in pairs for text in texts_of(pair)])
        self.temperature: Tensor = self.clip.model.logit_scale.exp().float()

    def score(self, pictures: Tensor, conditions: Any) -> Tensor:
        images = self.clip.embed_images(pictures, self.batch_size, self.exact)
        logits = self.temperature * images @ self.words.T  # [N, 2 P]
        pairs: Tensor = logits.unflatten(1, (-1, 2))
        return pairs.softmax(-1)[..., 0].mean(1)


def texts_of(pair: str) -> tuple[str, str]:
    """Return the positive and the negative text of a pair."""
    if pair in PAIRS:
        return PAIRS[pair]
    good, bar, bad = (part.strip() for part in pair.partition("|"))
    if not (bar and good and bad):
        raise UserError(
            f"reward 'clip_iqa' knows no pair {pair!r}; {suggest(pair, PAIRS)}; or "
            f"write 'good | bad'"
        )
    return good, bad
