"""Encodes what is sent besides samples: pictures of prompts, and recorded values of texts, such as
their length."""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mmrl.core.media.pictures import is_pil, rgb_picture
from mmrl.core.types import Completion, Prompt
from rewards.base.files import open_picture
from rewards.base.media import to_uint8
from rewards.card import PICTURES

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
PNG = "png"  # {"png": "<base64>"} is a picture


# recorded values of a text: attribute of ``Completion`` -> its JSON types
MARKS = {
    "tokens": (int,),
    "finished": (bool,),
    "logprob": (int, float),
    "self_certainty": (int, float),
    "question_gain": (int, float),
    "last_logprob": (int, float),
}


def marks_of(texts: Sequence[str]) -> list[dict[str, Any] | None] | None:
    """Return the recorded values of the texts; None if there are none."""
    marks = [_mark(text) for text in texts]
    return marks if any(marks) else None


def _mark(text: str) -> dict[str, Any] | None:
    known = {name: value for name, value in vars(Completion.of(text)).items() if name in MARKS}
    return {  # JSON has no NaN
        name: value for name, value in known.items() if value is not None and math.isfinite(value)
    } or None


def marked_texts(texts: Sequence[str], marks: Any) -> list[str]:
    """Restore the marks of texts. Raises ValueError with what is wrong."""
    if marks is None:
        return list(texts)
    if not isinstance(marks, list) or len(marks) != len(texts):
        raise ValueError(f"expected a list of {len(texts)}")
    return [
        text if mark is None else _marked_text(text, mark)
        for text, mark in zip(texts, marks, strict=True)
    ]


def _marked_text(text: str, mark: Any) -> Completion:
    if not isinstance(mark, dict) or any(
        name not in MARKS or type(v) not in MARKS[name] for name, v in mark.items()
    ):
        types = (
            "tokens: whole number, finished: true or false, logprob, self_certainty, "
            "question_gain, last_logprob: numbers"
        )
        raise ValueError(f"expected null or {{{types}}}")
    # a JSON integer may have any length
    if any(abs(value) > 2**53 for value in mark.values()):
        raise ValueError("expected numbers below 2**53")
    marked = Completion(text)
    for name, value in mark.items():
        setattr(marked, name, float(value) if float in MARKS[name] else value)
    return marked


# ------------------------------------------------------------------------------------------
# pictures of prompts


def has_pictures(prompt: Mapping[str, Any]) -> bool:
    """Tell whether any field may be a picture: its own, and others that look like one."""
    return any(
        key in PICTURES or any(map(_may_be_picture, _listed(value)))
        for key, value in prompt.items()
        if value is not None
    )


def _may_be_picture(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 3
    looks = isinstance(value, (str, Path)) and str(value).lower().endswith(SUFFIXES)
    return looks or is_pil(value)


def enclosed(prompt: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return the prompt with the pictures of these fields as PNG in base64; ``image`` and
    ``images`` only if they are among the fields.

    Raises:
        OSError, ValueError: a file that cannot be read, a picture without colours.
    """
    return {
        key: _each(value, _encoded) if key in fields else value
        for key, value in prompt.items()
        if key in fields or key not in PICTURES
    }


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return [change(item) for item in value] if isinstance(value, (list, tuple)) else change(value)


def _encoded(picture: Any) -> Any:
    from PIL import Image

    if isinstance(picture, (str, Path)):
        with open_picture(picture) as file:
            return _encoded(rgb_picture(file))
    if isinstance(picture, Tensor) and picture.ndim == 3 and len(picture) == 3:
        pixels = to_uint8(picture) if picture.is_floating_point() else picture.cpu()
        picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    if not isinstance(picture, Image.Image):
        return picture
    buffer = io.BytesIO()
    rgb_picture(picture).save(buffer, format="PNG", compress_level=1)
    return {PNG: base64.b64encode(buffer.getvalue()).decode()}


def opened(prompts: Sequence[Prompt], pixels: float, fields: Collection[str] = ()) -> list[Prompt]:
    """Return prompts with their pictures, and those of further ``fields``, as PIL images; a path is
    refused.

    A further field may hold something else than text, such as the run lengths of a mask.

    Raises:
        ValueError: what is wrong and where; together they may have ``pixels`` pixels.
    """
    left = pixels
    decoded_prompts = []
    for i, prompt in enumerate(prompts):
        copy = dict(prompt)
        for key in dict.fromkeys((*PICTURES, *fields)):
            value = prompt.get(key)
            if value is None or (key not in PICTURES and not _for_picture(value)):
                continue
            decoded = []
            for picture in _listed(value):
                decoded.append(_decoded(picture, left, f"prompts[{i}].{key}"))
                left -= decoded[-1].size[0] * decoded[-1].size[1]
            copy[key] = decoded if isinstance(value, list) else decoded[0]
        decoded_prompts.append(copy)
    return decoded_prompts


def headers(prompts: Sequence[Prompt], fields: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the header bytes of every picture of prompts, with its place; skips anything else."""
    for i, prompt in enumerate(prompts):
        for key in dict.fromkeys((*PICTURES, *fields)):
            for picture in _listed(prompt.get(key)):
                text = picture.get(PNG) if isinstance(picture, dict) else None
                try:
                    yield f"prompts[{i}].{key}", base64.b64decode(str(text)[:64])
                except binascii.Error:
                    continue  # decoding reports what is wrong


def _for_picture(value: Any) -> bool:
    """Tell whether a value is meant as a picture: a text, {"png": ...}, or a list with one."""
    return any(
        isinstance(item, str) or (isinstance(item, dict) and PNG in item) for item in _listed(value)
    )


def _decoded(picture: Any, left: float, where: str) -> Any:
    from PIL import Image

    if not isinstance(picture, dict) or set(picture) != {PNG} or not isinstance(picture[PNG], str):
        raise ValueError(
            f'{where}: expected {{"png": "<base64>"}} or a list of them; a path means nothing here'
        )
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
    except Exception as error:  # whatever a decoder raises on untrusted bytes
        raise ValueError(f"{where}: cannot be read as PNG ({type(error).__name__})") from error
