"""Attaches sound to videos, from the policy to rewards and files.

Videos with sound are an ordinary tensor, [B, F, 3, H, W] in 0..1, for code that does not need the
sound: indexing rows, concatenating, moving and converting keep it, any other result has none.
"""

from __future__ import annotations

import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError

WHOLE = 32767  # maximum of 16 bits


class SoundVideos(Tensor):
    """Holds videos [B, F, 3, H, W], or one [F, 3, H, W], with ``sound`` in -1..1, [B, channels,
    samples] or [channels, samples], of ``sampling_rate`` samples a second."""

    sound: Tensor
    sampling_rate: int

    def __iter__(self) -> Iterator[Tensor]:
        return (self[row] for row in range(len(self)))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
            if func in JOINING:
                return _joined(output, *args, **(kwargs or {}))
            videos = args[0] if args and isinstance(args[0], SoundVideos) else None
            if videos is None or isinstance(output, SoundVideos) or not isinstance(output, Tensor):
                return output
            if func is Tensor.__getitem__:
                rows = args[1][0] if isinstance(args[1], tuple) and len(args[1]) == 1 else args[1]
                whole = videos.ndim == 5 and not isinstance(rows, tuple) and rows is not None
                return with_sound(output, videos.sound[rows], videos) if whole else output
            if func in CONVERTING:
                return with_sound(output, CONVERTING[func](videos.sound, output), videos)
            return output


def with_sound(videos: Tensor, sound: Tensor, rate: int | SoundVideos) -> SoundVideos:
    """Attach sound to videos, with the sampling rate ``rate`` or that of other videos."""
    carrier: SoundVideos = videos.as_subclass(SoundVideos)
    carrier.sound = sound
    carrier.sampling_rate = rate.sampling_rate if isinstance(rate, SoundVideos) else int(rate)
    return carrier


def sound_of(media: Any, reward: str) -> tuple[Tensor, int]:
    """Return the sound [B, channels, samples] of videos and its sampling rate. UserError if they
    have none, naming the reward that needs it."""
    if isinstance(media, SoundVideos):
        return media.sound, media.sampling_rate
    raise UserError(
        f"reward {reward!r} wants videos with their sound, and these samples have none: it is for "
        "policies whose pipeline makes both, such as pipeline with LTX2Pipeline"
    )


def sound_kind(videos: Any) -> tuple[Any, ...]:
    """Return what sounds must share to be joined: rate, channels and length; () without sound."""
    if not isinstance(videos, SoundVideos):
        return ()
    return videos.sampling_rate, videos.sound.shape[1:]


def write_wav(path: Path, sound: Tensor, sampling_rate: int) -> Path:
    """Write a sound [channels, samples] in -1..1 as 16-bit PCM; louder values are clipped."""
    samples = (sound.detach().float().cpu().nan_to_num(0.0).clamp(-1, 1) * WHOLE).round()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(sound))
        file.setsampwidth(2)
        file.setframerate(sampling_rate)
        file.writeframes(samples.to(torch.int16).T.contiguous().numpy().astype("<i2").tobytes())
    return path


def _moved(sound: Tensor, output: Tensor) -> Tensor:
    return sound.to(output.device)


def _joined(output: Tensor, parts: Any, dim: int = 0, **_: Any) -> Tensor:
    """Join the sounds of joined videos, if all have one of the same kind."""
    if dim != 0 or not all(isinstance(part, SoundVideos) for part in parts):
        return output
    if len(set(map(sound_kind, parts))) > 1:
        return output
    return with_sound(output, torch.cat([part.sound for part in parts]), parts[0])


JOINING = (torch.cat, torch.concat)
# functions that keep the videos -> what happens to their sound
CONVERTING: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(
        (
            Tensor.to,
            Tensor.cpu,
            Tensor.cuda,
            Tensor.float,
            Tensor.half,
            Tensor.bfloat16,
            Tensor.double,
            Tensor.contiguous,
            Tensor.clamp,
        ),
        _moved,
    ),
    Tensor.detach: lambda sound, _: sound.detach(),
    Tensor.clone: lambda sound, _: sound.clone(),
}
