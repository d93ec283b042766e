"""Scores a video's temporal consistency, by the similarity of its frames' CLIP or DINO embeddings
(VBench, Huang et al. 2024, arXiv:2311.17982, section 4.1)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.hf import Precision, Preprocess
from rewards.base.media import frames
from rewards.base.precision import own_precision
from rewards.card import card
from rewards.images.similarity import ClipSimilarity, DinoSimilarity, ReferenceReward

Against = Literal["previous", "first", "both"]
SCALING = (
    "cosines with the previous frame, the first, or both (VBench: their mean, each cut off at 0)"
)


class Consistency:
    """Compares the embeddings of a video's frames, computed by ``inner``."""

    name: ClassVar[str]

    def __init__(self, inner: ReferenceReward, against: Against):
        self.inner = inner
        self.against = against

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score videos [B, F, 3, H, W] in 0..1, two frames or more -> [B] float32 on the CPU."""
        stack = moving(media, self.name, 2)
        broken = ~stack.isfinite().flatten(1).all(1).cpu()
        pictures = stack.float().nan_to_num(0.0, 0.0, 0.0).flatten(0, 1)
        with own_precision(media.device.type):
            rows = torch.cat(
                [self.inner.embed(part) for part in pictures.split(self.inner.batch_size)]
            )
        return consistency(rows.unflatten(0, stack.shape[:2]), self.against).masked_fill(
            broken, torch.nan
        )


@card(
    media="video",
    low=-1,
    high=1,
    source="any open_clip model; VBench: ViT-B-32/openai",
    licence="MIT (OpenAI's)",
    scaling=SCALING,
)
@REWARDS.register("clip_consistency")
class ClipConsistency(Consistency):
    """Compare the CLIP embeddings of a video's frames by cosine: VBench's background consistency.

    Args:
        model: an open_clip name, ``hf-hub:org/repo`` or a local folder.
        pretrained: open_clip's tag for the weights; not used for folders and hub ids.
        against: which frame each one is compared with; ``both`` is VBench's mean of the two,
            negative ones as 0.
        preprocess: ``tensor`` or ``pil``, see ``ClipScore``.
        batch_size: frames in one forward pass.
        device: ``auto`` is CUDA if there is one.
    """

    name = "clip_consistency"

    def __init__(
        self,
        model: str = "ViT-B-32",
        pretrained: str = "openai",
        against: Against = "both",
        preprocess: Preprocess = "tensor",
        batch_size: Annotated[int, Ge(1)] = 64,
        device: str = "auto",
    ):
        inner = ClipSimilarity(
            model, pretrained, preprocess=preprocess, batch_size=batch_size, device=device
        )
        super().__init__(inner, against)


@card(
    media="video",
    low=-1,
    high=1,
    source="facebook/dino-vitb16 (VBench) or any vision model of transformers",
    licence="Apache-2.0 (DINO)",
    scaling=SCALING,
)
@REWARDS.register("dino_consistency")
class DinoConsistency(Consistency):
    """Compare the DINO embeddings of a video's frames by cosine: VBench's subject consistency.

    Args:
        model: a vision model of transformers, hub id or folder.
        against: which frame each one is compared with; ``both`` is VBench's mean of the two,
            negative ones as 0.
        preprocess: ``tensor`` resizes the floats, ``pil`` rounds to 8 bits and resizes with PIL.
        batch_size: frames in one forward pass.
        device: ``auto`` is CUDA if there is one.
        dtype: of the model.
    """

    name = "dino_consistency"

    def __init__(
        self,
        model: str = "facebook/dino-vitb16",
        against: Against = "both",
        preprocess: Preprocess = "tensor",
        batch_size: Annotated[int, Ge(1)] = 32,
        device: str = "auto",
        dtype: Precision = "float32",
    ):
        inner = DinoSimilarity(
            model, preprocess=preprocess, batch_size=batch_size, device=device, dtype=dtype
        )
        super().__init__(inner, against)


def moving(media: Tensor, reward: str, least: int) -> Tensor:
    """Return the videos [B, F, 3, H, W], if they have enough frames."""
    stack = frames(media, reward)
    if stack.shape[1] < least:
        raise UserError(
            f"reward {reward!r} judges videos of {least} frames or more, not images; "
            f"got {stack.shape[1]}"
        )
    return stack


def consistency(rows: Tensor, against: Against) -> Tensor:
    """Average the similarity of unit embeddings [B, F, E] -> [B] over the frames after the
    first."""
    previous = (rows[:, 1:] * rows[:, :-1]).sum(-1)
    first = (rows[:, 1:] * rows[:, :1]).sum(-1)
    similarity = {
        "previous": previous,
        "first": first,
        "both": (previous.clamp(min=0) + first.clamp(min=0)) / 2,
    }[against]
    return similarity.mean(1).cpu()
