"""Opens pictures and videos that the data name as answers, and says what is wrong with a file."""

from __future__ import annotations

from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl.core.types import Prompt
from mmrl.policies.capabilities import Medium
from mmrl.policies.vlm.media import Budgets, open_image, open_video


def opened(value: Any, medium: Medium | None, frames: int | None, prompt: Prompt) -> Tensor:
    """Open a picture [3, H, W] or a video [F, 3, H, W] in 0..1: a file, what PIL or numpy hold, or
    the tensor itself. Where the medium is not known, numbers are the sample itself."""
    if isinstance(value, Tensor):
        return value
    if medium == "video":
        budgets = Budgets(frames=frames or 10**6, fps=1e6)
        taken = open_video(value, None, budgets, prompt).frames
        return torch.from_numpy(taken.copy()).permute(0, 3, 1, 2).float() / 255
    if medium is None and not isinstance(value, (str, Path)) and not hasattr(value, "convert"):
        return torch.tensor(value)
    pixels = np.array(open_image(value, prompt))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def media_problem(value: Any, medium: Medium | None) -> str | None:
    """Say what is wrong with the picture or video of an answer, by the head of its file."""
    if not isinstance(value, (str, Path)):
        return None
    if not isfile(value):
        return f"no file {value}; paths start at {Path.cwd()}, those of data: captions at its file"
    if medium == "video":
        return None if _is_video(Path(value)) else f"{value} is no video that can be read"
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(value):
            return None
    except (OSError, UnidentifiedImageError) as error:
        return f"{value} is no picture: {error}; give a PNG, JPEG or WebP"


def _is_video(path: Path) -> bool:
    import av

    try:
        with av.open(str(path)) as container:
            return bool(container.streams.video)
    except (OSError, ValueError):
        return False
