"""The SD3 family on a folder of the real classes, against diffusers' own pipeline."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)

from mmrl import advantages
from mmrl.cli import commands
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import locate
from mmrl.experiment import build, evaluation
from mmrl.objectives import PolicyGradient
from mmrl.policies.lora import Lora
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.models.diffusion.sd3 import SD3
from samplers.kernels import dance_sde
from samplers.noise import Rng
from tests.fixtures import loads

PROMPTS = [{"text": text} for text in ("a red seven", "a blue two", "a green zero")]


@pytest.fixture(scope="module")
def folder():
    return str(loads.once(Path(locate("world:digits/sd3-test"))))


def make(folder, **options):
    torch.manual_seed(0)
    return SD3(folder, size=32, **{"steps": 2, "fixed_batch_rows": 12} | options)


def brightness(media, prompts):
    return media.flatten(1).mean(1)


def trainer_of(policy, **options):
    sizes = {"prompts_per_iteration": 3, "group_size": 4, "train_batch_size": 12, "iterations": 3}
    return Trainer(
        policy,
        PROMPTS,
        Scorer({"brightness": brightness}),
        advantages.dance_grpo,
        PolicyGradient(clip_range=1e-2, kl=0.1),
        partial(adamw, lr=1e-3),
        TrainOptions(**sizes | options),
    )


def variant(folder, target, kind):
    """Other shapes of the format: SD3.5's double attention and normalised queries, no T5, a shift
    by resolution."""
    parts = {}
    if kind == "sd3.5":
        torch.manual_seed(1)
        config = SD3Transformer2DModel.load_config(folder, subfolder="transformer")
        more = {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}
        parts["transformer"] = SD3Transformer2DModel.from_config({**config, **more})
    if kind == "no T5":
        parts |= {"text_encoder_3": None, "tokenizer_3": None}
    if kind == "dynamic shift":
        parts["scheduler"] = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    StableDiffusion3Pipeline.from_pretrained(folder, **parts).save_pretrained(target)
    return str(target)


def assert_is_diffusers(policy, place, guidance=1.0):
    """Latents and pictures without noise are those of the folder's own pipeline."""
    with policy.evaluating(guidance), torch.no_grad():
        rollout = policy.rollout(PROMPTS, 2, Rng.of("same"))
        ours = policy.decode(rollout)
    without = {} if policy.t5 else {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(place, **without)
    pipe.set_progress_bar_config(disable=True)
    length = 256 if pipe.tokenizer_3 is None else pipe.tokenizer_3.model_max_length
    for wanted, kind in ((rollout.sample, "latent"), (ours, "pt")):
        theirs = pipe(
            [p["text"] for p in rollout.prompt_per_row()],
            output_type=kind,
            latents=rollout.latents.states[:, 0],
            guidance_scale=guidance,
            num_inference_steps=policy.steps,
            height=32,
            width=32,
            max_sequence_length=length,
        ).images
        torch.testing.assert_close(wanted, theirs, atol=2e-5, rtol=0)
    return ours


@pytest.mark.parametrize(
    ("kind", "guidance", "steps"),
    [
        ("plain", 3.0, 1),
        ("sd3.5", 3.0, 4),
        ("no T5", 3.0, 4),
        ("dynamic shift", 3.0, 4),
    ],
)
def test_without_noise_we_are_the_diffusers_pipeline(folder, tmp_path, kind, guidance, steps):
    place = folder if kind == "plain" else variant(folder, tmp_path / "model", kind)
    assert_is_diffusers(make(place, steps=steps), place, guidance)


def test_the_first_step_is_exactly_on_policy_under_autocast(folder):
    options = {"sde_type": dance_sde, "noise_level": 0.3, "guidance_scale": 3.0, "lora": 4}
    policy = make(folder, logprob_guidance="guided_stopgrad_uncond", **options)
    metrics = trainer_of(policy, precision="bf16").iterate()
    assert metrics["ratio/max_deviation"] == 0.0
    assert metrics["clip_fraction"] == 0.0 and metrics["kl"] == 0.0
    assert metrics["grad_norm"] > 0 and metrics["step"] == 1


def test_commands_compute_as_training_does(tmp_path):
    """One rule: the network's own passes are in ``train.precision``, encoders and decoder as they
    were loaded. A bf16 decoder showed another picture than the one that training had rewarded."""
    (tmp_path / "prompts.txt").write_text("\n".join(prompt["text"] for prompt in PROMPTS))
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path))
    trainer = build.Session.of(build.read(tmp_path / "run.yaml", [])).trainer()
    one = build.base(tmp_path / "run.yaml")
    found = []
    for policy in (trainer.policy, one.policy):
        with commands.in_force(one, "live") if policy is one.policy else torch.no_grad():
            found.append(evaluation.sample(policy, PROMPTS, 2, seed=0)[0])
    assert torch.equal(*found) and found[0].dtype == torch.float32


