"""Rewards of sound: ``clap`` and ``pe_av`` against transformers' own models, ``av_align`` on
flashes of motion and clicks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mmrl.config.needs import wrong_media
from mmrl.core.errors import UserError
from mmrl.core.media.sound import with_sound
from mmrl.core.registry import POLICIES, REWARDS, load_built_in
from rewards.card import card_of
from rewards.combined.members import merged
from rewards.videos.av_align import overlap
from rewards.videos.pe_av import EMBEDDINGS
from samplers.noise import Rng
from tests.fixtures.tiny_rewards import asked
from tests.fixtures.tiny_sounds import save_clap, save_pe_av, sounding

load_built_in()


@pytest.fixture(scope="module")
def clap(tmp_path_factory):
    return REWARDS.build("clap", model=save_clap(tmp_path_factory.mktemp("clap")), device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("timm")
    return save_pe_av(tmp_path_factory.mktemp("pe_av"))


def build(folder, **options):
    return REWARDS.build("pe_av", model=folder, device="cpu", **options)


def by_clap(clap, waves, prompts):
    """Cosines by the model's whole forward pass, sound by sound."""
    values = []
    for wave, prompt in zip(waves, prompts, strict=True):
        tokens = clap.tokenizer(prompt["text"], return_tensors="pt")
        mels = clap.extractor(wave, sampling_rate=1000, return_tensors="pt")
        with torch.no_grad():
            output = clap.network(**tokens, **mels)
        values.append(output.logits_per_audio[0, 0] / clap.network.logit_scale_a.exp())
    return torch.stack(values)


def test_clap_is_the_cosine_of_transformers_and_the_mean_over_pieces(clap):
    media, prompts = sounding(), asked()
    values = clap(media, prompts)
    expected = by_clap(clap, media.sound.mean(1).numpy(), prompts)
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    assert values.std() > 1e-3
    twice = REWARDS.build("clap", model=clap.network.name_or_path, scale=2.0, device="cpu")
    torch.testing.assert_close(twice(media, prompts), 2 * values)
    media = sounding(2, seconds=2.5)
    state = np.random.get_state()[1].copy()
    values = clap(media, asked(2))
    assert np.array_equal(np.random.get_state()[1], state), "numpy's numbers are left alone"
    waves = media.sound.mean(1).numpy()
    pieces = [by_clap(clap, waves[:, at : at + 1000], asked(2)) for at in (0, 750, 1500)]
    torch.testing.assert_close(values, torch.stack(pieces).mean(0), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def library(folder):
    """The library's own model and its processors."""
    from transformers import (
        AutoFeatureExtractor,
        AutoTokenizer,
        AutoVideoProcessor,
        PeAudioVideoModel,
    )

    tools = (AutoFeatureExtractor, AutoVideoProcessor, AutoTokenizer)
    network = PeAudioVideoModel.from_pretrained(folder).eval()
    return network, *(tool.from_pretrained(folder) for tool in tools)


def by_pe_av(library, media, prompts, pair):
    """Products of the library's own outputs, video by video, whose logits they are."""
    network, extractor, processor, tokenizer = library
    logits = {
        "audio_video": (network.audio_video_logit_scale, "logits_audio_video"),
        "audio_text": (network.audio_model.text_audio_logit_scale, "logits_audio_text"),
        "video_text": (network.video_model.text_video_logit_scale, "logits_video_text"),
        "audio_video_text": (network.text_audio_video_logit_scale, "logits_audio_video_text"),
    }
    scale, name = logits[pair]
    scale.data.fill_(1.0)  # 0 at random weights
    values = []
    for video, wave, prompt in zip(media, media.sound.mean(1), prompts, strict=True):
        pixels = (video * 255).round().to(torch.uint8)
        seen = processor([pixels], return_tensors="pt")
        heard = extractor([wave.numpy()], sampling_rate=1000, return_tensors="pt")
        tokens = tokenizer(prompt["text"], return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            output = network(**seen, **heard, **tokens)
        one, other = (output[part][0] for part in EMBEDDINGS[pair])
        values.append(output[name][0, 0] / (one.norm() * other.norm()))
    return torch.stack(values)


@pytest.mark.parametrize("pair", EMBEDDINGS)
def test_pe_av_is_the_cosine_of_transformers_embeddings(pair, folder, library):
    media, prompts = sounding(), asked()
    values = build(folder, pair=pair)(media, prompts)
    torch.testing.assert_close(values, by_pe_av(library, media, prompts, pair), atol=1e-5, rtol=0)
    assert values.std() > 1e-3
    if pair == "audio_video":
        twice = build(folder, scale=2.0, batch_size=2)
        torch.testing.assert_close(twice(media, prompts), 2 * values, atol=1e-5, rtol=0)


def test_other_rates_are_resampled_and_frames_chosen_at_the_sounds_rate(folder):
    reward = build(folder, pair="audio_text")
    fine, coarse = (reward(sounding(rate=rate), asked()) for rate in (2000, 1000))
    wrong = reward(with_sound(sounding(), sounding(rate=2000).sound, 1000), asked())
    assert (fine - coarse).abs().max() < 0.5 * (wrong - coarse).abs().max()
    reward = build(folder)
    reward.videos.do_sample_frames = True
    reward.videos.fps = 4.0
    media = sounding()  # 4 frames in half a second
    made = reward.inputs(media * 1, 8.0, media.sound.mean(1), [])
    assert made["pixel_values_videos"].shape[1] == 2


@pytest.mark.parametrize("name", ["clap", "pe_av"])
def test_videos_and_policies_without_sound_are_refused(name, clap, folder):
    reward = clap if name == "clap" else build(folder)
    with pytest.raises(UserError, match=f"reward '{name}' wants videos with their sound"):
        reward(sounding() * 1, asked())
    rewards = {name: REWARDS[name]}
    ((refused, why),) = wrong_media(rewards, POLICIES["wan"])
    assert refused == name and why.startswith("it judges the sound of videos")
    assert not list(wrong_media(rewards, POLICIES["pipeline"]))
    assert merged([REWARDS[name]] * 2).sound and card_of(reward).sound


# av_align


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


def test_videos_without_sound_or_motion_are_refused():
    reward = REWARDS.build("av_align")
    with pytest.raises(UserError, match="'av_align' wants videos with their sound"):
        reward(torch.rand(1, 4, 3, 8, 8), [{}])
    short = with_sound(torch.rand(1, 2, 3, 8, 8), torch.rand(1, 1, 100), RATE)
    with pytest.raises(UserError, match="judges videos of 3 frames or more"):
        reward(short, [{}])
    assert card_of(REWARDS["av_align"]).sound
