"""Reads the sound of videos for rewards: mono, at a model's sampling rate."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from mmrl.core.media.sound import sound_of


def waves_of(media: Tensor, reward: str) -> tuple[Tensor, int, Tensor]:
    """Average the channels of videos' sound: waves [B, samples] float64 on the CPU with 0 for
    non-finite values, samples a second, and [B] bool whether there was such a value. UserError,
    naming ``reward``, if the videos have no sound."""
    sound, rate = sound_of(media, reward)
    waves = sound.detach().double().cpu().mean(1)
    return waves.nan_to_num(0.0, 0.0, 0.0), rate, ~waves.isfinite().all(1)


def resampled(waves: Tensor, rate: int, target: int) -> Tensor:
    """Resample waves [B, samples] float64 to another rate."""
    from scipy.signal import resample_poly

    if rate == target:
        return waves
    step = gcd(rate, target)
    return torch.from_numpy(resample_poly(waves.numpy(), target // step, rate // step, axis=1))
