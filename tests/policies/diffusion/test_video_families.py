"""Families of video models: first frames that are given, and clips that are learnt. Against
diffusers' own pipelines they are in test_folder_families."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.experiment.build import Session, read
from mmrl.experiment.lifecycle import train
from samplers import windows
from samplers.noise import Rng
from tests.experiment.test_resume import resumes
from tests.fixtures import tiny_diffusers
from tests.policies.diffusion.test_folder_families import CASES, PROMPTS, make, picture

load_built_in()
SHOWN = CASES["wan_i2v"].prompts


@pytest.mark.parametrize("name", ["wan_i2v-tokens", "hunyuan_i2v"])
def test_a_first_frame_that_is_given_is_reached_and_not_trained(name):
    policy = make(name)
    with torch.no_grad():
        rollout = policy.rollout(SHOWN, 2, Rng.of("noisy"))
        given = rollout.cond["condition"][rollout.group]
        videos = policy.decode(rollout)
        assert torch.equal(
            videos,
            policy.decode(rollout.replace(sample=torch.cat([given, rollout.sample[:, :, 1:]], 2))),
        )
        certain = make(name, noise_window=windows.all_but_last).rollout(SHOWN, 2, Rng.of("noisy"))
    torch.testing.assert_close(certain.sample[:, :, :1], given, atol=1e-4, rtol=0)
    point = next(iter(policy.path(rollout)))
    mean = policy.dist(point).mean
    grads = torch.autograd.grad(
        mean[:, :, :1].sum(), list(policy.net.parameters()), allow_unused=True
    )
    assert all(g is None or not g.any() for g in grads)


def test_an_image_is_encoded_once(monkeypatch):
    policy = make("wan_i2v")
    seen = []
    plain = policy.encode_pictures
    policy.pictures.encode = lambda pipe, pictures, device: (
        seen.extend(pictures) or plain(pipe, pictures, device)
    )
    for _ in range(2):
        policy.encode([*SHOWN, {**SHOWN[0], "image": SHOWN[0]["image"].copy()}])
    assert len(seen) == 2


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
    with pytest.raises(
        UserError,
        match=r"prompt 1 \('a blue two'\) has [02] images; this model "
        r"animates one",
    ):
        make("wan_i2v").encode([SHOWN[0], PROMPTS[1] | prompt])


def clip_of(place, seed):
    """A file of 8 frames, of other proportions than the videos are made in."""
    import av

    frames = np.random.default_rng(seed).integers(0, 255, (8, 32, 32, 3), dtype=np.uint8)
    with av.open(str(place), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())
    return str(place)


@pytest.mark.parametrize("name", ["wan_i2v", "wan_i2v-tokens"])
def test_a_clip_teaches_what_follows_its_own_first_frame(name, tmp_path):
    """The condition is cut as the clip is; a row without an image begins with its clip's."""
    policy = make(name)
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


def test_clips_are_learnt_in_a_stage_and_go_on_to_the_bit(tmp_path, monkeypatch):
    """``stage=sft`` of a file, with clips and captions alone; then the reward."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"a red {i}", "video": clip_of(f"{i}.mp4", i)} for i in range(4)]
    Path("clips.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"path": str(tiny_diffusers.folder("wan_i2v")), "steps": 2, "lora": 2}
    sizes = {"prompts_per_iteration": 2, "train_batch_size": 2, "iterations": 2, "group_size": 1}
    rewarded = {"objective": "policy_gradient", "advantage": "grpo", "reward": {"contrast": 1.0}}
    stages = {
        "sft": {"objective": "sft", "train": sizes | {"evaluate_every": 2}},
        "grpo": rewarded | {"train": sizes | {"group_size": 2, "iterations": 1}},
    }
    plain = {
        "policy": {"wan_i2v": options | CASES["wan_i2v"].own},
        "data": {"captions": {"path": "clips.jsonl", "held_out": 0.3}},
        "log": {"tensorboard": False},
    }
    Path("c.yaml").write_text(yaml.safe_dump(plain | {"stages": stages}, sort_keys=False))
    train(Path("c.yaml"), ["run=whole", "train.micro_batch_size=2"])
    taught, rewarded_lines = (
        [json.loads(line) for line in Path(f"whole/{stage}/metrics.jsonl").read_text().splitlines()]
        for stage in ("1-sft", "2-grpo")
    )
    assert taught[-1]["eval/loss"] > 0 and taught[-1]["grad_norm"] > 0
    assert len(taught) == 2 and len(rewarded_lines) == 1
    config = read(Path("c.yaml"), ["stage=sft"])
    resumes(lambda: Session.of(config).trainer(), tmp_path / "saved")
