"""Sounds in prompts, of the models that hear: Qwen3-Omni's thinker and Phi-4 multimodal."""

from __future__ import annotations

import wave
from functools import cache

import numpy as np
import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.vlm.audio import open_audio
from mmrl.policies.vlm.policy import VLM
from samplers.noise import Rng
from tests.fixtures import tiny_vlms

RATE = 16_000
KINDS = ("qwen3_omni_moe_thinker", "phi4_multimodal")


def sound(seconds, seed=0):
    noise = np.random.default_rng(seed).standard_normal(int(RATE * seconds))
    return (0.1 * noise).astype(np.float32)


def prompts():
    return [
        {"text": "what is it", "audio": sound(0.3)},
        {"text": "<audio> or <audio>", "audios": [sound(0.2, 1), sound(0.4, 2)]},
        {"text": "nothing"},
        {"text": "seen", "image": tiny_vlms.image(32, 32)},
    ]


@cache
def policy(kind):
    return VLM(str(tiny_vlms.folder(kind)), max_new_tokens=3, dtype="float32")


@pytest.mark.parametrize("kind", KINDS)
def test_answers_to_sounds_are_scored_as_the_model_itself_does(kind):
    """Rows of prompts with one sound, two of other lengths, none, and a picture, in one rollout;
    and each by the class of transformers alone."""
    vlm = policy(kind)
    with torch.no_grad():
        rollout = vlm.rollout(prompts(), 2, Rng.of("heard"))
    (point,) = vlm.path(rollout)
    logp = vlm.dist(point).log_prob(point.target)
    torch.testing.assert_close(logp[point.mask], point.logprob[point.mask], atol=1e-4, rtol=0)
    for row in range(8):
        prompt = prompts()[row // 2]
        encoded = vlm.inputs.encode(prompt)
        ids = rollout.sample[row][rollout.mask[row]][None]
        longer = encoded | {
            "input_ids": torch.cat([encoded["input_ids"], ids], 1),
            "attention_mask": torch.ones(1, encoded["input_ids"].shape[1] + ids.shape[1]).long(),
        }
        if "mm_token_type_ids" in longer:
            longer["mm_token_type_ids"] = torch.cat(
                [encoded["mm_token_type_ids"], torch.zeros_like(ids)], 1
            )
        with torch.no_grad():
            logits = vlm.net.hf(**longer).logits[:, -ids.shape[1] - 1 : -1].float()
        logits[..., list(vlm.inputs.suppressed)] = -torch.inf
        expected = logits.log_softmax(-1).gather(-1, ids[..., None])[0, :, 0]
        torch.testing.assert_close(
            rollout.logprob[row][rollout.mask[row]], expected, atol=2e-4, rtol=0
        )


@pytest.mark.parametrize("kind", KINDS)
def test_another_sound_is_another_distribution(kind):
    vlm = policy(kind)
    with torch.no_grad():
        rollout = vlm.rollout(prompts()[:1], 1, Rng.of("heard"))
        (point,) = vlm.path(rollout)
        other, _ = vlm.recall([{"text": "what is it", "audio": sound(0.3, 5)}])
        same, moved = (
            vlm.dist(p).log_prob(point.target)[point.mask]
            for p in (point, point.replace(cond=other))
        )
    assert (same - moved).abs().max() > 1e-4


def test_files_are_decoded_at_the_model_s_rate(tmp_path):
    file = tmp_path / "tone.wav"
    tone = np.sin(np.arange(8000) / 8000 * 2 * np.pi * 440)
    with wave.open(str(file), "wb") as out:
        out.setparams((2, 2, 8000, 8000, "NONE", ""))
        out.writeframes((np.repeat(tone, 2) * 20000).astype("<i2").tobytes())
    opened = open_audio(str(file), RATE, {})
    assert abs(len(opened) - RATE) < 100 and opened.dtype == np.float32
    middle = opened[4000:12000]
    expected = np.sin(np.arange(4000, 12000) / RATE * 2 * np.pi * 440) * 20000 / 32768
    assert np.abs(middle - expected).max() < 0.02


def test_what_cannot_be_heard_is_one_sentence(tmp_path):
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"no sound")
    heard = policy(KINDS[1]).inputs
    for prompt, says in (
        ({"audio": str(broken)}, "no sound can be decoded of .*broken.wav"),
        ({"audio": str(tmp_path / "none.wav")}, "no sound can be decoded"),
        ({"audio": {"array": sound(0.1), "sampling_rate": 8000}}, "has 8000 numbers a second"),
        ({"audio": np.zeros((2, 5))}, "must be one channel"),
        ({"text": "<audio> and <audio>", "audio": sound(0.1)}, "more <audio> placeholders"),
    ):
        with pytest.raises(UserError, match=says):
            heard.encode({"text": "what"} | prompt)
    deaf = VLM(str(tiny_vlms.folder("qwen2_5_vl")), max_new_tokens=1)
    with pytest.raises(UserError, match="qwen2_5_vl is given no audio here"):
        deaf.inputs.encode({"text": "what", "audio": sound(0.1)})
    with pytest.raises(UserError, match="use engine: own"):
        heard.engine_prompt(prompts()[0])
