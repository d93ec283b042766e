"""The reward ``av_align``: flashes of motion and clicks, together, apart, and none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.media.sound import with_sound
from mmrl.core.registry import REWARDS, load_built_in
from rewards.card import card_of
from rewards.videos.av_align import onsets, overlap
from samplers.noise import Rng

pytest.importorskip("cv2", reason="OpenCV is not installed")
load_built_in()
RATE, FPS, FRAMES, SIDE = 8000, 10, 30, 32
MOVED = (6, 14, 22)  # frames that a jump leads to


def jumping(*moves):
    """A video [F, 3, H, W] whose picture jumps two pixels on the way to these frames."""
    u = Rng.of("texture").uniform(torch.zeros(1), (3 * 16 * 16,)).view(1, 3, 16, 16)
    picture = torch.nn.functional.interpolate(u.float(), size=(SIDE, SIDE), mode="bicubic")[0]
    shifts = [2 * sum(frame >= move for move in moves) for frame in range(FRAMES)]
    return torch.stack([picture.clamp(0, 1).roll(shift, -1) for shift in shifts])


def clicking(*frames, later=0.0):
    """A sound [2, samples] with short tones that set in with these frames."""
    time = torch.arange(FRAMES * RATE // FPS) / RATE
    wave = torch.zeros_like(time)
    for frame in frames:
        since = time - frame / FPS - later
        wave += (since >= 0) * (-60 * since.clamp(min=0)).exp() * (2 * math.pi * 700 * since).sin()
    return wave.expand(2, -1) / 2


def scores(videos, sounds, **options):
    media = with_sound(torch.stack(videos), torch.stack(sounds), RATE)
    return REWARDS.build("av_align", **options)(media, [{"text": ""}] * len(videos)).tolist()


def test_what_is_heard_and_seen_together_counts():
    videos = [jumping(*MOVED)] * 5
    sounds = [
        clicking(*MOVED),
        clicking(*MOVED, later=0.3),  # three frames late
        clicking(6, 14),  # one jump is silent
        clicking(*MOVED, 26),  # and one click has nothing to see
        clicking(),
    ]
    assert scores(videos, sounds) == pytest.approx([1, 0, 2 / 3, 3 / 4, 0])
    assert scores(videos[:2], sounds[:2], window=4.0) == pytest.approx([1, 1])
    assert scores([jumping()] * 2, [clicking(6), clicking()]) == [0, 0]


def naive(heard, seen, window):
    """The most pairs of an onset and a peak within the window, each used once, by trying all."""
    if not len(heard):
        return 0
    rest = naive(heard[1:], seen, window)
    near = [i for i, time in enumerate(seen) if abs(time - heard[0]) <= window]
    return max([rest, *(1 + naive(heard[1:], np.delete(seen, i), window) for i in near)])


def test_events_are_the_most_that_can_be_paired():
    for trial in range(40):
        u = Rng.of("times", trial).uniform(torch.zeros(2), (4,)).double().numpy()
        heard, seen = np.sort(u[0][: trial % 5]), np.sort(u[1][: 4 - trial % 3])
        events = naive(heard, seen, 0.1)
        together = len(heard) + len(seen) - events
        assert overlap(heard, seen, 0.1) == pytest.approx(events / together)


@pytest.mark.parametrize("rate", [8000, 24000, 48000])
def test_onsets_are_where_tones_set_in(rate):
    time = np.arange(2 * rate) / rate
    wave = sum(
        np.where(time >= at, np.exp(-20 * np.maximum(time - at, 0)), 0) * np.sin(3000 * time)
        for at in (0.4, 0.9, 1.5)
    )
    np.testing.assert_allclose(onsets(wave, rate), [0.4, 0.9, 1.5], atol=0.06)
    assert not len(onsets(np.zeros(rate), rate))


def test_videos_without_sound_or_motion_are_refused():
    reward = REWARDS.build("av_align")
    with pytest.raises(UserError, match="'av_align' wants videos with their sound"):
        reward(torch.rand(1, 4, 3, 8, 8), [{}])
    short = with_sound(torch.rand(1, 2, 3, 8, 8), torch.rand(1, 1, 100), RATE)
    with pytest.raises(UserError, match="judges videos of 3 frames or more"):
        reward(short, [{}])
    assert card_of(REWARDS["av_align"]).sound
