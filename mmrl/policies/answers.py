"""Opens images and videos that the data name as answers, and finds errors in their files."""

from __future__ import annotations

from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.core.media import USUAL_RATE
from mmrl.core.media.clips import HELD, NO_RATE, ClipError, header_of, open_clip, too_short
from mmrl.core.media.pictures import is_pil
from mmrl.core.types import Prompt
from mmrl.policies.capabilities import Medium
from mmrl.policies.vlm.media import clip_at_rate, open_image


def opened(
    value: Any,
    medium: Medium | None,
    frames: int | None,
    prompt: Prompt,
    rate: float = USUAL_RATE,
) -> Tensor:
    """Open an image [3, H, W] or a video [F, 3, H, W] in 0..1: a file, a PIL image, an array or a
    tensor. Where the medium is not known, numbers are the sample itself.

    Of a clip these are its first ``frames`` (None: all), resampled by time to ``rate`` frames per
    second, so that motion keeps its speed whatever the clip's own rate and length.
    """
    if isinstance(value, Tensor):
        return value
    if medium == "video":
        taken = clip_at_rate(value, prompt, frames, rate)
        return torch.from_numpy(taken.copy()).permute(0, 3, 1, 2).float() / 255
    if medium is None and not isinstance(value, (str, Path)) and not is_pil(value):
        return torch.tensor(value)
    pixels = np.array(open_image(value, prompt))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def clips_are_read(frames: int | None, rate: float) -> str:
    """Describe how clips of the data are read."""
    part = "all" if frames is None else f"the first {frames / rate:.3g} s ({frames} frames)"
    return f"clips are read by time at {rate:g} frames a second, the model's: {part} of each"


def media_problem(
    value: Any, medium: Medium | None, frames: int | None, prompt: Prompt, rate: float
) -> str | None:
    """Return the error of an answer's image or video, from the file's header; a video is ``opened``
    as ``frames`` at ``rate`` per second."""
    if medium == "video" and isinstance(value, (list, np.ndarray)):
        fps = prompt.get("fps")
        return _length_problem(len(value) / fps, frames, rate) if fps else NO_RATE
    if not isinstance(value, (str, Path)):
        return None
    if not isfile(value):
        return f"no file {value}; paths start at {Path.cwd()}, those of data: captions at its file"
    if medium == "video":
        return _clip_problem(Path(value), frames, rate)
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(value):
            return None
    except (OSError, UnidentifiedImageError) as error:
        return f"{value} is no picture: {error}; give a PNG, JPEG or WebP"


def _clip_problem(path: Path, frames: int | None, rate: float) -> str | None:
    try:
        _, seconds = header_of(path)
        if seconds is None or _length_problem(seconds, frames, rate) is None:
            return None
        # headers of variable-rate and fragmented files may state less than there is
        why = _length_problem(open_clip(path).timeline.length, frames, rate)
    except ClipError as error:
        return f"{path} is no video that can be read: {error}"
    return None if why is None else f"{path}: {why}"


def _length_problem(seconds: float, frames: int | None, rate: float) -> str | None:
    if frames is None or seconds * rate >= frames - 1 - HELD:
        return None
    return too_short(seconds, frames, rate)
