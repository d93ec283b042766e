"""Every family in diffusers' folder format against diffusers' own pipeline. What only families of
pictures or videos do is in test_image_families and test_video_families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.objectives import PolicyGradient
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.models.diffusion.flux import pack
from samplers.noise import Rng
from tests.experiment.test_resume import resumes
from tests.fixtures import tiny_diffusers

load_built_in()

PROMPTS = [{"text": text} for text in ("a red seven", "a blue two")]


OTHER = (40, 28)  # another size than that of what is made of it


def picture(seed, size=OTHER):
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def guided(scale):
    return {"guidance_scale": scale}


def true_cfg(scale, **more):
    """``guidance_scale`` is an input of the network."""
    return {"true_cfg_scale": scale} | ({"negative_prompt": ""} if scale > 1 else {}) | more


def tokens(policy, x):
    """LTX's latents are tokens."""
    return x.flatten(2).transpose(1, 2)


@dataclass
class Case:
    """A tiny model, the policy for it, and how its pipeline is called."""

    policy: str
    own: dict[str, Any]  # options of the policy
    call: dict[str, Any] = field(default_factory=dict)  # further arguments of the pipeline
    guide: Callable = guided
    layout: Callable = lambda policy, x: x  # our latents as the pipeline takes them
    folder: str | None = None  # if it is not the case's name
    shown: tuple[int, int] | None = None  # the size of the images of prompts that have one

    @property
    def prompts(self):
        if self.shown is None:
            return PROMPTS
        return [{**p, "image": picture(i, self.shown)} for i, p in enumerate(PROMPTS)]


def packed(policy, text_length, own=None, guide=true_cfg, **call):
    """A family whose pipeline has its latents packed."""
    own = {"size": [16, 32], "text_length": text_length} | (own or {})
    call = {"max_sequence_length": text_length} | call
    return Case(policy, own, call, guide, layout=lambda policy, x: pack(x))


def edit(case, shown, folder=None):
    case.shown, case.folder = shown, folder
    return case


def film(policy, frames, text_length, own=None, **options):
    own = {"size": [16, 32], "frames": frames, "text_length": text_length} | (own or {})
    call = {"num_frames": frames, "max_sequence_length": text_length}
    return Case(policy, own, call, shown=OTHER if policy.endswith("i2v") else None, **options)


