"""Scores the synchrony of sound and motion: AV-Align (Yariv et al. 2023, arXiv:2309.16429)."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt
from numpy import ndarray
from torch import Tensor

from mmrl.core.media.sound import sound_of
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.base.media import frames
from rewards.card import card
from rewards.videos.motion import SOURCE, Flow, MotionReward

LEAST = 3  # frames: a peak of motion has a neighbour on either side
# of librosa's onset detection, seconds: the maximum within PAST, DELTA above the mean within
# AROUND, at least PAUSE after the last one
FRAME = 0.093  # of the short-time spectrum
HOP = 0.0232
PAST = 0.03
AROUND = 0.1
PAUSE = 0.03
DELTA = 0.07  # of the strongest onset
MELS = 40


@card(
    media="video",
    low=0,
    high=1,
    sound=True,
    source=f"AV-Align, arXiv:2309.16429; flow: {SOURCE}",
    licence="Apache-2.0 (OpenCV), BSD-3-Clause (torchvision)",
    scaling="peaks of sound and motion that coincide, by all there are",
)
@REWARDS.register("av_align")
class AVAlign(MotionReward):
    """Score how many onsets of the sound coincide with peaks of motion.

    Onsets are peaks of the rise of the sound's mel spectrum, as librosa picks them; peaks of motion
    are those of the mean length of the optical flow. An onset and a peak at most ``window`` frames
    apart are one event, no event counts twice, and the score is intersection over union. 0 if there
    are none: a silent or a still video earns nothing.

    Args:
        window: maximum distance in frames.
        least_motion: flow, in shares of the shorter side, below which nothing has moved.
        flow: ``dis``, or RAFT small or large.
        weights: RAFT's file, as torchvision publishes it, or ``hub id/file``.
        batch_size: pairs of frames in one forward pass of RAFT.
        device: for RAFT; ``auto`` is CUDA if there is one.

    Raises:
        UserError: videos without sound, or of fewer than three frames.
    """

    def __init__(
        self,
        window: Annotated[float, Gt(0)] = 1.0,
        least_motion: Annotated[float, Ge(0)] = 1e-3,
        flow: Flow = "dis",
        weights: str | None = None,
        batch_size: Annotated[int, Ge(1)] = 8,
        device: str = "auto",
    ):
        super().__init__(flow, weights, batch_size, device)
        self.window = window
        self.least_motion = least_motion

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: list[Prompt]) -> Tensor:
        """Score videos [B, F, 3, H, W] with their sound -> [B] float32 on the CPU; NaN for one with
        a number that is not finite."""
        frames(media, "av_align")
        sound, rate = sound_of(media, "av_align")
        flows, broken = self.flows(media, "av_align", LEAST)
        waves = sound.detach().double().cpu().mean(1)
        broken |= ~waves.isfinite().all(1)
        frame = waves.shape[1] / rate / media.shape[1]  # seconds
        lengths = flows.norm(dim=2).flatten(2).mean(2).numpy()  # [B, F - 1]
        scores = [
            overlap(onsets(wave, rate), frame * self.motions(row), self.window * frame)
            for wave, row in zip(waves.nan_to_num(0.0, 0.0, 0.0).numpy(), lengths, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float32).masked_fill(broken, torch.nan)

    def motions(self, lengths: ndarray) -> ndarray:
        """Find the frames at peaks of motion; the first of equal neighbours."""
        inner = lengths[1:-1]
        peaks = (inner > lengths[:-2]) & (inner >= lengths[2:]) & (inner > self.least_motion)
        return np.flatnonzero(peaks) + 2  # the flow at place i leads to frame i + 1


def onsets(wave: ndarray, rate: int) -> ndarray:
    """Find the onsets, in seconds, of a sound [samples] of this rate."""
    hop = max(1, round(HOP * rate))
    rise = onset_strength(wave, rate, hop)
    if not rise.max() > 0:
        return np.zeros(0)
    rise = rise / rise.max()
    past, around, pause = (max(1, round(span * rate / hop)) for span in (PAST, AROUND, PAUSE))
    places: list[int] = []
    for place, value in enumerate(rise):
        near = rise[max(0, place - past) : place + past + 1]
        mean = rise[max(0, place - around) : place + around + 1].mean()
        rested = not places or place - places[-1] > pause
        if value == near.max() and value >= mean + DELTA and rested:
            places.append(place)
    return np.array(places) * hop / rate


def onset_strength(wave: ndarray, rate: int, hop: int) -> ndarray:
    """Return the rise of the mel bands since the previous hop, in decibels, mean over the bands, [1
    + samples // hop]."""
    from transformers.audio_utils import mel_filter_bank, power_to_db, spectrogram, window_function

    length = max(16, 2 ** round(np.log2(FRAME * rate)))
    bands: Any = mel_filter_bank(
        length // 2 + 1, MELS, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney"
    )
    power = spectrogram(
        np.pad(wave, (length // 2, length // 2)),
        window_function(length, "hann"),
        length,
        hop,
        power=2.0,
        center=False,
        mel_filters=bands,
    )
    loudness = power_to_db(power, reference=max(power.max(), 1e-10), db_range=80.0)
    rise: ndarray = np.diff(loudness, axis=1, prepend=loudness[:, :1]).clip(min=0.0).mean(0)
    return rise


def overlap(sounds: ndarray, motions: ndarray, window: float) -> float:
    """Divide the pairs of times at most ``window`` apart by all events; both inputs are sorted, and
    each time is in at most one pair."""
    events = first = 0
    for time in sounds:
        while first < len(motions) and motions[first] < time - window:
            first += 1
        if first < len(motions) and motions[first] <= time + window:
            events += 1
            first += 1
    together = len(sounds) + len(motions) - events
    return events / together if together else 0.0
