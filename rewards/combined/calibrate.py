"""Calibrates a reward by a baseline answer, an opposite text, or the model's confidence."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt, Reward
from rewards.base.groups import groups_of
from rewards.base.media import resize_and_crop
from rewards.base.prompt import field_of, picture_of
from rewards.card import Card, card
from rewards.combined.members import counters_of, merged, scores_of

Part = Annotated[Reward, REWARDS]


@REWARDS.register("calibrated")
@card(
    source="[CGPO](https://arxiv.org/abs/2409.20370)",
    scaling="sigmoid of the difference, or the difference",
)
class Calibrated:
    """Compare a reward with that of a baseline answer: sigmoid(r - r_baseline) (CGPO).

    The calibration of CGPO (Xu et al. 2024): it aligns prompts on which the reward model has
    different scales. The field of the prompt holds a baseline sample: an answer for texts; a
    picture (file, PIL image or tensor) for images, resized to the samples' size; a tensor [F, 3, H,
    W] for videos. A number is the baseline's precomputed score.

    Args:
        of: the reward; one of single samples.
        field: field of the prompts that holds the baseline.
        sigmoid: False returns the difference itself.
        temperature: divides the difference.
    """

    def __init__(
        self,
        of: Part,
        field: str = "baseline",
        sigmoid: bool = True,
        temperature: Annotated[float, Gt(0)] = 1.0,
    ):
        self.of = of
        self.field = field
        self.sigmoid = sigmoid
        self.temperature = temperature
        inner = merged([of])
        if inner.of != "sample":
            raise UserError(
                "calibrated: a baseline is compared with single samples, and this reward is of "
                f"a {inner.of}; give one of samples"
            )
        bounds = (0, 1) if sigmoid else (None, None)
        needs = tuple(dict.fromkeys((*inner.needs, field)))
        added = () if "text" in inner.media else (field,)  # for texts, it is an answer
        pictures = (*inner.pictures, *added)
        self.card = Card(
            media=inner.media, needs=needs, pictures=pictures, low=bounds[0], high=bounds[1]
        )

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        (values,) = scores_of([self.of], media, prompts)
        baselines = torch.zeros_like(values)
        for rows in groups_of(prompts):  # one score for all samples of a prompt
            baselines[rows] = self._baseline(media, prompts[rows[0]])
        gaps = (values - baselines) / self.temperature
        return gaps.sigmoid() if self.sigmoid else gaps

    def _baseline(self, media: Media, prompt: Prompt) -> float:
        value = prompt.get(self.field)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        (scores,) = scores_of([self.of], self._sample(media, prompt), [prompt])
        return float(scores[0])

    def _sample(self, media: Media, prompt: Prompt) -> Media:
        """Return the baseline as a batch of one."""
        if not isinstance(media, Tensor):
            return [field_of(prompt, self.field, "calibrated")]
        value = prompt.get(self.field)
        if media.ndim == 5:
            if not isinstance(value, Tensor) or value.ndim != 4:
                raise UserError(
                    f"reward 'calibrated' judges videos and needs a score or a tensor "
                    f"[F, 3, H, W] in the field {self.field!r}; found {type(value).__name__}"
                )
            return value[None].to(media)
        picture = picture_of(prompt, self.field, "calibrated")[None]
        height, width = media.shape[-2:]
        return resize_and_crop(picture, (height, width), "squash", "bicubic").to(media)

    def counters(self) -> dict[str, float]:
        return counters_of({"of": self.of})


@REWARDS.register("text_contrast")
@card(
    source="[VLM-RL](https://arxiv.org/abs/2412.15544)",
    scaling="alpha r(positive) - beta r(negative)",
)
class TextContrast:
    """Score the match with a positive text minus that with a negative one (contrasting language
    goals).

    VLM-RL (Huang et al. 2024): R = alpha r(sample, positive) - beta r(sample, negative). The reward
    is called twice, with the prompt's ``text`` replaced. The paper's r is CLIP's cosine; any reward
    of a text will do.

    Args:
        of: the reward that reads ``text``, such as ``clip_score`` or ``judge_yes_no``.
        positive: field of the prompts with the text that is wanted.
        negative: field with the text that is not.
        negative_text: one such text for all prompts, instead of a field.
        alpha: weight of the positive text.
        beta: weight of the negative one.
    """

    def __init__(
        self,
        of: Part,
        positive: str = "text",
        negative: str = "negative",
        negative_text: str | None = None,
        alpha: float = 0.5,
        beta: float = 0.5,
    ):
        self.of = of
        self.positive = positive
        self.negative = negative
        self.negative_text = negative_text
        self.alpha = alpha
        self.beta = beta
        inner = merged([of])
        fields = (positive,) if negative_text is not None else (positive, negative)
        needs = (*(name for name in inner.needs if name != "text"), *fields)
        needs = tuple(dict.fromkeys(needs))
        self.card = Card(media=inner.media, needs=needs, pictures=inner.pictures, of=inner.of)

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        positives = [self._text(prompt, self.positive) for prompt in prompts]
        negatives = [
            self.negative_text
            if self.negative_text is not None
            else self._text(prompt, self.negative)
            for prompt in prompts
        ]
        near = self._scores(media, prompts, positives)
        far = self._scores(media, prompts, negatives)
        return self.alpha * near - self.beta * far

    def _scores(self, media: Media, prompts: list[Prompt], texts: list[str]) -> Tensor:
        replaced = [{**p, "text": text} for p, text in zip(prompts, texts, strict=True)]
        return scores_of([self.of], media, replaced)[0]

    def _text(self, prompt: Prompt, field: str) -> str:
        text: Any = field_of(prompt, field, "text_contrast")
        return str(text)

    def counters(self) -> dict[str, float]:
        return counters_of({"of": self.of})


@REWARDS.register("confidence_weighted")
@card(
    source="[ConfClip](https://arxiv.org/abs/2509.17730)",
    scaling="-high to high; 0 to high without signed",
)
class ConfidenceWeighted:
    """Weight a 0/1 reward by the model's clipped confidence (ConfClip).

    R = y clip(c, low, high), y = 2 r - 1 for ``signed``, else r; c = exp(confidence); with
    ``mean_logprob``, the geometric mean of the token probabilities. ConfClip (Zhang et al. 2025)
    weights the verified outcome by the clipped confidence; the form of y, of c and the bounds are
    our reading. For pictures and videos give a ``confidence`` that judges them, with ``scale:
    raw``.

    Args:
        of: a reward of 0..1.
        confidence: the reward that measures confidence; None: ``mean_logprob``.
        scale: exp for log-probabilities, raw for values in 0..1.
        low: smallest weight, so that an unsure answer also counts.
        high: largest weight.
        signed: whether a wrong answer is penalised.
    """

    def __init__(
        self,
        of: Part,
        confidence: Part | None = None,
        scale: Literal["exp", "raw"] = "exp",
        low: float = 0.2,
        high: float = 1.0,
        signed: bool = True,
    ):
        if not 0 <= low < high:
            raise UserError(f"confidence_weighted: low {low:g} must be 0 or more and below high")
        self.of = of
        sure: Reward = REWARDS.build("mean_logprob") if confidence is None else confidence
        self.confidence = sure
        self.exp = scale == "exp"
        self.low = low
        self.high = high
        self.signed = signed
        self.card = merged([of, sure])

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        right, sure = scores_of([self.of, self.confidence], media, prompts)
        weight = (sure.exp() if self.exp else sure).clamp(self.low, self.high)
        return (2 * right - 1 if self.signed else right) * weight

    def counters(self) -> dict[str, float]:
        return counters_of({"of": self.of, "confidence": self.confidence})