EMBEDDED = {"guide": partial(true_cfg, guidance_scale=6.0)}
FLUX = partial(true_cfg, guidance_scale=3.5)
KONTEXT = {"max_area": 16 * 32, "_auto_resize": False, "guidance_scale": 2.5}
SANA = {"use_resolution_binning": False, "max_sequence_length": 16}
CASES = {
    "sd": Case("sd", {"size": 16}),
    "sd-v": Case("sd", {"size": 16}),
    "sdxl": Case("sdxl", {"size": 16}),
    "flux": packed("flux", 16, {"size": 16}, FLUX),
    "flux-schnell": packed("flux", 16, guide=FLUX),
    "sana": Case("sana", {"size": [32, 64], "text_length": 16}, SANA),
    "sana-variance": Case("sana", {"size": 32, "text_length": 16}, SANA),
    "qwen_image": packed("qwen_image", 12),
    "z_image": Case(
        "z_image",
        {"size": [16, 32], "text_length": 12},
        {"max_sequence_length": 12},
        guide=lambda scale: guided(scale - 1),
    ),
    "lcm": Case("lcm", {"size": [16, 32]}, guide=lambda scale: guided(8.5)),
    "flux2": Case(
        "flux2",
        {"size": [16, 32], "text_length": 12, "text_layers": [1, 2, 3]},
        {"max_sequence_length": 12, "text_encoder_out_layers": (1, 2, 3)},
    ),
    "flux_kontext": edit(
        packed("flux_kontext", 16, {"embedded_guidance": 2.5}, **KONTEXT), shown=(32, 16)
    ),
    "qwen_edit": edit(packed("qwen_edit", 64), shown=OTHER),
    "wan": film("wan", 5, 16),
    "wan-two": film("wan", 5, 16),
    "wan-tokens": film("wan", 5, 16),
    "wan_i2v": film("wan_i2v", 5, 16),
    "wan_i2v-tokens": film("wan_i2v", 5, 16, folder="wan-tokens"),
    "skyreels_i2v": film("skyreels_i2v", 5, 16),
    "ltx": film("ltx", 5, 16, {"size": [32, 64]}, layout=tokens),
    "cogvideox": film("cogvideox", 9, 16, {"steps": 4}),
    "hunyuan_video": film("hunyuan_video", 5, 64, **EMBEDDED),
    "hunyuan_i2v": film("hunyuan_i2v", 5, 96, **EMBEDDED),
    "hunyuan_i2v-joined": film("hunyuan_i2v", 9, 96, **EMBEDDED),
}
# The same families with other options, where only parity with the pipeline is of interest.
MORE = {
    "z_image-normalised": Case(
        "z_image",
        {"size": 16, "text_length": 12, "normalise": 0.9},
        {"max_sequence_length": 12, "cfg_normalization": 0.9},
        guide=lambda scale: guided(scale - 1),
        folder="z_image",
    ),
    "flux_kontext-sized": edit(
        packed(
            "flux_kontext",
            16,
            {"size": 16, "image_size": [16, 32], "embedded_guidance": 2.5},
            **KONTEXT | {"max_area": 256},
        ),
        shown=(32, 16),
        folder="flux_kontext",
    ),
    "ltx-timed": film("ltx", 5, 16, {"size": [32, 64], "decode_time": 0.05}, layout=tokens),
    "cogvideox-joined": film("cogvideox", 9, 16, {"steps": 4}),
}
del CASES["qwen_edit"].call["max_sequence_length"]
MORE["ltx-timed"].call |= {"decode_timestep": 0.05, "decode_noise_scale": 0.0}
ALL = CASES | MORE
# Without guidance pipelines call their networks in another way.
# What is trained below is compared with its pipeline there.
LEARNT = ["lcm", "sana", "qwen_edit", "wan-two", "cogvideox"]  # test_lora_files reads others' files
WITH_MORE = ["wan", "ltx", "flux_kontext"]  # compared in another form of the same model
PARITY = [(name, 2.5) for name in ALL if name not in LEARNT + WITH_MORE] + [("sdxl", 1.0)]


def place_of(name):
    return str(tiny_diffusers.folder(ALL[name].folder or name))


def make(name, **options):
    case = ALL[name]
    torch.manual_seed(0)
    chosen = {"path": place_of(name), "steps": 3, "fixed_batch_rows": 4} | case.own | options
    return POLICIES.build(case.policy, **chosen)


def pipeline(name, policy):
    """The folder by diffusers alone."""
    pipe = getattr(diffusers, policy.pipeline).from_pretrained(place_of(name))
    pipe.set_progress_bar_config(disable=True)
    return pipe


HUNYUAN = {
    "prompt_embeds": "text",
    "pooled_prompt_embeds": "pooled",
    "prompt_attention_mask": "mask",
}


def call(pipe, policy, case, rollout, guidance, output="pt"):
    """The pipeline's own samples from the same first latents: row by row where it takes one
    image."""
    first = rollout.latents.states[:, 0]
    more = case.call | case.guide(guidance)
    if case.policy == "hunyuan_i2v":  # whose pipeline mixes the image in itself
        first = (first - 0.001 * rollout.cond["condition"][rollout.group]) / 0.999
        if guidance > 1:  # it would read the empty prompt with other image tokens
            empty = rollout.cond["uncond"]
            more |= {f"negative_{key}": empty[ours] for key, ours in HUNYUAN.items()}
            more["negative_prompt"] = None
    prompts = rollout.prompt_per_row()
    width = 1 if case.policy.endswith("i2v") else len(prompts)
    found = []
    for start in range(0, len(prompts), width):
        part = prompts[start : start + width]
        if more.get("negative_prompt") is not None:
            more["negative_prompt"] = [""] * width
        images = [prompt["image"] for prompt in part if "image" in prompt]
        found.append(
            pipe(
                prompt=[prompt["text"] for prompt in part],
                latents=case.layout(policy, first[start : start + width]),
                height=policy.size[0],
                width=policy.size[1],
                num_inference_steps=policy.steps,
                output_type=output,
                **more,
                **({"image": images if width > 1 else images[0]} if images else {}),
            )[0]
        )
    return torch.cat(found)


