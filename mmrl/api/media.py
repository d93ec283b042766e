"""Converts samples to what Python programs and notebooks show: PIL images, videos, texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmrl.core.media.movies import frame_rate, write_mp4
from mmrl.core.media.sound import SoundVideos, write_wav
from mmrl.core.types import Media, Prompt
from mmrl.monitoring.report.pictures import PACE, Film, data_uri

MOST_SHOWN = 64  # samples that a notebook draws
SIDE = 128  # pixels of a picture that a notebook draws


class Video(list[Image.Image]):
    """Holds the frames of a video, PIL images of one size; a notebook plays it. ``sound``:
    [channels, samples] in -1..1 and the sampling rate, if it has sound. ``pace``: milliseconds per
    frame."""

    def __init__(
        self,
        frames: Iterable[Image.Image] = (),
        sound: tuple[Tensor, int] | None = None,
        pace: float = PACE,
    ):
        super().__init__(frames)
        self.sound = sound
        self.pace = pace

    def save(self, path: str | Path, milliseconds: float | None = None) -> None:
        """Write it as an animated .png, .webp or .gif, looping at ``pace``, with its sound as .wav;
        or as an .mp4 with both, of the duration of the sound."""
        milliseconds = milliseconds or self.pace
        if Path(path).suffix == ".mp4":
            return self._save_mp4(Path(path), milliseconds)
        first, *later_frames = self
        first.save(
            path, save_all=True, append_images=later_frames, duration=round(milliseconds), loop=0
        )
        if self.sound is not None:
            write_wav(Path(path).with_suffix(".wav"), *self.sound)

    def _save_mp4(self, path: Path, milliseconds: float) -> None:
        frames = torch.stack([torch.from_numpy(np.array(frame.convert("RGB"))) for frame in self])
        if self.sound is None:
            write_mp4(path, frames, 1000 / Fraction(milliseconds).limit_denominator(1000))
            return
        sound, rate = self.sound
        write_mp4(path, frames, frame_rate(len(self), sound.shape[-1], rate), sound, rate)

    def _repr_html_(self) -> str:
        return _picture(self)


Sample = Image.Image | Video | str


class Samples(list[Any]):
    """Holds samples: PIL images, ``Video``s or texts, each for the prompt at the same index of
    ``prompts``; ``rewards``: name -> a number for each, if scored. Shown as a gallery in notebooks.
    """

    def __init__(
        self,
        items: Iterable[Sample],
        prompts: Sequence[Prompt] = (),
        rewards: Mapping[str, Sequence[float]] = {},
    ):
        super().__init__(items)
        self.prompts = list(prompts)
        self.rewards = {name: list(values) for name, values in rewards.items()}

    def save(self, folder: str | Path) -> list[Path]:
        """Write every sample into a folder: pictures as .png, videos as .mp4, texts as .txt.
        Returns the paths."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        paths = []
        for number, item in enumerate(self):
            ending = "mp4" if isinstance(item, Video) and len(item) > 1 else "png"
            path = place / f"{number:03d}.{'txt' if isinstance(item, str) else ending}"
            if isinstance(item, str):
                path.write_text(item, encoding="utf-8")
            else:
                item.save(path)
            paths.append(path)
        return paths

    def _repr_html_(self) -> str:
        cells = [self._figure(place) for place in range(min(len(self), MOST_SHOWN))]
        hidden = len(self) - MOST_SHOWN
        below = f"<p>and {hidden} more</p>" if hidden > 0 else ""
        style = "display:flex;flex-wrap:wrap;gap:10px"
        return f'<div style="{style}">{"".join(cells)}</div>{below}'

    def _figure(self, place: int) -> str:
        item = self[place]
        text = str(self.prompts[place].get("text", "")) if place < len(self.prompts) else ""
        numbers = [f"{name} {values[place]:.3g}" for name, values in self.rewards.items()]
        caption = "<br>".join(escape(line) for line in [text, *numbers] if line)
        drawn = _text(item) if isinstance(item, str) else _picture(item)
        return (
            f'<figure style="margin:0;max-width:{3 * SIDE}px;font:13px sans-serif">{drawn}'
            f'<figcaption style="max-width:{2 * SIDE}px">{caption}</figcaption></figure>'
        )


def _text(text: str) -> str:
    return f'<pre style="white-space:pre-wrap;margin:0">{escape(text)}</pre>'


def _picture(item: Image.Image | Video) -> str:
    first = item[0] if isinstance(item, Video) else item
    style = f"width:{SIDE}px"
    if first.width <= SIDE:  # upscale small pictures without smoothing
        style += ";image-rendering:pixelated"
    if isinstance(item, Video) and len(item) > 1:
        source = data_uri(Film(tuple(item), item.pace))
        return f'<video src="{source}" style="{style}" muted autoplay loop playsinline></video>'
    return f'<img src="{data_uri(first)}" style="{style}">'


def shown(media: Media, fps: float = 1000 / PACE) -> list[Sample]:
    """Convert images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1, of ``fps`` frames a second, to
    PIL images or ``Video``s; texts are unchanged, and other tensors become their numbers as text.
    """
    return [shown_sample(item, fps) for item in media]


def shown_sample(item: Any, fps: float = 1000 / PACE) -> Sample:
    """Convert one image [3, H, W], one video [F, 3, H, W] or one text for display."""
    if not isinstance(item, Tensor):
        return item if isinstance(item, (str, Image.Image)) else str(item)
    if item.ndim == 4:
        sound = (item.sound, item.sampling_rate) if isinstance(item, SoundVideos) else None
        return Video((_image(frame) for frame in item), sound, 1000 / fps)
    return _image(item) if item.ndim == 3 else str(item.tolist())


def _image(pixels: Tensor) -> Image.Image:
    values = (pixels.detach().float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    array = values.cpu().permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array if array.shape[2] == 3 else array[..., 0])
