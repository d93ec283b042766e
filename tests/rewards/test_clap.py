"""The reward ``clap`` against transformers' own ClapModel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmrl.config.needs import wrong_media
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, REWARDS, load_built_in
from rewards.card import card_of
from rewards.combined.members import merged
from tests.fixtures.tiny_rewards import asked
from tests.fixtures.tiny_sounds import save_clap, sounding

load_built_in()


@pytest.fixture(scope="module")
def clap(tmp_path_factory):
    return REWARDS.build("clap", model=save_clap(tmp_path_factory.mktemp("clap")), device="cpu")


def original(clap, waves, prompts):
    """Cosines by the model's whole forward pass, sound by sound."""
    values = []
    for wave, prompt in zip(waves, prompts, strict=True):
        tokens = clap.tokenizer(prompt["text"], return_tensors="pt")
        mels = clap.extractor(wave, sampling_rate=1000, return_tensors="pt")
        with torch.no_grad():
            output = clap.network(**tokens, **mels)
        values.append(output.logits_per_audio[0, 0] / clap.network.logit_scale_a.exp())
    return torch.stack(values)


def test_it_is_the_cosine_of_transformers_clap(clap):
    media = sounding()
    prompts = asked()
    values = clap(media, prompts)
    expected = original(clap, media.sound.mean(1).numpy(), prompts)
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    assert values.std() > 1e-3  # of other sounds and texts another
    twice = REWARDS.build("clap", model=clap.network.name_or_path, scale=2.0, device="cpu")
    torch.testing.assert_close(twice(media, prompts), 2 * values)


def test_a_long_sound_is_the_mean_of_its_pieces(clap):
    """And nothing is drawn: numpy's numbers are left alone."""
    media = sounding(2, seconds=2.5)
    state = np.random.get_state()[1].copy()
    values = clap(media, asked(2))
    assert np.array_equal(np.random.get_state()[1], state)
    waves = media.sound.mean(1).numpy()
    pieces = [original(clap, waves[:, at : at + 1000], asked(2)) for at in (0, 750, 1500)]
    torch.testing.assert_close(values, torch.stack(pieces).mean(0), atol=1e-5, rtol=0)


def test_videos_without_sound_are_refused(clap):
    with pytest.raises(UserError, match="reward 'clap' wants videos with their sound"):
        clap(sounding() * 1, asked())


def test_policies_without_sound_are_refused_before_loading():
    rewards = {"clap": REWARDS["clap"]}
    ((name, why),) = wrong_media(rewards, POLICIES["wan"])
    assert name == "clap" and why.startswith("it judges the sound of videos")
    assert not list(wrong_media(rewards, POLICIES["pipeline"]))
    assert merged([REWARDS["clap"], REWARDS["clap"]]).sound and card_of(REWARDS["clap"]).sound
