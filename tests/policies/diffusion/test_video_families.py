"""Families of video models against diffusers' own pipelines; Wan's text to video is in
test_folder_families."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.experiment.build import Session, read
from mmrl.experiment.lifecycle import train
from samplers import windows
from samplers.noise import Rng
from tests.experiment.test_resume import resumes
from tests.fixtures import tiny_diffusers
from tests.policies.diffusion.test_folder_families import PROMPTS, trainer_of

load_built_in()


def picture(seed, size=(40, 28)):
    """Of another size than the videos."""
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    )


SHOWN = [{**prompt, "image": picture(i)} for i, prompt in enumerate(PROMPTS)]


def tokens(x):
    """LTX's latents are tokens."""
    return x.flatten(2).transpose(1, 2)


@dataclass
class Case:
    """A tiny model, the policy for it, and how its pipeline is called."""

    policy: str
    own: dict[str, Any]  # options of the policy
    call: dict[str, Any] = field(default_factory=dict)  # further arguments of the pipeline
    folder: str | None = None  # if it is not the case's name
    embedded: bool = False  # guidance_scale is an input of the network, true_cfg_scale guides
    drop: int = 0  # latent frames that the pipeline does not return

    def guide(self, scale):
        if not self.embedded:
            return {"guidance_scale": scale}
        return {"true_cfg_scale": scale, "guidance_scale": 6.0} | (
            {"negative_prompt": ""} if scale > 1 else {}
        )

    @property
    def shown(self):
        return self.policy.endswith("i2v")

    @property
    def prompts(self):
        return SHOWN if self.shown else PROMPTS


def case(policy, frames, text_length, more=None, **options):
    own = {"size": [16, 32], "frames": frames, "text_length": text_length} | (more or {})
    return Case(policy, own, {"num_frames": frames, "max_sequence_length": text_length}, **options)


CASES = {
    "wan_i2v": case("wan_i2v", 5, 16),
    "wan_i2v-two": case("wan_i2v", 5, 16),
    "wan_i2v-tokens": case("wan_i2v", 5, 16, folder="wan-tokens"),
    "skyreels_i2v": case("skyreels_i2v", 5, 16),
    "ltx": case("ltx", 5, 16, {"size": [32, 64]}),
    "cogvideox": case("cogvideox", 9, 16, {"steps": 4}),
    "hunyuan_video": case("hunyuan_video", 5, 64, embedded=True),
    "hunyuan_i2v": case("hunyuan_i2v", 5, 96, embedded=True),
    "hunyuan_i2v-joined": case("hunyuan_i2v", 9, 96, embedded=True, drop=1),
}
# The same families where only parity with the pipeline is of interest.
MORE = {
    "ltx-timed": case("ltx", 5, 16, {"size": [32, 64], "decode_time": 0.05}),
    "cogvideox-joined": case("cogvideox", 9, 16, {"steps": 4}),
}
MORE["ltx-timed"].call |= {"decode_timestep": 0.05, "decode_noise_scale": 0.0}
ALL = CASES | MORE


def make(name, **options):
    one = ALL[name]
    torch.manual_seed(0)
    chosen = {"steps": 3, "fixed_batch_rows": 4} | one.own | options
    return POLICIES.build(one.policy, path=str(tiny_diffusers.folder(one.folder or name)), **chosen)


def pipeline(name, policy):
    place = str(tiny_diffusers.folder(ALL[name].folder or name))
    pipe = getattr(diffusers, policy.pipeline).from_pretrained(place)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def first_latents(policy, one, rollout):
    """As the pipeline is given them, which mixes the image in itself where it does."""
    first = rollout.latents.states[:, 0]
    if one.policy == "hunyuan_i2v":
        first = (first - 0.001 * rollout.cond["condition"][rollout.group]) / 0.999
    return tokens(first) if one.policy == "ltx" else first


HUNYUAN = {
    "prompt_embeds": "text",
    "pooled_prompt_embeds": "pooled",
    "prompt_attention_mask": "mask",
}


