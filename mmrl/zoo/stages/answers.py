"""Reads external answers: of a teacher, an expert, or an earlier model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ImageSequence
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.media.clips import ClipError, open_clip
from mmrl.core.media.pictures import PictureError, check_size, frame_count, opened, rgb_picture
from mmrl.core.types import Prompt
from mmrl.data.prompts import decoded
from mmrl.data.sources.folders import VIDEOS
from mmrl.data.sources.media import folder_of

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
EXPECTED = (
    'expected {"prompt": "...", "answers": ["..."]}, each answer a text, the path of a file, or '
    '{"text", "image" or "video": "...", "reward": 1.0, "logprobs": [...]}'
)


@dataclass(frozen=True)
class Answer:
    """Holds one answer: a text, or the path of a picture or a video."""

    content: str | Path
    reward: float | Mapping[str, float] | None = None  # total, or by name; None: it is scored
    logprobs: tuple[float, ...] | None = None  # of its tokens, under the model that wrote it

    def media(self, frames: int | None = None, rate: float | None = None) -> str | Tensor:
        """Return what a policy's ``decode`` would: the text, the picture [3, H, W] in 0..1, or the
        video [F, 3, H, W]: the first ``frames`` of its file (None: all), resampled to ``rate`` a
        second (None: as they are)."""
        if isinstance(self.content, str):
            return self.content
        if self.content.suffix.lower() in VIDEOS:
            return _frames(self.content, frames, rate)
        try:
            if film := _animation(self.content):
                return _stacked(film)
            pixels = np.array(rgb_picture(self.content))
        except PictureError as error:
            raise UserError(f"{self.content}: no picture that can be read: {error}") from error
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


Known = Callable[[Prompt], Sequence[Answer]]


def of_field(field: str) -> Known:
    """Find answers in a field of the prompt: one, or a list of them."""

    def known(prompt: Prompt) -> Sequence[Answer]:
        value = prompt.get(field)
        if value is None:
            return ()
        listed = value if isinstance(value, (list, tuple)) else [value]
        return [_answer(each, folder_of(str(prompt.get("origin", "")), Path())) for each in listed]

    return known


def of_file(path: Path, key: str = "text") -> Known:
    """Read a .jsonl file whose lines hold a prompt and its answers; ``key``: the field of a prompt
    that "prompt" is matched with. Answers of several lines with one prompt are joined."""
    answers: dict[str, list[Answer]] = {}
    for number, line in enumerate(
        decoded(path, "the answers of train.stages.demonstrations.path").split("\n"), start=1
    ):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if "answer" in record:
                record = {**record, "answers": [record["answer"]]}
            listed = [_answer(each, path.parent) for each in record["answers"]]
            answers.setdefault(str(record["prompt"]).strip(), []).extend(listed)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number}: {EXPECTED} ({error})") from error
    if not answers:
        raise UserError(f"{path} holds no answers; {EXPECTED}")
    return lambda prompt: answers.get(str(prompt.get(key)).strip(), ())


def _frames(path: Path, count: int | None, rate: float | None) -> Tensor:
    """Read frames of a video, [F, 3, H, W] in 0..1. Raises UserError."""
    try:
        clip = open_clip(path)
        line = clip.timeline
        numbers = range(len(line.times)) if rate is None else line.at_rate(count, rate)
        return _stacked(list(clip.read(numbers)))
    except ClipError as error:
        raise UserError(f"{path}: no video that can be read: {error}") from error


def _animation(path: Path) -> list[np.ndarray]:
    """Read the frames of an animated picture, as ``mmrl view --rate`` stores rated videos; [] for a
    still one. Raises PictureError."""
    with opened(path) as image:
        check_size(image)
        if frame_count(image) == 1:
            return []
        return [np.array(rgb_picture(frame.copy())) for frame in ImageSequence.Iterator(image)]


def _stacked(frames: list[np.ndarray]) -> Tensor:
    """Return frames [H, W, 3] of 8 bits as [F, 3, H, W] in 0..1."""
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255


def _answer(value: Any, folder: Path) -> Answer:
    record = value if isinstance(value, dict) else {"text": value}
    medium = next((kind for kind in ("image", "video") if kind in record), "text")
    content = record[medium]
    if not isinstance(content, str):
        raise ValueError(f"an answer must be text, got {json.dumps(content)[:60]}")
    is_file = medium != "text" or Path(content).suffix.lower() in {*PICTURES, *VIDEOS}
    logprobs = record.get("logprobs")
    return Answer(
        folder / content if is_file else content,
        record.get("reward"),
        None if logprobs is None else tuple(float(value) for value in logprobs),
    )
