"""Families of video models: first frames that are given, and clips that are learnt. Against
diffusers' own pipelines they are in test_folder_families."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from samplers import windows
from samplers.noise import Rng
from tests.fixtures import clips
from tests.policies.diffusion.test_folder_families import CASES, PROMPTS, make, picture

load_built_in()
SHOWN = CASES["wan_i2v"].prompts


@pytest.mark.parametrize("name", ["wan_i2v-tokens", "hunyuan_i2v"])
def test_a_first_frame_that_is_given_is_reached_and_not_trained(name):
    policy = make(name)
    with torch.no_grad():
        rollout = policy.rollout(SHOWN, 2, Rng.of("noisy"))
        given = rollout.cond["condition"][rollout.group]
        replaced = rollout.replace(sample=torch.cat([given, rollout.sample[:, :, 1:]], 2))
        assert torch.equal(policy.decode(rollout), policy.decode(replaced))
        certain = make(name, noise_window=windows.all_but_last).rollout(SHOWN, 2, Rng.of("noisy"))
    torch.testing.assert_close(certain.sample[:, :, :1], given, atol=1e-4, rtol=0)
    mean = policy.dist(next(iter(policy.path(rollout)))).mean[:, :, :1].sum()
    grads = torch.autograd.grad(mean, list(policy.net.parameters()), allow_unused=True)
    assert all(g is None or not g.any() for g in grads)


def test_a_path_is_an_image_too_and_released_encoders_are_not_missed(tmp_path):
    SHOWN[0]["image"].save(tmp_path / "first.png")
    policy = make("wan_i2v", text_encoder_placement="release")
    prompts = [{"text": "a red seven", "image": tmp_path / "first.png"}]
    policy.prepare(prompts)
    assert policy.texts.pipeline is None and policy.pictures.pipeline is None
    policy.texts.load = policy.pictures.load = None
    named = policy.encode(prompts)
    shown = make("wan_i2v").encode(SHOWN[:1])
    assert all(torch.equal(named[key], shown[key]) for key in ("text", "condition", "image"))


@pytest.mark.parametrize("prompt", [{}, {"images": [picture(0), picture(1)]}])
def test_a_prompt_without_one_image_is_named(prompt):
    says = r"prompt 1 \('a blue two'\) has [02] images; this model animates one"
    with pytest.raises(UserError, match=says):
        make("wan_i2v").encode([SHOWN[0], PROMPTS[1] | prompt])


def clip_of(place, seed):
    """A file of 8 frames, of other proportions than the videos are made in."""
    pixels = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    return str(clips.write(place, range(0, 1000, 125), pixels=pixels))


def test_a_clip_teaches_what_follows_its_own_first_frame(tmp_path):
    """The condition is cut as the clip is; a row without an image begins with its clip's."""
    policy = make("wan_i2v")
    clip = clip_of(tmp_path / "a.mp4", 0)
    row = {"text": "a red seven", "answer": clip}
    frames = policy.open_answer(row, clip)
    policy.open_answer(row, clip)
    (note,) = policy.report.warnings
    assert note.startswith(f"clips are read by time at {policy.media.fps:g} frames a second, the ")
    image = Image.fromarray((frames[0].permute(1, 2, 0) * 255).byte().numpy())
    answers = [frames, frames]
    rows = [row, row | {"image": image}]
    rollout = policy.demonstrate(rows, answers, Rng.of("clips"), score=False)
    channels = rollout.sample.shape[1]
    begun = rollout.cond["condition"][:, -channels:, :1]
    torch.testing.assert_close(begun, rollout.sample[:, :, :1], atol=1e-5, rtol=0)
    # sampled from such a row a video begins there too
    cond = policy.encode([row])
    torch.testing.assert_close(cond["condition"], rollout.cond["condition"][:1])
    stretched = policy.encode([rows[1]])["condition"]  # an own image as diffusers takes it
    assert (stretched - cond["condition"]).abs().max() > 0.01
    for answer in ("7", 7, [7]):
        with pytest.raises(UserError, match="under 'answer' it may be left out"):
            policy.encode([{"text": "a red seven", "answer": answer}])
