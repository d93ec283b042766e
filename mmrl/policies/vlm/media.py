"""Loads a prompt's images and videos as a processor takes them: resized to the budget, with their
original sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt

from mmrl.core.errors import UserError
from mmrl.core.media.clips import ClipError, Timeline, open_clip
from mmrl.core.media.pictures import PictureError, rgb_picture
from mmrl.core.types import Prompt
from samplers.noise import Rng

TICKS = 1000.0  # per second; timestamps of variable-rate clips are rounded to these
Positive = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class Budgets:
    """Limits the cost of a prompt. What is scaled down or dropped is named when the run starts.

    ``max_pixels``: of an image; larger ones are scaled down. ``frames``: most frames of a video,
    taken evenly. ``fps``: frames taken a second. ``frame_pixels``: of a frame. ``image_tokens``: of
    the images and videos of a prompt together. ``prompt_tokens``: of a whole prompt. ``overlong``:
    images of longer prompts are scaled down until they fit (``resize``; dropped if that does not
    help), such prompts are dropped, or the run stops."""

    max_pixels: Positive | None = None
    frames: Positive = 32
    fps: Annotated[float, Gt(0)] = 2.0
    frame_pixels: Positive | None = None
    image_tokens: Positive | None = None
    prompt_tokens: Positive | None = None
    overlong: Literal["resize", "drop", "error"] = "resize"


@dataclass(frozen=True)
class Video:
    """Holds ``frames`` uint8 [F, H, W, 3], frames ``indices`` of ``total`` at ``fps``; with a
    variable rate, in ticks of ``TICKS`` per second. ``duration``: seconds until the last frame of
    the clip ends."""

    frames: np.ndarray
    indices: list[int]
    total: int
    fps: float
    size: tuple[int, int]  # W, H of the file
    duration: float

    def metadata(self) -> dict[str, Any]:
        """Return the metadata that transformers' video processors take."""
        return {
            "total_num_frames": self.total,
            "fps": self.fps,
            "frames_indices": list(self.indices),
            "duration": self.duration,
            "width": self.frames.shape[2],
            "height": self.frames.shape[1],
        }


def where(prompt: Prompt) -> str:
    """Return a prompt's name in messages: its file and line, or the start of its text."""
    return prompt.get("origin") or repr(str(prompt.get("text") or prompt.get("messages", ""))[:60])


def images_of(prompt: Prompt) -> list[Any]:
    """Return a prompt's images, unopened; ``image`` and ``images`` mean the same."""
    images = prompt.get("images")
    if images is None:
        images = prompt.get("image")
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]


def open_image(source: Any, prompt: Prompt, max_pixels: int | None = None) -> Any:
    """Open an image as PIL in RGB, upright (``mmrl.core.media.pictures``), of which the caller uses
    ``max_pixels``. Raises UserError naming the prompt."""
    try:
        return rgb_picture(source, max_pixels)
    except PictureError as error:
        raise UserError(
            f"{where(prompt)}: cannot read the image {source!r:.80}: {error}"
        ) from error


