"""Scores how much of a picture an edit preserves, without a vision-language model."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as nnf
from annotated_types import Gt, Le
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.frames import FrameReward
from rewards.base.hf import POOLER, Eyes, Precision, Preprocess, load_model
from rewards.base.prompt import picture_of
from rewards.card import card, card_with


@REWARDS.register("preservation")
@card(
    media="image video",
    needs="image",
    pictures="image mask",
    named={"field": "image", "mask": "mask"},
    low=-1,
    high=1,
    source="facebook/dinov2-base or any vision transformer of transformers",
    licence="Apache-2.0 (DINOv2)",
    scaling="1: nothing was changed",
)
class Preservation(FrameReward):
    """Measure how much of the source picture an edit keeps: outside a mask, or by DINO patches.

    With a mask in the prompt, 1 - the root mean square difference of pixels outside it. Without
    one, the mean cosine of patch features of both pictures at the same places, over the share
    ``patches`` that changed least, since an edit must change something. It does not measure whether
    the instruction was followed: a copy of the picture scores 1. Multiply it by a reward that does
    (``judge_edit``, ``directional_clip``). For a video, the mean over its frames.

    Args:
        field: the field of a prompt with the picture before the edit.
        mask: the field with the mask, if a prompt has one: white (above one half) is the region to
            edit.
        model: a vision transformer; None: every prompt must have a mask.
        patches: share of the patches that count.
        preprocess: ``tensor`` or ``pil``, see ``dino_similarity``.
        dtype: of the model.

    Raises:
        UserError: a prompt without a picture; a mask that covers everything; neither mask nor
            model.
    """

    name = "preservation"

    def __init__(
        self,
        field: str = "image",
        mask: str = "mask",
        model: str | None = "facebook/dinov2-base",
        patches: Annotated[float, Gt(0), Le(1)] = 0.75,
        preprocess: Preprocess = "tensor",
        dtype: Precision = "float32",
        **options: Any,
    ):
        super().__init__(**options)
        self.field = field
        self.mask = mask
        self.patches = patches
        self.network: Any = None
        if model is not None:
            self.network = load_model("AutoModel", model, self.device, dtype, POOLER)
            self.eyes = Eyes(model, preprocess)
        self.card = card_with(type(self), {"field": field, "mask": mask})

    def conditions(self, prompts: list[Prompt]) -> list[Any]:
        """Return each prompt's source picture [3, H, W] and its mask [1, H, W] or None."""
        pairs = []
        for prompt in prompts:
            source = picture_of(prompt, self.field, self.name)
            mask = None
            if prompt.get(self.mask) is not None:
                mask = picture_of(prompt, self.mask, self.name).mean(0, keepdim=True) > 0.5
                if mask.all():
                    raise UserError(
                        f"reward 'preservation': the mask of {str(prompt.get('text', ''))[:60]!r} "
                        f"covers the whole picture; white is where the edit belongs"
                    )
            elif self.network is None:
                raise UserError(
                    f"reward 'preservation': {str(prompt.get('text', ''))[:60]!r} has no "
                    f"{self.mask!r}, and `model: null` compares outside masks only"
                )
            pairs.append((source, mask))
        return pairs

    def score(self, pictures: Tensor, conditions: list[Any]) -> Tensor:
        size = pictures.shape[-2:]
        sources = torch.stack([fitted(source, size) for source, _ in conditions]).to(pictures)
        values = pictures.new_zeros(len(pictures))
        bare = [row for row, (_, mask) in enumerate(conditions) if mask is None]
        for row, (_, mask) in enumerate(conditions):
            if mask is not None:
                covered = fitted(mask.float(), size)[0].to(pictures)
                outside = covered <= 0 if (covered <= 0).any() else covered < 0.5
                values[row] = 1 - rms(pictures[row] - sources[row], outside)
        if bare:
            alike = nnf.cosine_similarity(
                self.places(pictures[bare]), self.places(sources[bare]), -1
            )
            count = max(1, round(self.patches * alike.shape[1]))
            values[bare] = alike.topk(count, 1).values.mean(1).to(values)
        return values

    def places(self, pictures: Tensor) -> Tensor:
        """Return patch features [N, T, E] of pictures, without class and register tokens."""
        pixels = self.eyes(pictures, self.network.device).to(self.network.dtype)
        hidden: Tensor = self.network(pixels).last_hidden_state.float()
        prefix = 1 + int(getattr(self.network.config, "num_register_tokens", 0) or 0)
        return hidden[:, prefix:]


def fitted(picture: Tensor, size: tuple[int, int] | torch.Size) -> Tensor:
    """Resize a picture [C, H, W] to another size."""
    if picture.shape[-2:] == tuple(size):
        return picture
    resized: Tensor = nnf.interpolate(
        picture[None], tuple(size), mode="bilinear", antialias=True, align_corners=False
    )
    return resized[0]


def rms(difference: Tensor, where: Tensor) -> Tensor:
    """Return the root mean square of [3, H, W] over the pixels ``where`` [H, W]."""
    return difference[:, where].square().mean().sqrt()
