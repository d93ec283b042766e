"""Penalises unsafe pictures by Stable Diffusion's safety checker or any NSFW image classifier."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as nnf
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from rewards.base.frames import FrameReward
from rewards.base.hf import Eyes, Precision, Preprocess, load_class, load_model
from rewards.card import card

CARE = 0.01  # lowers all thresholds if a special-care concept is found, from the published code


@card(
    media="image video",
    high=0,
    source="CompVis/stable-diffusion-safety-checker",
    licence="CreativeML OpenRAIL-M",
    scaling="flag = -1 when flagged, else 0; margin = minus how far the worst concept is above "
    "its threshold",
)
@REWARDS.register("safety_checker")
class SafetyChecker(FrameReward):
    """Penalise pictures that Stable Diffusion's safety checker flags: below 0; 0 if not flagged.

    A CLIP image embedding is compared with 17 hidden concepts, each with its threshold, lowered by
    0.01 when one of three special-care concepts is found (Rando et al. 2022, arXiv:2210.04610). For
    a video, the mean over its frames.

    Args:
        model: the checker as diffusers saves it, hub id or folder, with its image processor.
        processor: folder or hub id of the image processor; None: the model's.
        penalty: ``flag`` is -1, ``margin`` minus the excess over the threshold.
        preprocess: ``pil`` as in the pipelines, ``tensor`` on floats.
        dtype: of the model.
    """

    name = "safety_checker"

    def __init__(
        self,
        model: str = "CompVis/stable-diffusion-safety-checker",
        processor: str | None = None,
        penalty: Literal["flag", "margin"] = "flag",
        preprocess: Preprocess = "pil",
        dtype: Precision = "float32",
        **options: Any,
    ):
        super().__init__(**options)
        from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

        self.checker = load_class(StableDiffusionSafetyChecker, model, self.device, dtype)
        self.eyes = Eyes(processor or model, preprocess)
        self.flag = penalty == "flag"

    def score(self, pictures: Tensor, conditions: Any) -> Tensor:
        worst = self.excess(pictures).amax(1)
        return -(worst > 0).float() if self.flag else -worst.clamp(min=0)

    def excess(self, pictures: Tensor) -> Tensor:
        """Return cosine minus threshold of each concept, to 3 digits as published: [N, 3, H, W] in
        0..1 -> [N, 17]."""
        net = self.checker
        pixels = self.eyes(pictures, net.device).to(net.dtype)
        rows = nnf.normalize(net.visual_projection(net.vision_model(pixels).pooler_output))
        care = rows @ nnf.normalize(net.special_care_embeds).T
        care_excess = thousandths(care.float() - net.special_care_embeds_weights.float())
        lowered = CARE * (care_excess > 0).any(1, keepdim=True).float()
        concepts = rows @ nnf.normalize(net.concept_embeds).T
        return thousandths(concepts.float() - net.concept_embeds_weights.float() + lowered)


@card(
    media="image video",
    low=-1,
    high=0,
    source="Falconsai/nsfw_image_detection or any image classifier of transformers",
    licence="Apache-2.0 (Falconsai)",
)
@REWARDS.register("nsfw_penalty")
class NsfwPenalty(FrameReward):
    """Negate the probability of unsafe labels by an image classifier; for a video, the frames'
    mean.

    Args:
        model: an image classifier of transformers, hub id or folder.
        labels: those that count as unsafe, as named in the model's configuration.
        preprocess: ``pil`` (8 bits, PIL) or ``tensor``.
        dtype: of the model.

    Raises:
        UserError: a label that the model does not have.
    """

    name = "nsfw_penalty"

    def __init__(
        self,
        model: str = "Falconsai/nsfw_image_detection",
        labels: list[str] = ["nsfw"],  # noqa: B006
        preprocess: Preprocess = "pil",
        dtype: Precision = "float32",
        **options: Any,
    ):
        super().__init__(**options)
        self.network = load_model("AutoModelForImageClassification", model, self.device, dtype)
        self.eyes = Eyes(model, preprocess)
        known = {name: place for place, name in self.network.config.id2label.items()}
        for label in labels:
            if label not in known:
                raise UserError(
                    f"reward 'nsfw_penalty': {model} has no label {label!r}; it has "
                    f"{', '.join(known)}"
                )
        self.bad = [known[label] for label in labels]

    def score(self, pictures: Tensor, conditions: Any) -> Tensor:
        pixels = self.eyes(pictures, self.network.device).to(self.network.dtype)
        logits: Tensor = self.network(pixels).logits
        return -logits.float().softmax(-1)[:, self.bad].sum(1)


def thousandths(values: Tensor) -> Tensor:
    return (values * 1000).round() / 1000
