"""Reads prompt fields: the text, and pictures given as a file, a PIL image or a tensor."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.media.pictures import is_pil, rgb_picture
from mmrl.core.types import Prompt
from rewards.base.files import open_picture


def field_of(prompt: Prompt, field: str, reward: str, kind: type = str) -> Any:
    """Return the value of a field, of the type that the reward expects.

    Raises:
        UserError: it is missing or of another type.
    """
    value = prompt.get(field)
    if not isinstance(value, kind):
        what = (
            f"{type(value).__name__} {str(value)[:60]!r}"
            if field in prompt
            else f"only {', '.join(key[:80] for key in islice(prompt, 20)) or 'none'}"
        )
        raise UserError(
            f"reward {reward!r} needs a {field!r} ({kind.__name__}) in every prompt; found {what}"
        )
    return value


def texts_of(prompts: list[Prompt], reward: str, field: str = "text") -> list[str]:
    return [field_of(prompt, field, reward) for prompt in prompts]


def picture_of(prompt: Prompt, field: str, reward: str) -> Tensor:
    """Read a picture [3, H, W] in 0..1 from a field that holds a file name, a PIL image, a tensor
    [3, H, W] or a list of them."""
    value = prompt.get(field)
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    if isinstance(value, Tensor) and value.ndim == 3 and value.shape[0] == 3:
        return value.float() if value.is_floating_point() else value.float() / 255
    if isinstance(value, (str, Path)):
        value = read_picture(value, field, reward)
    if not is_pil(value):
        raise UserError(
            f"reward {reward!r} needs a picture in the field {field!r} of every prompt: a "
            f"file, a PIL image or a "
            f"tensor [3, H, W]; found {type(value).__name__}"
        )
    return from_pil(value)


def read_picture(file: str | Path, field: str, reward: str) -> Any:
    try:
        return open_picture(file)
    except OSError as error:
        raise UserError(
            f"reward {reward!r}: cannot read the picture {file} of the field {field!r}: {error}"
        ) from error


def from_pil(image: Any) -> Tensor:
    """Convert a PIL image to [3, H, W] in 0..1."""
    from torchvision.transforms.functional import pil_to_tensor

    pixels: Tensor = pil_to_tensor(rgb_picture(image))
    return pixels.to(torch.float32) / 255
