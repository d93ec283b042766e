"""Sounds of videos on their way to a reward server: numbers as in process, and refusals."""

from __future__ import annotations

import base64
import re

import pytest
import torch
from safetensors.torch import save

from mmrl.apps.serve.lanes import Job
from mmrl.core.errors import UserError
from mmrl.core.media.sound import sound_of, with_sound
from mmrl.core.registry import REWARDS
from rewards import Remote
from rewards.card import card
from tests.fixtures import waiting
from tests.fixtures.reward_servers import b64, mean, png, serving
from tests.fixtures.tiny_rewards import asked
from tests.fixtures.tiny_sounds import save_clap, sounding


@card(media="video", sound=True)
def pitch(media, prompts):
    """How often the sound of the left changes its sign a second, and where it is loudest."""
    sound, rate = sound_of(media, "pitch")
    changes = (sound[:, 0].diff(dim=-1).sign().diff(dim=-1) != 0).double().mean(-1)
    return (changes * rate + sound.abs().amax((1, 2))).float()


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    clap = REWARDS.build("clap", model=save_clap(tmp_path_factory.mktemp("clap")), device="cpu")
    return {"pitch": pitch, "clap": clap, "mean": mean}


@pytest.fixture(scope="module")
def url(rewards):
    with serving(rewards) as address:
        yield address


@pytest.mark.parametrize(("form", "name"), [("png", "pitch"), ("tensor", "clap")])
def test_a_server_hears_what_the_process_hears(url, rewards, form, name):
    media = sounding()
    remote = Remote(url, name=name, format=form, batch_size=2)
    values = remote(media, asked())
    torch.testing.assert_close(values, rewards[name](media, asked()), atol=1e-5, rtol=0)
    assert len(values.unique()) == len(values)


def test_a_sound_that_is_not_finite_has_no_score(url):
    media = sounding()
    media.sound[1, 0, 3] = torch.nan
    values = Remote(url, name="clap", retries=0)(media, asked())
    assert values.isnan().tolist() == [False, True, False, False, False]


def test_silent_videos_and_their_rewards(url):
    silent = sounding() * 1
    rounded = Remote(url, name="mean")(silent, asked())
    torch.testing.assert_close(rounded, mean(silent, asked()), atol=1e-3, rtol=0)
    with pytest.raises(UserError, match="'pitch' wants videos with their sound"):
        Remote(url, name="pitch", retries=0)(silent, asked())


def test_unlike_sounds_are_no_batch():
    jobs = [Job(sounding(rate=rate), asked()) for rate in (1000, 1000, 2000)]
    assert jobs[0].like(jobs[1]) and not jobs[0].like(jobs[2])
    assert not jobs[0].like(Job(sounding() * 1, asked()))


SOUND = torch.zeros(2, 1, 8)
FILE = {"sound": save({"sound": SOUND}), "sampling_rate": 8000}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sound": b"none"}, "sound: is not a safetensors file with a tensor called sound"),
        ({"sound": save({"other": SOUND})}, "with a tensor called sound"),
        ({"sound": save({"sound": SOUND[:1]})}, r"\[1, 1, 8\] is not the sound of 2 videos"),
        ({"sound": save({"sound": SOUND.long()})}, "expected floats"),
        ({"sound": save({"sound": SOUND[0]})}, "expected floats"),
        ({"sound": save({"sound": torch.zeros(2, 17, 8)})}, "at most 16 channels"),
        ({"sound": save({"sound": torch.zeros(2, 1, 30_000)})}, "50000 numbers"),
        ({"sampling_rate": 0}, "sampling_rate: expected a whole number"),
        ({"sampling_rate": 10**9}, "sampling_rate: expected a whole number"),
        ({"sampling_rate": None}, "sampling_rate: expected a whole number"),
        ({"sampling_rate": True}, "sampling_rate: expected a whole number"),
        ({"images": True}, "sound: belongs to videos"),
    ],
    ids=str,
)
def test_what_is_no_sound_is_named(small, fields, words):
    picture = b64(png())
    request = FILE | fields
    body = {
        "prompts": [{"text": "a"}] * 2,
        "sound": base64.b64encode(request["sound"]).decode(),
        "sampling_rate": request["sampling_rate"],
        **({"images": [picture] * 2} if "images" in fields else {"videos": [[picture] * 3] * 2}),
    }
    answer = waiting.post(f"{small}/score", json=body)
    assert answer.status_code == 400
    assert re.search(words, answer.json()["error"])


@pytest.fixture(scope="module")
def small():
    with serving({"mean": mean}, max_megapixels=0.05) as address:
        yield address


def test_a_sound_that_is_good_passes(small):
    media = with_sound(torch.rand(2, 3, 3, 8, 8), SOUND, 8000)
    assert Remote(small, name="mean")(media, asked(2)).isfinite().all()
