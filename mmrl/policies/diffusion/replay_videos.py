"""Reads the videos of prompts for pipelines that change a video."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from mmrl.policies.vlm.media import Budgets, open_video, where

VIDEOS = ("video",)  # arguments of calls
CHANGERS = ("VideoToVideo", "LucyEdit")  # pipelines that need one
FASTEST = 1e6  # frames a second: no frame is left out for its time


def frames_of(source: Any, prompt: Prompt, count: int) -> list[Any]:
    """Open a video, a file or frames (PIL, or uint8 [F, H, W, 3]), as ``count`` pictures, evenly
    spread over it. UserError names a prompt whose video cannot be read or is too short."""
    from PIL import Image

    if isinstance(source, (list, tuple)):
        source = [np.asarray(frame) for frame in source]
    try:
        video = open_video(source, None, Budgets(frames=count, fps=FASTEST), prompt)
    except UserError as error:
        raise UserError(f"{error}; give the path of a video file, or a list of frames") from error
    if len(video.frames) != count:
        raise UserError(
            f"{where(prompt)}: a video of {len(video.frames)} frames, and policy option "
            f"video_frames asks for {count}; leave the prompt out, or ask for fewer"
        )
    return [Image.fromarray(frame) for frame in video.frames]
