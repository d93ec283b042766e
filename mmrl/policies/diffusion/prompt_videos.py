"""Reads the videos of prompts for pipelines that change a video."""

from __future__ import annotations

from typing import Any

from mmrl.core.types import Prompt
from mmrl.policies.vlm.media import clip_at_rate

VIDEOS = ("video",)  # arguments of pipeline calls
CHANGERS = ("VideoToVideo", "LucyEdit")  # pipelines that need one


def frames_of(source: Any, prompt: Prompt, count: int, rate: float) -> list[Any]:
    """Open a video, a file or frames, as its first ``count`` frames at ``rate`` per second.
    UserError names a prompt whose video cannot be read or is too short."""
    from PIL import Image

    return [Image.fromarray(frame) for frame in clip_at_rate(source, prompt, count, rate)]
