"""Shows samples to a judge: pictures, frames of videos, texts with the pictures of their
prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.media.pictures import rgb_picture
from mmrl.core.registry import JUDGES
from mmrl.core.types import Media, Prompt
from rewards.base.files import open_picture
from rewards.base.media import frames as as_frames
from rewards.base.media import to_uint8
from rewards.card import PICTURES, Card, card_of
from rewards.judges.question import Asker, Question
from rewards.judges.templates import Template

Model = Annotated[Asker, JUDGES]
Frames = Annotated[int, Ge(1)]
OnFailure = Literal["nan", "stop"]


def sample_pictures(media: Media, frames: int, reward: str) -> list[list[Any] | None]:
    """Return for each sample its pictures (``frames`` evenly spaced ones of a video); None if a
    pixel is not finite.

    Texts have none: empty lists.
    """
    if not isinstance(media, Tensor):
        if wrong := next((sample for sample in media if not isinstance(sample, str)), None):
            raise UserError(
                f"reward {reward!r} judges images, videos or texts, not {type(wrong).__name__}"
            )
        return [[] for _ in media]
    stack = as_frames(media, reward)  # [B, F, 3, H, W]
    count = stack.shape[1]
    chosen = torch.linspace(0, count - 1, min(frames, count)).round().long().tolist()
    finite = stack.isfinite().flatten(1).all(1).tolist()
    eight = to_uint8(stack[:, chosen])
    return [
        [to_pil(sample) for sample in row] if good else None
        for row, good in zip(eight, finite, strict=True)
    ]


def to_pil(picture: Tensor) -> Any:
    """Convert uint8 [3, H, W] to a PIL image."""
    from PIL import Image

    return Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy())


def prompt_pictures(prompt: Prompt) -> list[Any]:
    """Return the pictures of a prompt under ``images`` or ``image``: PIL images, paths, or floats
    [3, H, W] in 0..1.

    Raises:
        UserError: a file that cannot be read, or something that is not a picture.
    """
    pictures: Any = next((prompt[key] for key in PICTURES if prompt.get(key) is not None), [])
    return [
        _picture(picture, prompt)
        for picture in (pictures if isinstance(pictures, (list, tuple)) else [pictures])
    ]


def _picture(picture: Any, prompt: Prompt) -> Any:
    from PIL import Image

    if isinstance(picture, Image.Image):
        return rgb_picture(picture)
    if isinstance(picture, Tensor):
        return to_pil(to_uint8(picture))
    if not isinstance(picture, (str, Path)):
        raise UserError(
            f"a picture of the prompt {prompt.get('text', '')!r} is {type(picture).__name__}, "
            f"not an image or a path"
        )
    try:
        with open_picture(picture) as file:
            return rgb_picture(file)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(
            f"a picture of the prompt {prompt.get('text', '')!r} cannot be read: {error}"
        ) from error


def kind_of(media: Tensor) -> str:
    """Return a template's word for a picture or a video."""
    return "image" if media.ndim == 4 else "video"


def shown_of(media: Media, row: int, pictures: Sequence[Any], prompt: Prompt) -> dict[str, Any]:
    """Return the variables of a template for one sample."""
    if isinstance(media, Tensor):
        return {"kind": kind_of(media), "media": pictures}
    return {"kind": "answer", "media": prompt_pictures(prompt), "answer": str(media[row])}


class Judged:
    """Provides what rewards with a judge share: sends questions, collects values, NaN for none.

    ``counters``, for the log: the judge's costs so far.
    """

    name = "judge"

    def __init__(self, model: Asker, frames: int, on_failure: OnFailure):
        self.model = model
        self.frames = frames
        self.stop = on_failure == "stop"

    def counters(self) -> dict[str, float]:
        return self.model.usage.numbers()

    def causes(self) -> str:
        """Return why samples have no value, as far as the judge reports it."""
        return self.model.usage.cause

    def needing(self, template: Template) -> Card:
        """Return the card of this object: the fields that its template mentions, and pictures."""
        return replace(card_of(type(self)), needs=template.needs(), pictures=PICTURES)

    def answers(self, questions: Sequence[Question]) -> list[Any]:
        """Return the values of questions, None if there is none. Raises UserError in that case with
        ``on_failure: stop``."""
        values = self.model.ask(questions) if questions else []
        missing = sum(value is None for value in values)
        if missing and self.stop:
            raise UserError(
                f"reward {self.name!r}: the judge has no value for {missing} of "
                f"{len(values)} questions"
            )
        return values


class SampleJudge(Judged, ABC):
    """Asks a judge about samples one by one. A subclass defines the questions about a sample and
    the value of the answers."""

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        """Score images [B, 3, H, W], videos [B, F, 3, H, W] in 0..1, or B texts -> [B] float32 on
        the CPU; NaN if a question has no answer."""
        values = torch.full((len(prompts),), torch.nan)
        for row, answers in self.answered(media, prompts).items():
            values[row] = self.value(prompts[row], answers)
        return values

    def answered(self, media: Media, prompts: list[Prompt]) -> dict[int, list[Any]]:
        """Return the answers about each sample that can be shown, if none is missing."""
        questions = {
            row: self.questions(prompts[row], shown_of(media, row, pictures, prompts[row]))
            for row, pictures in enumerate(sample_pictures(media, self.frames, self.name))
            if pictures is not None
        }
        values = iter(
            self.answers([question for about in questions.values() for question in about])
        )
        answers = {row: list(islice(values, len(about))) for row, about in questions.items()}
        return {row: about for row, about in answers.items() if not any(x is None for x in about)}

    @abstractmethod
    def questions(self, prompt: Prompt, shown: dict[str, Any]) -> list[Question]:
        """Write the questions about a sample. ``shown``: the variables of templates."""

    @abstractmethod
    def value(self, prompt: Prompt, answers: list[Any]) -> float:
        """Compute the reward of a sample from the answers to its questions."""
