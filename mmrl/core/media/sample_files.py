"""Writes a sample to a file of its kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mmrl.core.media.movies import frame_rate, write_mp4
from mmrl.core.media.sound import SoundVideos, write_wav


def write_sample(item: Any, path: Path, fps: float = 16.0, animated: bool = False) -> Path:
    """Write an image [3, H, W] as PNG; a video [F, 3, H, W] as .mp4 (H.264, yuv420p) of ``fps``
    frames a second with its sound, also as .wav; ``animated``: as animated PNG; anything else as
    text."""
    if not isinstance(item, torch.Tensor) or item.ndim < 3:
        path = path.with_suffix(".txt")
        path.write_text(item if isinstance(item, str) else json.dumps(item.tolist()))
        return path
    frames = (item if item.ndim == 4 else item[None]).float().cpu()
    pixels = (frames * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1)
    if isinstance(item, SoundVideos):
        sound, rate = item.sound, item.sampling_rate
        write_wav(path.with_suffix(".wav"), sound, rate)
        per_second = frame_rate(len(pixels), sound.shape[-1], rate)
        movie = write_mp4(path.with_suffix(".mp4"), pixels, per_second, sound, rate)
        return _animation(pixels, path, float(per_second)) if animated else movie
    if item.ndim == 4 and len(item) > 1 and not animated:
        return write_mp4(path.with_suffix(".mp4"), pixels, fps)
    return _animation(pixels, path, fps)


def _animation(pixels: torch.Tensor, path: Path, fps: float) -> Path:
    """Write pixels [F, H, W, 3] as PNG, animated if there are several frames."""
    from PIL import Image

    first, *later_frames = [Image.fromarray(frame) for frame in pixels.numpy()]
    options: dict[str, Any] = {
        "append_images": later_frames,
        "duration": round(1000 / fps),
        "loop": 0,
    }
    first.save(path.with_suffix(".png"), save_all=bool(later_frames), **options)
    return path.with_suffix(".png")
