"""Prompts that are changed by how hard they are: by how much, on which pixels, after a resume."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from mmrl.core.errors import UserError
from mmrl.data.base import batch
from mmrl.policies.vlm.media import noisy, shown_image
from mmrl.zoo.curricula.augmentation import Difficulty
from tests.data.test_suggestions import told
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_policy import policy_of, quiet  # noqa: F401

STEPS = ["look", "count", "add", "say"]


def plain():
    rows = [{"text": f"q{i}", "images": [tiny_vlms.image(56, 56, i)]} for i in range(5)]
    return SimpleNamespace(train=[row | {"reasoning": STEPS} for row in rows], held_out=[])


def test_prompts_are_changed_by_how_easy_they_are_by_loop():
    options = {"margin": 0.1, "scale": 0.5, "noise": 0.4, "share": 0.75, "window": 2, "decay": 0.5}
    data = Difficulty(plain(), **options).train
    assert batch(data, 5, 0, 0) == batch(data.inner, 5, 0, 0), "nothing is known yet"
    visits = [[0.0, 0.5, 1.0, 0.3, 0.7], [0.0, 0.6, 0.5, 0.3, 1.0], [0.2, 0.6, 1.0, 0.0, 1.0]]
    for rewards in visits:
        data.learn(told(rewards))
    reference = sum(sum(rewards) / 5 for rewards in visits[-2:]) / 2
    for prompt in batch(data, 5, 3, 0):
        entry = prompt["entry"]
        weight, mean = 0.0, 0.0
        for rewards in visits:
            mean = (weight * 0.5 * mean + 2 * rewards[entry]) / (weight * 0.5 + 2)
            weight = weight * 0.5 + 2
        ease = mean - reference
        strength = min(abs(ease) / 0.5, 1)
        noise = prompt.get("pixel_noise", {}).get("std")
        text = f"q{entry}"
        assert noise == (pytest.approx(0.4 * strength, abs=1e-12) if ease > 0.1 else None)
        if ease < -0.1:
            count = min(max(round(0.75 * strength * 4), 1), 3)
            text += "\nHint: " + "\n".join(STEPS[:count])
        assert prompt["text"] == text
    again = Difficulty(plain(), **options).train
    again.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert [p["text"] for p in batch(again, 5, 3, 0)] == [p["text"] for p in batch(data, 5, 3, 0)]
    with pytest.raises(UserError, match="difficulty: no prompt has the field 'reasoning'"):
        Difficulty(SimpleNamespace(train=[{"text": "a"}], held_out=[]))


def test_noise_reaches_the_pixels_that_a_model_sees():
    prompt = {"text": "a", "images": [tiny_vlms.image(56, 56, 1)]}
    hard = prompt | {"pixel_noise": {"std": 0.1, "key": "3 7"}}
    plain = np.array(shown_image(prompt["images"][0], prompt)).astype(float)
    seen = np.array(shown_image(prompt["images"][0], hard)).astype(float)
    inner = (plain > 90) & (plain < 165)  # nothing is cut off
    assert (seen - plain)[inner].std() == pytest.approx(25.5, rel=0.1)
    assert (seen == np.array(shown_image(prompt["images"][0], hard))).all(), "the same every time"
    frames = np.full((3, 8, 8, 3), 128, dtype=np.uint8)
    assert (noisy(frames, hard, "video 0") != noisy(frames, hard, "video 1")).any()
    inputs = policy_of(max_new_tokens=4).inputs
    before, after = (inputs.take(each)[0]["pixel_values"] for each in (prompt, hard))
    assert before.shape == after.shape and (before != after).any()
