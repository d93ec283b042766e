"""The SD3 family on a folder of the real classes, against diffusers' own pipeline."""

import json
from functools import partial

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
from mmrl.core.metrics import Meter
from mmrl.core.registry import locate
from mmrl.experiment import build, evaluation
from mmrl.objectives import PolicyGradient
from mmrl.policies.lora import Lora
from mmrl.scoring import Scorer
from mmrl.train.minibatches import Points, passes
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.models.diffusion.sd3 import SD3
from samplers.kernels import dance_sde
from samplers.noise import Rng
from samplers.windows import all_but_last
from tests.experiment.test_resume import resumes

PROMPTS = [{"text": text} for text in ("a red seven", "a blue two", "a green zero")]


@pytest.fixture(scope="module")
def folder():
    return locate("world:digits/sd3-test")


def make(folder, **options):
    torch.manual_seed(0)
    return SD3(folder, size=32, **{"steps": 4, "fixed_batch_rows": 12} | options)


def brightness(media, prompts):
    return media.flatten(1).mean(1)


def trainer_of(policy, kl=0.1, **options):
    sizes = {
        "prompts_per_iteration": 3,
        "group_size": 4,
        "train_batch_size": 12,
        "iterations": 3,
    } | options
    return Trainer(
        policy,
        PROMPTS,
        Scorer({"brightness": brightness}),
        advantages.dance_grpo,
        PolicyGradient(clip_range=1e-2, kl=kl),
        partial(adamw, lr=1e-3),
        TrainOptions(**sizes),
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


@pytest.mark.parametrize("kind", ["sd3.5", "no T5", "dynamic shift"])
def test_every_shape_of_the_format_is_the_diffusers_pipeline(folder, tmp_path, kind):
    test_without_noise_we_are_the_diffusers_pipeline(
        variant(folder, tmp_path / "model", kind), 3.0, 4
    )


@pytest.mark.parametrize(("guidance", "steps"), [(1.0, 4), (3.0, 1)])
def test_without_noise_we_are_the_diffusers_pipeline(folder, guidance, steps):
    policy = make(folder, steps=steps)
    with policy.evaluating(guidance), torch.no_grad():
        rollout = policy.rollout(PROMPTS, 2, Rng.of("same"))
        ours = policy.decode(rollout)
    without = {} if policy.t5 else {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, **without)
    pipe.set_progress_bar_config(disable=True)
    common = {
        "latents": rollout.latents.states[:, 0],
        "guidance_scale": guidance,
        "num_inference_steps": steps,
    }
    length = 256 if pipe.tokenizer_3 is None else pipe.tokenizer_3.model_max_length
    sizes = {"height": 32, "width": 32, "max_sequence_length": length}
    texts = [p["text"] for p in rollout.prompt_per_row()]
    latents = pipe(texts, output_type="latent", **common, **sizes).images
    theirs = pipe(texts, output_type="pt", **common, **sizes).images
    torch.testing.assert_close(rollout.sample, latents, atol=2e-5, rtol=0)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


CASES = {
    "dance_sde": {"sde_type": dance_sde, "noise_level": 0.3, "noise_window": all_but_last},
    "stopgrad": {"guidance_scale": 3.0, "logprob_guidance": "guided_stopgrad_uncond"},
    "conditional": {"guidance_scale": 3.0, "logprob_guidance": "conditional"},
    "lora guided dance": {
        "lora": 4,
        "guidance_scale": 3.0,
        "sde_type": dance_sde,
        "noise_level": 0.3,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_step_is_exactly_on_policy(folder, case):
    metrics = trainer_of(make(folder, **CASES[case]), precision="bf16").iterate()
    assert metrics["ratio/max_deviation"] == 0.0
    assert metrics["clip_fraction"] == 0.0 and metrics["kl"] == 0.0
    assert metrics["grad_norm"] > 0 and metrics["step"] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_scored_as_sampled(folder, dtype):
    policy = make(folder, dtype=dtype, lora=4, trajectory_dtype=dtype)
    metrics = trainer_of(policy).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["kl"] == 0.0
    kept = policy.net.transformer_blocks[0].attn.to_q
    assert (
        kept.base_layer.weight.dtype == getattr(torch, dtype)
        and kept.lora_A.default.weight.dtype == torch.float32
    )


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
policy: {{sd3: {{path: "world:digits/sd3-test", size: 32, steps: 3, noise_window: all_but_last}}}}
data: {{prompts: {{path: "{folder}/prompts.txt"}}}}
reward: {{jpeg_compressibility: 1.0}}
advantage: dance_grpo
objective: {{policy_gradient: {{clip_range: 1e-3}}}}
optimizer: {{adamw: {{lr: 1e-3}}}}
train:
  {{prompts_per_iteration: 2, group_size: 4, train_batch_size: 4, iterations: 2,
    precision: bf16}}
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


def test_micro_batches_change_no_gradient(folder):
    runs = []
    for micro in (1, 3, 12):
        policy = make(folder, fixed_batch_rows=None, guidance_scale=2.0)
        policy.net.double()
        trainer = trainer_of(policy, micro_batch_size=micro)
        # rewards are float32, and the decoder: the advantage is therefore fixed here
        batch = trainer.collect()
        rollout = batch.rollout
        rollout = rollout.replace(
            logprob=rollout.logprob + 0.01, advantage=(rollout.row_id % 5 - 2.0).double()[:, None]
        )
        points = list(trainer.objective.points(policy, rollout, Rng.of(0)))
        total = float(sum(p.mask.sum() for p in points))
        trainer.update._accumulate(
            batch, Points(partial(iter, points)), total, Rng.of(0), micro, Meter()
        )
        runs.append(
            (torch.cat([p.grad.flatten() for p in policy.net.parameters()]), rollout.sample)
        )
    for gradient, sample in runs[1:]:
        torch.testing.assert_close(gradient, runs[0][0], atol=1e-10, rtol=0)
        torch.testing.assert_close(sample, runs[0][1], atol=1e-10, rtol=0)


def test_scoring_a_mixed_pass_equals_scoring_step_by_step(folder):
    policy = make(folder, guidance_scale=2.0)
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 4, Rng.of(0))
        apart = torch.cat([policy.dist(p).log_prob(p.target) for p in policy.path(rollout)])
        mixed = torch.cat(
            [policy.dist(p).log_prob(p.target) for p in passes(policy.path(rollout), 5)]
        )
    torch.testing.assert_close(apart, mixed, atol=1e-6, rtol=0)


def test_training_raises_the_reward(folder):
    policy = make(folder, noise_window=all_but_last)
    # the decoder of the test folder is hardly trained
    policy.decode = lambda rollout: rollout.sample[:, :3]
    trainer = trainer_of(policy, kl=0.0, group_size=16, train_batch_size=24, iterations=15)
    found = [trainer.iterate() for _ in range(15)]
    rewards = [f["reward/mean"] for f in found]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 2 * found[0]["reward/std"]


@pytest.mark.parametrize("lora", [4, None])
def test_export_is_what_diffusers_loads(folder, tmp_path, lora):
    policy = make(folder, lora=lora)
    trainer = trainer_of(policy)
    for _ in range(2):
        trainer.iterate()
    policy.export(tmp_path)
    if lora:
        assert (tmp_path / "pytorch_lora_weights.safetensors").exists()
        pipe = StableDiffusion3Pipeline.from_pretrained(folder)
        pipe.load_lora_weights(tmp_path)
    else:
        pipe = StableDiffusion3Pipeline.from_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(PROMPTS, 1, Rng.of("same"))
        ours = policy.decode(rollout)
        base_like = make(folder)
        with base_like.evaluating():
            untrained = base_like.rollout(PROMPTS, 1, Rng.of("same")).sample
    latents, images = (
        pipe(
            [p["text"] for p in PROMPTS],
            latents=rollout.latents.states[:, 0],
            guidance_scale=1.0,
            num_inference_steps=4,
            height=32,
            width=32,
            max_sequence_length=pipe.tokenizer_3.model_max_length,
            output_type=kind,
        ).images
        for kind in ("latent", "pt")
    )
    torch.testing.assert_close(rollout.sample, latents, atol=2e-5, rtol=0)
    torch.testing.assert_close(ours, images, atol=2e-5, rtol=0)
    assert (rollout.sample - untrained).abs().max() > 1e-3


def test_a_checkpoint_resumes_to_the_bit(folder, tmp_path):
    def fresh():
        return trainer_of(make(folder, lora=4, guidance_scale=3.0, steps=2))

    resumes(fresh, tmp_path)


@pytest.mark.parametrize("placement", ["keep", "offload", "release"])
def test_prompts_are_encoded_once_and_encoders_leave(folder, placement, monkeypatch):
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
    with pytest.raises(
        UserError, match="size 33 is not a multiple of 8; the nearest are 32 and 40"
    ):
        SD3(folder, size=33)
    with pytest.raises(UserError, match="nobody/nothing/transformer: .* cannot load it"):
        SD3("nobody/nothing")
    with pytest.raises(UserError, match="lora.targets match no module"):
        make(folder, lora=Lora(2, targets=["no_such_layer"]))


def test_the_folder_decides_the_time_grid(folder):
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, transformer=None, vae=None)
    pipe.scheduler.set_timesteps(7)
    torch.testing.assert_close(
        make(folder, steps=7).times.float(), pipe.scheduler.sigmas, atol=1e-6, rtol=0
    )


def test_seeds_make_adapters_reproducible():
    build.seed_everything(3)
    one = torch.nn.Linear(3, 3).weight
    build.seed_everything(3)
    assert torch.equal(torch.nn.Linear(3, 3).weight, one)
