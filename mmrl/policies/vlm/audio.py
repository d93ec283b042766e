"""Loads a prompt's audio as a processor takes it: mono, at the model's sampling rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from mmrl.policies.vlm.families import Family
from mmrl.policies.vlm.media import where

EXTRACTORS = ("feature_extractor", "audio_processor")  # processors' attributes for audio


def audios_of(prompt: Prompt) -> list[Any]:
    """Return a prompt's sounds, unopened; ``audio`` and ``audios`` mean the same."""
    audio = prompt.get("audio")
    if audio is None:
        audio = prompt.get("audios")
    if audio is None:
        return []
    return list(audio) if isinstance(audio, (list, tuple)) else [audio]


def rate_of(processor: Any, family: Family, prompt: Prompt) -> int:
    """Return the model's sampling rate in Hz. UserError for a model without audio input, or with
    one that was never tried."""
    extractor = next((e for n in EXTRACTORS if (e := getattr(processor, n, None))), None)
    if extractor is None or not family.hears:
        raise UserError(
            f"{where(prompt)}: {family.name} is given no audio here, which is for Qwen3-Omni's "
            f"thinker and Phi-4 multimodal; leave it out"
        )
    rate: int = extractor.sampling_rate
    return rate


def open_audio(source: Any, rate: int, prompt: Prompt) -> np.ndarray:
    """Open audio, a file or the samples themselves, as float32 [T] at ``rate`` Hz. A dictionary has
    the keys of Hugging Face datasets, ``array`` and ``sampling_rate``. Raises UserError naming the
    prompt."""
    if isinstance(source, dict) and "array" in source:
        given_rate = source.get("sampling_rate", rate)
        if given_rate != rate:
            raise UserError(
                f"{where(prompt)}: its audio has {given_rate} numbers a second, and the model "
                f"hears {rate}; give the file, which is converted, or cast the column to {rate}"
            )
        source = source["array"]
    if isinstance(source, dict):
        source = source.get("path")
    if not isinstance(source, (str, Path)):
        sound = np.asarray(source, dtype=np.float32)
        if sound.ndim != 1 or not len(sound):
            raise UserError(
                f"{where(prompt)}: its audio has the shape {sound.shape}; it must be one channel"
            )
        return sound
    return _decoded(source, rate, prompt)


def with_audio_mask(encoded: dict[str, Any]) -> dict[str, Any]:
    """Add a prompt's audio mask where the processor omits it since all sounds have one length:
    those of a batch may differ (Phi-4 multimodal)."""
    features = encoded.get("audio_input_features")
    if features is None or "audio_attention_mask" in encoded:
        return encoded
    return encoded | {"audio_attention_mask": torch.ones(features.shape[:2], dtype=torch.bool)}


def _decoded(source: str | Path, rate: int, prompt: Prompt) -> np.ndarray:
    import av

    parts = []
    try:
        with av.open(str(source)) as container:
            convert = av.AudioResampler(format="fltp", rate=rate)
            for packet in [*container.decode(audio=0), None]:
                parts += [frame.to_ndarray() for frame in convert.resample(packet)]
    except (OSError, IndexError, ValueError, av.FFmpegError) as error:
        raise UserError(
            f"{where(prompt)}: no sound can be decoded of {str(source)!r}: {error}"
        ) from error
    if not sum(part.shape[1] for part in parts):
        raise UserError(f"{where(prompt)}: the audio {str(source)!r} is empty")
    # the mean of the channels: FFmpeg's downmix would be louder
    mean: np.ndarray = np.concatenate(parts, 1).mean(0).astype(np.float32)
    return mean
