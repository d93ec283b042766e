"""Scores whether a video shows the prompt's action, by a video classifier (VideoMAE, Tong et al.
2022, arXiv:2203.12602, and others of transformers)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.hf import Precision, load_model, load_processor
from rewards.base.media import frames, to_uint8
from rewards.base.precision import own_precision
from rewards.base.prompt import field_of
from rewards.base.scale import Scaling, raw, scaling
from rewards.card import card, card_with

Named = Literal["probability", "log_probability"]
SCALES: dict[str, Scaling] = {"probability": raw, "log_probability": torch.log}


@card(
    media="video",
    needs="action",
    named={"field": "action"},
    high=1,
    source="MCG-NJU/videomae-base-finetuned-kinetics or any video classifier of transformers",
    licence="CC-BY-NC-4.0 (VideoMAE's weights)",
    scaling="probability, log_probability",
)
@REWARDS.register("action")
class Action:
    """Score a video by the probability of the prompt's action under a video classifier.

    Frames are sampled evenly, as many as the model expects, repeated if there are fewer, and
    rounded to 8 bits.

    Args:
        model: a video classifier of transformers, hub id or folder, with its processor.
        field: the field of a prompt that names the class, as in the model (case does not matter).
        scale: the probability, its logarithm, or a factor.
        batch_size: videos in one forward pass.
        device: ``auto`` is CUDA if there is one.
        dtype: of the model.

    Raises:
        UserError: a class that the model does not have.
    """

    def __init__(
        self,
        model: str = "MCG-NJU/videomae-base-finetuned-kinetics",
        field: str = "action",
        scale: float | Named = "probability",
        batch_size: Annotated[int, Ge(1)] = 8,
        device: str = "auto",
        dtype: Precision = "float32",
    ):
        self.network = load_model("AutoModelForVideoClassification", model, device, dtype)
        self.processor = load_processor("AutoVideoProcessor", model)
        labels: dict[int, str] = self.network.config.id2label
        self.classes = {name.lower(): place for place, name in labels.items()}
        self.field = field
        self.batch_size = batch_size
        self.scale = scaling(scale, SCALES, "action")
        self.count = getattr(self.network.config, "num_frames", 16)
        self.card = card_with(type(self), {"field": field})

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score videos [B, F, 3, H, W] or images [B, 3, H, W] in 0..1 -> [B] float32 on the CPU."""
        stack = frames(media, "action")
        classes = torch.tensor([self.class_of(prompt) for prompt in prompts])
        broken = ~stack.isfinite().flatten(1).all(1).cpu()
        places = torch.linspace(0, stack.shape[1] - 1, self.count).round().long()
        videos = to_uint8(stack[:, places].nan_to_num(0.0, 0.0, 0.0))
        probabilities = []
        with own_precision(media.device.type):
            for part in videos.split(self.batch_size):
                pixels = self.processor(videos=list(part), return_tensors="pt")["pixel_values"]
                logits = self.network(pixels.to(self.network.device, self.network.dtype)).logits
                probabilities.append(logits.float().softmax(-1).cpu())
        chances = torch.cat(probabilities).gather(1, classes[:, None])[:, 0]
        return self.scale(chances).masked_fill(broken, torch.nan)

    def class_of(self, prompt: Prompt) -> int:
        name = field_of(prompt, self.field, "action").lower()
        if name not in self.classes:
            raise UserError(
                f"reward 'action': the model has no class {name!r}; {suggest(name, self.classes)}"
            )
        return self.classes[name]