RUN = """
policy: {{sd3: {{path: "world:digits/sd3-test", size: 32, steps: 3}}}}
data: {{prompts: {{path: "{folder}/prompts.txt"}}}}
reward: {{jpeg_compressibility: 1.0}}
objective: policy_gradient
optimizer: {{adamw: {{lr: 1e-3}}}}
train:
  {{prompts_per_iteration: 2, group_size: 4, train_batch_size: 4, iterations: 2, precision: bf16}}
"""


def test_gradient_checkpointing_changes_no_gradient(folder):
    runs = []
    for checkpointing in (False, True):
        trainer = trainer_of(make(folder), gradient_checkpointing=checkpointing)
        assert trainer.policy.net.is_gradient_checkpointing is checkpointing
        trainer.iterate()
        runs.append(trainer.policy.weights.full())
    for name, value in runs[0].items():
        torch.testing.assert_close(value, runs[1][name], atol=1e-6, rtol=0)


def test_an_export_of_all_weights_is_what_diffusers_loads(folder, tmp_path):
    policy = make(folder)
    before = assert_is_diffusers(policy, folder)
    trainer_of(policy).iterate()
    policy.export(tmp_path)
    assert (assert_is_diffusers(policy, tmp_path) - before).abs().max() > 1e-4


@pytest.mark.parametrize("placement", ["offload", "release"])
def test_prompts_are_encoded_once_and_encoders_leave(folder, placement):
    policy = make(folder, text_encoder_placement=placement)
    calls = []
    encode = policy.encode_texts
    policy.texts.encode = lambda pipe, texts, device: (
        calls.append(texts) or encode(pipe, texts, device)
    )
    policy.prepare(PROMPTS)
    for _ in range(2):
        cond = policy.encode([*PROMPTS, PROMPTS[0]])
    assert cond["text"].shape[0] == 4 and cond["uncond"]["text"].shape[0] == 1
    assert torch.equal(cond["text"][0], cond["text"][3])
    assert sorted(sum(calls, [])) == sorted(["", *(p["text"] for p in PROMPTS)])
    assert (policy.texts.pipeline is None) == (placement == "release")
    policy.encode([{"text": "a new one"}])
    assert calls[-1] == ["a new one"]


def test_a_wrong_folder_or_size_is_one_sentence(folder, tmp_path):
    with pytest.raises(UserError, match="no model_index.json"):
        SD3(str(tmp_path))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(UserError, match="holds a FluxPipeline, expected StableDiffusion3"):
        SD3(str(tmp_path))
    with pytest.raises(UserError, match="size 33 is not a multiple of 8; the nearest are 32 and"):
        SD3(folder, size=33)
    with pytest.raises(UserError, match=r"size 8192 is more than the \d+ pixels a side"):
        SD3(folder, size=8192)
    with pytest.raises(UserError, match="nobody/nothing/transformer: .* cannot load it"):
        SD3("nobody/nothing")
    with pytest.raises(UserError, match="lora.targets match no module"):
        make(folder, lora=Lora(2, targets=["no_such_layer"]))
