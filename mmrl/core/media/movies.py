"""Writes videos with sound as .mp4 files that any player plays."""

from __future__ import annotations

from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

BETTER = ("libx264", {"crf": "18", "preset": "medium"})  # H.264, if FFmpeg has its encoder
ANYWHERE = ("mpeg4", {"qscale": "2"})
FINEST = 90_000  # maximum denominator of a frame rate
AAC_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)


def write_mp4(
    path: Path,
    frames: Tensor,
    fps: float | Fraction,
    sound: Tensor | None = None,
    sampling_rate: int = 0,
) -> Path:
    """Write frames [F, H, W, 3] of 8 bits as MPEG-4, the sound [channels, samples] in -1..1 as AAC.

    Both are lossy. An odd side is padded by a pixel, and more than two channels are mixed to two.
    """
    # faststart: the index in front lets a browser begin early
    options = {"movflags": "+faststart"}
    _write(str(path), frames.cpu().numpy(), fps, options, sound, sampling_rate)
    return path


def mp4_bytes(frames: np.ndarray, fps: float | Fraction) -> bytes:
    """Return the .mp4 file of frames uint8 [F, H, W, 3] without sound (``write_mp4``)."""
    buffer = BytesIO()
    _write(buffer, frames, fps, {})
    return buffer.getvalue()


def _write(
    place: Any,
    frames: np.ndarray,
    fps: float | Fraction,
    options: dict[str, str],
    sound: Tensor | None = None,
    sampling_rate: int = 0,
) -> None:
    import av

    pixels = _even(frames)
    rate = Fraction(fps).limit_denominator(FINEST)
    codec, settings = BETTER if BETTER[0] in av.codecs_available else ANYWHERE
    with av.open(place, "w", format="mp4", options=options) as file:
        picture: Any = file.add_stream(codec, rate=rate, options=settings)
        picture.height, picture.width = pixels.shape[1:3]
        picture.pix_fmt = "yuv420p"
        heard = _sound_stream(file, sound, sampling_rate)
        for frame in pixels:
            file.mux(picture.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(picture.encode(None))
        if heard is not None and sound is not None:
            _encode_sound(file, heard, sound, sampling_rate)


def frame_rate(frames: int, samples: int, sampling_rate: int) -> Fraction:
    """Return the frames a second of a video from the length of its sound."""
    return Fraction(frames * sampling_rate, samples)


def _even(pixels: Any) -> Any:
    odd = [(0, 0), *((0, size % 2) for size in pixels.shape[1:3]), (0, 0)]
    return np.ascontiguousarray(np.pad(pixels, odd, mode="edge"))


def _sound_stream(file: Any, sound: Tensor | None, sampling_rate: int) -> Any:
    if sound is None:
        return None
    rate = next((rate for rate in AAC_RATES if rate >= sampling_rate), AAC_RATES[-1])
    return file.add_stream("aac", rate=rate, layout="mono" if len(sound) == 1 else "stereo")


def _encode_sound(file: Any, stream: Any, sound: Tensor, sampling_rate: int) -> None:
    import av
    import torch

    samples = sound.detach().float().cpu().nan_to_num(0.0).clamp(-1, 1)
    if len(samples) > 2:
        samples = torch.stack([samples[0::2].mean(0), samples[1::2].mean(0)])
    layout = "mono" if len(samples) == 1 else "stereo"
    frame = av.AudioFrame.from_ndarray(samples.contiguous().numpy(), format="fltp", layout=layout)
    frame.sample_rate = sampling_rate
    convert = av.AudioResampler(
        format="fltp", layout=layout, rate=stream.rate, frame_size=stream.frame_size or 1024
    )
    for part in [*convert.resample(frame), *convert.resample(None)]:
        file.mux(stream.encode(part))
    file.mux(stream.encode(None))