@pytest.fixture(autouse=True)
def alike(monkeypatch):
    """The pipeline of a consistency model draws what our sampler drew, and Qwen-Image-Edit's does
    not bring every image to a megapixel."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
    from diffusers.schedulers import scheduling_lcm

    steps = iter(range(1, 1000))

    def ours(shape, **_):
        step = (next(steps) - 1) % 2 + 1  # 3 steps: noise after the first two
        return Rng.of("same").normal(torch.arange(shape[0]), shape[1:], step)

    monkeypatch.setattr(scheduling_lcm, "randn_tensor", ours)
    monkeypatch.setattr(
        pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (32, 16, None)
    )


@pytest.mark.parametrize(("name", "guidance"), PARITY)
def test_without_noise_we_are_the_diffusers_pipeline(name, guidance):
    case, policy = ALL[name], make(name, fixed_batch_rows=None)
    with policy.evaluating(guidance), torch.no_grad():
        rollout = policy.rollout(case.prompts, 1, Rng.of("same"))
        ours = policy.decode(rollout)
    pipe = pipeline(name, policy)
    media = call(pipe, policy, case, rollout, guidance)
    torch.testing.assert_close(ours, media, atol=1e-4, rtol=0)
    if guidance > 1:  # the text has an effect
        others = zip(case.prompts, case.prompts[::-1])
        changed = rollout.replace(prompts=[one | {"text": two["text"]} for one, two in others])
        other = call(pipe, policy, case, changed, guidance)
        assert (other - media).abs().max() > 1e-4


def brightness(media, prompts):
    return media.flatten(1).mean(1)


def trainer_of(policy, prompts=PROMPTS, **options):
    sizes = {"prompts_per_iteration": 2, "group_size": 2, "train_batch_size": 4, "iterations": 3}
    return Trainer(
        policy,
        prompts,
        Scorer({"brightness": brightness}),
        advantages.dance_grpo,
        PolicyGradient(clip_range=1e-2),
        partial(adamw, lr=1e-2),
        TrainOptions(**sizes | options),
    )


@pytest.mark.parametrize("name", LEARNT)
def test_training_begins_on_policy_and_its_export_gives_the_plain_pipeline_our_media(
    name, tmp_path
):
    case, guidance = CASES[name], 1.0 if name == "lcm" else 2.5
    policy = make(name, lora=2, guidance_scale=guidance)
    trainer = trainer_of(policy, case.prompts)
    metrics = trainer.iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
    policy.export(tmp_path)
    moved = [key for key, p in policy.net.named_parameters() if "lora_B" in key and p.any()]
    two = name.endswith("-two")
    assert not two or {key.split(".")[0] for key in moved} == {"transformer", "transformer_2"}
    pipe = pipeline(name, policy)
    with policy.evaluating(guidance), torch.no_grad():
        rollout = policy.rollout(case.prompts, 1, Rng.of("same"))
        ours = policy.decode(rollout)
    before = call(pipe, policy, case, rollout, guidance)
    if two:  # an adapter for each expert
        pipe.load_lora_weights(tmp_path / "transformer")
        pipe.load_lora_weights(tmp_path / "transformer_2", load_into_transformer_2=True)
    else:
        pipe.load_lora_weights(tmp_path)
    after = call(pipe, policy, case, rollout, guidance)
    torch.testing.assert_close(ours, after, atol=1e-4, rtol=0)
    assert (after - before).abs().max() > 1e-4  # the training is seen


def test_a_checkpoint_resumes_to_the_bit(tmp_path):
    resumes(lambda: trainer_of(make("wan-two", lora=2, guidance_scale=2.5, steps=2)), tmp_path)
