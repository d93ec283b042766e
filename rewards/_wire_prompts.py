"""Carries what travels besides samples: pictures of prompts, and what a text knows of itself, such
as its length."""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.core.types import Prompt

KEYS = ("images", "image")  # of a prompt: its pictures, PIL images or paths
PNG = "png"  # {"png": "<base64>"} stands for a picture


class MarkedText(str):
    """Holds a text with what its policy knew of it (``mmrl.core.types.Completion``)."""

    tokens: int
    finished: bool
    logprob: float
    self_certainty: float
    question_gain: float
    last_logprob: float


MARKS = {
    "tokens": (int,),
    "finished": (bool,),
    "logprob": (int, float),
    "self_certainty": (int, float),
    "question_gain": (int, float),
    "last_logprob": (int, float),
}


def marks_of(texts: Sequence[str]) -> list[dict[str, Any] | None] | None:
    """Return what the texts know of themselves; None if none knows anything."""
    marks = [_mark(text) for text in texts]
    return marks if any(marks) else None


def _mark(text: str) -> dict[str, Any] | None:
    known = {name: value for name in MARKS if (value := getattr(text, name, None)) is not None}
    # JSON has no NaN
    return {name: value for name, value in known.items() if math.isfinite(value)} or None


def marked_texts(texts: Sequence[str], marks: Any) -> list[str]:
    """Return texts with their marks again. Raises ValueError with what is wrong."""
    if marks is None:
        return list(texts)
    if not isinstance(marks, list) or len(marks) != len(texts):
        raise ValueError(f"expected a list of {len(texts)}")
    return [
        text if mark is None else _marked_text(text, mark)
        for text, mark in zip(texts, marks, strict=True)
    ]


def _marked_text(text: str, mark: Any) -> MarkedText:
    if not isinstance(mark, dict) or any(
        name not in MARKS or type(v) not in MARKS[name] for name, v in mark.items()
    ):
        types = (
            "tokens: whole number, finished: true or false, logprob, self_certainty, "
            "question_gain, last_logprob: numbers"
        )
        raise ValueError(f"expected null or {{{types}}}")
    # a whole number of JSON may have any length
    if any(abs(value) > 2**53 for value in mark.values()):
        raise ValueError("expected numbers below 2**53")
    marked = MarkedText(text)
    for name, value in mark.items():
        setattr(marked, name, float(value) if float in MARKS[name] else value)
    return marked


# ------------------------------------------------------------------------------------------
# pictures of prompts


def has_pictures(prompt: Mapping[str, Any]) -> bool:
    return any(prompt.get(key) is not None for key in KEYS)


def without_pictures(prompt: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in prompt.items() if key not in KEYS}


def enclosed(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt with its pictures as PNG in base64. Raises OSError for a file that cannot
    be read."""
    return {key: _each(value, _encoded) if key in KEYS else value for key, value in prompt.items()}


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return [change(item) for item in value] if isinstance(value, (list, tuple)) else change(value)


def _encoded(picture: Any) -> Any:
    from PIL import Image

    if isinstance(picture, (str, Path)):
        with Image.open(picture) as file:
            return _encoded(file.convert("RGB"))
    if not isinstance(picture, Image.Image):
        return picture
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, format="PNG", compress_level=1)
    return {PNG: base64.b64encode(buffer.getvalue()).decode()}


def opened(prompts: Sequence[Prompt], pixels: float) -> list[Prompt]:
    """Return prompts with their pictures as PIL images; a path, which means nothing here, is
    refused.

    Raises:
        ValueError: what is wrong and where; together they may have ``pixels`` pixels.
    """
    left = pixels
    decoded_prompts = []
    for i, prompt in enumerate(prompts):
        copy = dict(prompt)
        for key in KEYS:
            if copy.get(key) is None:
                continue
            pictures = copy[key] if isinstance(copy[key], list) else [copy[key]]
            decoded = []
            for picture in pictures:
                decoded.append(_decoded(picture, left, f"prompts[{i}].{key}"))
                left -= decoded[-1].size[0] * decoded[-1].size[1]
            copy[key] = decoded if isinstance(copy[key], list) else decoded[0]
        decoded_prompts.append(copy)
    return decoded_prompts


def _decoded(picture: Any, left: float, where: str) -> Any:
    from PIL import Image

    if not isinstance(picture, dict) or set(picture) != {PNG} or not isinstance(picture[PNG], str):
        raise ValueError(f'{where}: expected {{"png": "<base64>"}} or a list of them')
    try:
        content = base64.b64decode(picture[PNG], validate=True)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as file:
            if file.size[0] * file.size[1] > left:
                raise ValueError(
                    f"{where}: pictures of more pixels than this server takes in one request"
                )
            return file.convert("RGB")
    except binascii.Error as error:
        raise ValueError(f"{where}: is not base64") from error
    except ValueError as error:
        raise (
            error if str(error).startswith(where) else ValueError(f"{where}: cannot be read as PNG")
        ) from error
    except Exception as error:  # whatever a decoder says of bytes that anyone may have sent
        raise ValueError(f"{where}: cannot be read as PNG ({type(error).__name__})") from error
