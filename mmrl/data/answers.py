"""Reads answers that somebody else wrote: a teacher, an expert, or a model long before."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from mmrl.data.prompts import decoded

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
EXPECTED = (
    'expected {"prompt": "...", "answers": ["..."]}, each answer a text, the path of a picture, or '
    '{"text" or "image": "...", "reward": 1.0, "logprobs": [...]}'
)


@dataclass(frozen=True)
class Answer:
    """Holds one answer: a text, or the path of a picture."""

    content: str | Path
    reward: float | Mapping[str, float] | None = None  # total, or by name; None: it is scored
    logprobs: tuple[float, ...] | None = None  # of its tokens, under what wrote it

    def media(self) -> str | Tensor:
        """Return what a policy's ``decode`` would: the text, or the picture [3, H, W] in 0..1."""
        if isinstance(self.content, str):
            return self.content
        from PIL import Image

        try:
            with Image.open(self.content) as picture:
                pixels = np.array(picture.convert("RGB"))
        except OSError as error:
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
        return [_answer(each, Path()) for each in listed]

    return known


def of_file(path: Path, key: str = "text") -> Known:
    """Read a .jsonl file whose lines name a prompt and its answers; ``key``: the field of a prompt
    that "prompt" repeats. Several lines of one prompt add up."""
    answers: dict[str, list[Answer]] = {}
    for number, line in enumerate(
        decoded(path, "the answers of train.demonstrations.path").split("\n"), start=1
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


def _answer(value: Any, folder: Path) -> Answer:
    record = value if isinstance(value, dict) else {"text": value}
    content = record["image"] if "image" in record else record["text"]
    if not isinstance(content, str):
        raise ValueError(f"an answer must be text, got {json.dumps(content)[:60]}")
    picture = "image" in record or Path(content).suffix.lower() in PICTURES
    logprobs = record.get("logprobs")
    return Answer(
        folder / content if picture else content,
        record.get("reward"),
        None if logprobs is None else tuple(float(value) for value in logprobs),
    )
