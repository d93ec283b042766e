"""The reward ``pe_av`` against transformers' own PeAudioVideoModel."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.needs import wrong_media
from mmrl.core.errors import UserError
from mmrl.core.media.sound import with_sound
from mmrl.core.registry import POLICIES, REWARDS, load_built_in
from rewards.card import card_of
from rewards.videos.pe_av import EMBEDDINGS
from tests.fixtures.tiny_rewards import asked
from tests.fixtures.tiny_sounds import save_pe_av, sounding

load_built_in()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("timm")
    return save_pe_av(tmp_path_factory.mktemp("pe_av"))


def build(folder, **options):
    return REWARDS.build("pe_av", model=folder, device="cpu", **options)


@pytest.fixture(scope="module")
def library(folder):
    """The library's own model and what brings samples to it."""
    from transformers import (
        AutoFeatureExtractor,
        AutoTokenizer,
        AutoVideoProcessor,
        PeAudioVideoModel,
    )

    network = PeAudioVideoModel.from_pretrained(folder).eval()
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    processor = AutoVideoProcessor.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return network, extractor, processor, tokenizer


def original(library, media, prompts, pair):
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
def test_it_is_the_cosine_of_transformers_embeddings(pair, folder, library):
    media = sounding()
    prompts = asked()
    reward = build(folder, pair=pair)
    values = reward(media, prompts)
    torch.testing.assert_close(values, original(library, media, prompts, pair), atol=1e-5, rtol=0)
    assert values.std() > 1e-3
    twice = build(folder, pair=pair, scale=2.0, batch_size=2)
    torch.testing.assert_close(twice(media, prompts), 2 * values, atol=1e-5, rtol=0)
    one_by_one = [reward(media[i : i + 1], prompts[i : i + 1]) for i in range(len(media))]
    torch.testing.assert_close(torch.cat(one_by_one), values, atol=1e-5, rtol=0)


def test_other_rates_are_resampled(folder):
    reward = build(folder, pair="audio_text")
    fine, coarse = (reward(sounding(rate=rate), asked()) for rate in (2000, 1000))
    wrong = reward(with_sound(sounding(), sounding(rate=2000).sound, 1000), asked())
    assert (fine - coarse).abs().max() < 0.5 * (wrong - coarse).abs().max()


def test_frames_are_chosen_by_the_models_processor(folder):
    """At the frame rate of the sound."""
    reward = build(folder)
    reward.videos.do_sample_frames = True
    reward.videos.fps = 4.0
    media = sounding()  # 4 frames in half a second
    made = reward.inputs(media * 1, 8.0, media.sound.mean(1), [])
    assert made["pixel_values_videos"].shape[1] == 2


def test_its_card_says_what_a_prompt_must_hold(folder):
    assert card_of(build(folder)).needs == () and card_of(build(folder)).sound
    assert card_of(build(folder, pair="audio_text", field="sound_text")).needs == ("sound_text",)
    with pytest.raises(UserError, match="pe_av: unknown pair 'both'; known: audio_video"):
        build(folder, pair="both")
    with pytest.raises(UserError, match="reward 'pe_av' wants videos with their sound"):
        build(folder)(sounding() * 1, asked())
    ((name, why),) = wrong_media({"pe_av": REWARDS["pe_av"]}, POLICIES["wan"])
    assert name == "pe_av" and why.startswith("it judges the sound of videos")


def test_what_is_not_read_of_a_prompt_and_a_clip_is_said_once(folder, caplog, monkeypatch):
    media = sounding()
    reward = build(folder, pair="audio_video_text")
    long = [{"text": "a red seven " * 300} for _ in media]
    reward(media, asked())
    assert not caplog.records
    monkeypatch.setattr(reward.videos, "do_sample_frames", True)
    monkeypatch.setattr(reward.videos, "num_frames", 2)
    for _ in range(2):
        reward(media, long)
    texts, frames = sorted(record.getMessage() for record in caplog.records)
    assert f"sees 2 of the {media.shape[1]} frames" in frames
    assert f"first 512 tokens of a prompt: {len(media)} of {len(media)} are longer" in texts