def call(pipe, policy, name, rollout, guidance, output):
    """The pipeline's own samples from the same first latents, row by row: most take one image."""
    one, (height, width) = ALL[name], policy.size
    first = first_latents(policy, one, rollout)
    found = []
    for latents, prompt in zip(first.split(1), rollout.prompt_per_row()):
        shown = {"image": prompt["image"]} if one.shown else {}
        # the pipeline would read the empty prompt with other image tokens
        if name == "hunyuan_i2v" and guidance > 1:
            empty = rollout.cond["uncond"]
            shown |= {f"negative_{key}": empty[ours] for key, ours in HUNYUAN.items()} | {
                "negative_prompt": None
            }
        found.append(
            pipe(
                prompt=[prompt["text"]],
                latents=latents,
                height=height,
                width=width,
                num_inference_steps=policy.steps,
                output_type=output,
                **one.call,
                **(one.guide(guidance) | shown),
            )[0]
        )
    return torch.cat(found)


@pytest.mark.parametrize("guidance", [1.0, 2.5])
@pytest.mark.parametrize("name", ALL)
def test_without_noise_we_are_the_diffusers_pipeline(name, guidance):
    policy = make(name, fixed_batch_rows=None)
    one = ALL[name]
    with policy.evaluating(guidance), torch.no_grad():
        rollout = policy.rollout(one.prompts, 1, Rng.of("same"))
        ours = policy.decode(rollout)
    pipe = pipeline(name, policy)
    latents = call(pipe, policy, name, rollout, guidance, "latent")
    videos = call(pipe, policy, name, rollout, guidance, "pt")
    sample = tokens(rollout.sample) if one.policy == "ltx" else rollout.sample[:, :, one.drop :]
    torch.testing.assert_close(sample, latents, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours, videos, atol=1e-4, rtol=0)
    assert ours.shape == (2, one.own["frames"] - 4 * one.drop, 3, *one.own["size"])
    if guidance == 1:
        texts = [p | {"text": q["text"]} for p, q in zip(one.prompts, one.prompts[::-1])]
        other = call(pipe, policy, name, rollout.replace(prompts=texts), guidance, "latent")
        assert (other - latents).abs().max() > 1e-4  # the text has an effect
    if guidance == 1 and one.shown:
        images = [p | {"image": q["image"]} for p, q in zip(one.prompts, one.prompts[::-1])]
        other = call(pipe, policy, name, rollout.replace(prompts=images), guidance, "latent")
        assert (other - latents).abs().max() > 1e-4  # the image has an effect


def trainer(name, **options):
    found = trainer_of(make(name, **options))
    found.prompts = CASES[name].prompts
    return found


@pytest.mark.parametrize(
    "options", [{}, {"guidance_scale": 2.5, "lora": 2}], ids=["full", "guided lora"]
)
@pytest.mark.parametrize("name", CASES)
def test_the_first_step_is_exactly_on_policy(name, options):
    metrics = trainer(name, **options).iterate()
    assert (
        metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0 and metrics["step"] == 1
    )


@pytest.mark.parametrize("name", CASES)
def test_an_exported_adapter_gives_the_plain_pipeline_our_videos(name, tmp_path):
    training = trainer(name, lora=2, fixed_batch_rows=None)
    one = CASES[name]
    policy = training.policy
    training.iterate(), training.iterate()
    policy.export(tmp_path)
    pipe = pipeline(name, policy)
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(one.prompts, 1, Rng.of("same"))
        ours = policy.decode(rollout)
    before = call(pipe, policy, name, rollout, 1.0, "pt")
    if name == "wan_i2v-two":  # an adapter for each expert
        pipe.load_lora_weights(tmp_path / "transformer")
        pipe.load_lora_weights(tmp_path / "transformer_2", load_into_transformer_2=True)
    else:
        pipe.load_lora_weights(tmp_path)
    after = call(pipe, policy, name, rollout, 1.0, "pt")
    torch.testing.assert_close(ours, after, atol=1e-4, rtol=0)
    assert (after - before).abs().max() > 1e-4  # the training is seen


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_resumes_to_the_bit(name, tmp_path):
    def fresh():
        return trainer(name, lora=2, guidance_scale=2.5, steps=2)

    resumes(fresh, tmp_path)


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


@pytest.mark.parametrize("name", ["hunyuan_i2v"])
def test_released_encoders_have_read_prompts_with_their_images(name):
    policy = make(name, text_encoder_placement="release")
    policy.prepare(SHOWN)
    policy.texts.load = policy.pictures.load = None
    assert policy.encode(SHOWN[1:])["condition"].shape[0] == 1


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
