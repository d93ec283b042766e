"""Encodes the sound of videos for a reward server and back: a safetensors file, and its rate."""

from __future__ import annotations

import base64
from typing import Any

from torch import Tensor

from mmrl.core.media.sound import SoundVideos, with_sound

CHANNELS = 16
FASTEST = 768_000  # samples a second


def sound_fields(media: Any) -> dict[str, Any]:
    """Return a request's fields for the sound of videos; empty for media without sound."""
    if not isinstance(media, SoundVideos):
        return {}
    from safetensors.torch import save

    content = save({"sound": media.sound.detach().float().cpu().contiguous()})
    return {
        "sound": base64.b64encode(content).decode(),
        "sampling_rate": media.sampling_rate,
    }


def sounded(media: Tensor | list[str], content: Any, rate: Any, most: float) -> Any:
    """Attach the received sound to videos [B, F, 3, H, W], of at most ``most`` numbers.

    Raises:
        ValueError: it is malformed, or does not match the videos.
    """
    if not isinstance(media, Tensor) or media.ndim != 5:
        raise ValueError("belongs to videos")
    if not isinstance(content, bytes):
        raise ValueError("expected the bytes of a safetensors file")
    if type(rate) is not int or not 1 <= rate <= FASTEST:
        raise ValueError(f"sampling_rate: expected a whole number from 1 to {FASTEST}")
    sound = _read(content)
    shape = list(sound.shape)
    if sound.ndim != 3 or not sound.is_floating_point() or not sound.numel():
        raise ValueError(f"expected floats [B, channels, samples], got {sound.dtype} {shape}")
    if len(sound) != len(media) or sound.shape[1] > CHANNELS or sound.numel() > most:
        raise ValueError(
            f"{shape} is not the sound of {len(media)} videos, of at most {CHANNELS} channels and "
            f"{most:.0f} numbers"
        )
    return with_sound(media, sound.float(), rate)


def _read(content: bytes) -> Tensor:
    from safetensors.torch import load

    try:
        sound: Tensor = load(content)["sound"]
    except Exception as error:  # whatever a decoder raises on untrusted bytes
        kind = type(error).__name__
        raise ValueError(
            f"is not a safetensors file with a tensor called sound ({kind})"
        ) from error
    return sound