def noisy(pixels: np.ndarray, prompt: Prompt, name: str) -> np.ndarray:
    """Add the noise that a prompt asks for (data ``difficulty``) to pixels uint8; ``name``: of the
    image in the prompt."""
    noise = prompt.get("pixel_noise")
    if noise is None:
        return pixels
    key = np.array(Rng.of("pixels", noise["key"], name).key, dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    drawn = generator.standard_normal(pixels.shape, dtype=np.float32)
    shown: np.ndarray = (pixels + 255 * noise["std"] * drawn).round().clip(0, 255).astype(np.uint8)
    return shown


def shown_video(video: Video, prompt: Prompt, name: str) -> Video:
    """Return a video as the model sees it, with the noise and the frame order that the prompt asks
    for (stage ``temporal_contrast``); ``name``: of the video in the prompt."""
    frames = noisy(video.frames, prompt, name)
    if (key := prompt.get("frame_order")) is not None:
        frames = frames[Rng.of("frames", key, name).permutation(len(frames)).numpy()]
    return replace(video, frames=frames)


def shown_image(source: Any, prompt: Prompt, number: int = 0, max_pixels: int | None = None) -> Any:
    """Open image ``number`` of a prompt as the model, which uses ``max_pixels`` of it, sees it."""
    from PIL import Image

    image = open_image(source, prompt, max_pixels)
    if "pixel_noise" not in prompt:
        return image
    shown = Image.fromarray(noisy(np.array(image), prompt, f"image {number}"))
    shown.info |= image.info
    return shown


def fitted(image: Any, max_pixels: int | None) -> Any:
    """Downscale an image to at most that many pixels, keeping its aspect ratio."""
    width, height = image.size
    if max_pixels is None or width * height <= max_pixels:
        return image
    scale = math.sqrt(max_pixels / (width * height))
    return image.resize((max(1, math.floor(width * scale)), max(1, math.floor(height * scale))))


def image_at(image: Any, scale: float, budgets: Budgets) -> Any:
    """Downscale an image to the budget's ``max_pixels``, then to ``scale`` times these pixels."""
    image = fitted(image, budgets.max_pixels)
    return (
        image if scale == 1 else fitted(image, max(1, int(image.size[0] * image.size[1] * scale)))
    )


def video_at(video: Video, scale: float) -> Video:
    """Downscale a video to ``scale`` times the pixels of each frame."""
    if scale == 1:
        return video
    height, width = video.frames.shape[1:3]
    return replace(video, frames=_frames_at(video.frames, max(1, int(height * width * scale))))


def open_video(source: Any, fps: float | None, budgets: Budgets, prompt: Prompt) -> Video:
    """Open a video file, or frames at ``fps`` (``mmrl.core.media.clips``), within the budget.
    Raises UserError naming the prompt."""
    try:
        clip = open_clip(source, fps)
        numbers = sampled(clip.timeline, budgets)
        frames = clip.read(numbers)
    except ClipError as error:
        raise unreadable(source, prompt, error) from error
    return _video(frames, clip.timeline, numbers, budgets)


def clip_at_rate(source: Any, prompt: Prompt, count: int | None, rate: float) -> np.ndarray:
    """Open the first ``count`` frames of a clip (None: all) at ``rate`` a second, by time, uint8
    [F, H, W, 3]. Frames have the prompt's rate ``fps``. Raises UserError."""
    try:
        clip = open_clip(source, prompt.get("fps"))
        return clip.read(clip.timeline.at_rate(count, rate))
    except ClipError as error:
        raise unreadable(source, prompt, error) from error


def unreadable(source: Any, prompt: Prompt, error: ClipError) -> UserError:
    """Return the UserError for a clip of a prompt that cannot be read."""
    name = f" {str(source)!r}" if isinstance(source, (str, Path)) else ""
    return UserError(f"{where(prompt)}: cannot read the video{name}: {error}")


def sampled(timeline: Timeline, budgets: Budgets) -> list[int]:
    """Choose the indices of a clip's frames: at the budget's rate, at most its number of frames,
    evenly spaced in time."""
    needed = math.ceil(timeline.length * budgets.fps - 1e-9)
    return timeline.spread(min(budgets.frames, max(1, needed), len(timeline.times)))


def _video(
    frames: np.ndarray, timeline: Timeline, numbers: Sequence[int], budgets: Budgets
) -> Video:
    first, rate = timeline.times[0], timeline.rate
    if rate is None or abs(first * rate - round(first * rate)) > 0.01:
        rate = TICKS  # processors compute times only as index / rate
    indices = [round(timeline.times[number] * rate) for number in numbers]
    size = (frames.shape[2], frames.shape[1])
    total = max(1, round(timeline.length * rate))
    frames = _frames_at(frames, budgets.frame_pixels)
    return Video(frames, indices, total, rate, size, timeline.duration)


def _frames_at(frames: np.ndarray, most: int | None) -> np.ndarray:
    from PIL import Image

    if most is None or frames.shape[1] * frames.shape[2] <= most:
        return frames
    return np.stack([np.asarray(fitted(Image.fromarray(frame), most)) for frame in frames])
