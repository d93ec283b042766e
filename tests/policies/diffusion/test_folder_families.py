"""Every family in diffusers' folder format against diffusers' own pipeline, and what every policy
must keep."""

from __future__ import annotations

import json
import shutil
from functools import partial

import diffusers
import pytest
import torch

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
VIDEO = {"size": [16, 32], "frames": 5, "text_length": 16}
# name -> policy, its options, how its latents go into the pipeline, further arguments of the
# pipeline's call
CASES = {
    "sd": ("sd", {"size": 16}, None, {}),
    "sd-v": ("sd", {"size": 16}, None, {}),
    "sdxl": ("sdxl", {"size": 16}, None, {}),
    "flux": ("flux", {"size": 16, "text_length": 16}, pack, {"max_sequence_length": 16}),
    "flux-schnell": (
        "flux",
        {"size": [16, 32], "text_length": 16},
        pack,
        {"max_sequence_length": 16},
    ),
    "wan": ("wan", VIDEO, None, {"max_sequence_length": 16, "num_frames": 5}),
    "wan-two": ("wan", VIDEO, None, {"max_sequence_length": 16, "num_frames": 5}),
    "wan-tokens": ("wan", VIDEO, None, {"max_sequence_length": 16, "num_frames": 5}),
}
GUIDED = {"flux": "true_cfg_scale", "flux-schnell": "true_cfg_scale"}  # others: guidance_scale


def make(case, **options):
    name, own, _, _ = CASES[case]
    torch.manual_seed(0)
    chosen = (
        {"path": str(tiny_diffusers.folder(case)), "steps": 3, "fixed_batch_rows": 4}
        | own
        | options
    )
    return POLICIES.build(name, **chosen)


def call(pipe, policy, case, rollout, guidance, steps, output):
    """The pipeline's own samples from the same first latents."""
    _, _, layout, more = CASES[case]
    first = rollout.latents.states[:, 0]
    if case in GUIDED:
        more = more | {GUIDED[case]: guidance, "guidance_scale": policy.embedded_guidance}
        if guidance > 1:
            more |= {"negative_prompt": [""] * len(first)}
    else:
        more = more | {"guidance_scale": guidance}
    texts = [p["text"] for p in rollout.prompt_per_row()]
    height, width = policy.size
    return pipe(
        texts,
        latents=layout(first) if layout else first,
        num_inference_steps=steps,
        height=height,
        width=width,
        output_type=output,
        **more,
    )[0]


@pytest.mark.parametrize("guidance", [1.0, 2.5])
@pytest.mark.parametrize("case", CASES)
def test_without_noise_we_are_the_diffusers_pipeline(case, guidance):
    policy = make(case, fixed_batch_rows=None)
    with policy.evaluating(guidance), torch.no_grad():
        rollout = policy.rollout(PROMPTS, 2, Rng.of("same"))
        ours = policy.decode(rollout)
    pipe = getattr(diffusers, policy.pipeline).from_pretrained(str(tiny_diffusers.folder(case)))
    pipe.set_progress_bar_config(disable=True)
    latents = call(pipe, policy, case, rollout, guidance, 3, "latent")
    images = call(pipe, policy, case, rollout, guidance, 3, "pt")
    layout = CASES[case][2]
    torch.testing.assert_close(
        layout(rollout.sample) if layout else rollout.sample, latents, atol=1e-4, rtol=0
    )
    torch.testing.assert_close(ours, images, atol=1e-4, rtol=0)
    assert (images[0] - images[2]).abs().max() > 1e-5  # the prompt has an effect


def brightness(media, prompts):
    return media.flatten(1).mean(1)


def trainer_of(policy, **options):
    sizes = {
        "prompts_per_iteration": 2,
        "group_size": 2,
        "train_batch_size": 4,
        "iterations": 3,
    } | options
    return Trainer(
        policy,
        PROMPTS,
        Scorer({"brightness": brightness}),
        advantages.dance_grpo,
        PolicyGradient(clip_range=1e-2),
        partial(adamw, lr=1e-2),
        TrainOptions(**sizes),
    )


@pytest.mark.parametrize(
    "options", [{}, {"guidance_scale": 2.5, "lora": 2}], ids=["full", "guided lora"]
)
@pytest.mark.parametrize("case", CASES)
def test_the_first_step_is_exactly_on_policy(case, options):
    metrics = trainer_of(make(case, **options)).iterate()
    assert (
        metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0 and metrics["step"] == 1
    )


@pytest.mark.parametrize("case", CASES)
def test_an_exported_adapter_gives_the_plain_pipeline_our_images(case, tmp_path):
    policy = make(case, lora=2, fixed_batch_rows=None)
    trainer = trainer_of(policy)
    trainer.iterate(), trainer.iterate()
    policy.export(tmp_path)
    moved = [name for name, p in policy.net.named_parameters() if "lora_B" in name and p.any()]
    assert case != "wan-two" or {name.split(".")[0] for name in moved} == {
        "transformer",
        "transformer_2",
    }
    pipe = getattr(diffusers, policy.pipeline).from_pretrained(str(tiny_diffusers.folder(case)))
    pipe.set_progress_bar_config(disable=True)
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(PROMPTS, 2, Rng.of("same"))
        ours = policy.decode(rollout)
    before = call(pipe, policy, case, rollout, 1.0, 3, "pt")
    if case == "wan-two":  # an adapter for each expert
        pipe.load_lora_weights(tmp_path / "transformer")
        pipe.load_lora_weights(tmp_path / "transformer_2", load_into_transformer_2=True)
    else:
        pipe.load_lora_weights(tmp_path)
    after = call(pipe, policy, case, rollout, 1.0, 3, "pt")
    torch.testing.assert_close(ours, after, atol=1e-4, rtol=0)
    assert (after - before).abs().max() > 1e-4  # the training is seen


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_resumes_to_the_bit(case, tmp_path):
    def fresh():
        return trainer_of(make(case, lora=2, guidance_scale=2.5, steps=2))

    resumes(fresh, tmp_path)


# What the folders of the hub hold: solvers whose steps have no density.
HUB = {"num_train_timesteps": 1000}
DISCRETE = HUB | {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
}
SCHEDULERS = {
    "sd": DISCRETE | {"_class_name": "PNDMScheduler", "trained_betas": None},
    "sdxl": DISCRETE | {"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "leading"},
    "wan": HUB
    | {
        "_class_name": "UniPCMultistepScheduler",
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": 3.0,
    },
}


def with_scheduler(case, target):
    shutil.copytree(tiny_diffusers.folder(case), target)
    (target / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULERS[case]))
    index = json.loads((target / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", SCHEDULERS[case]["_class_name"]]
    (target / "model_index.json").write_text(json.dumps(index))
    return str(target)


@pytest.mark.parametrize("case", ["sd", "sdxl"])
def test_a_folder_of_the_hub_is_sampled_by_ddim_with_its_own_settings(case, tmp_path):
    place = with_scheduler(case, tmp_path / "model")
    policy = make(case, path=place, fixed_batch_rows=None, steps=4)
    with policy.evaluating(2.5), torch.no_grad():
        rollout = policy.rollout(PROMPTS, 1, Rng.of("same"))
    pipe = getattr(diffusers, policy.pipeline).from_pretrained(place)
    pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    latents = call(pipe, policy, case, rollout, 2.5, 4, "latent")
    torch.testing.assert_close(rollout.sample, latents, atol=1e-4, rtol=0)


def test_wans_own_times_begin_at_one(tmp_path):
    """UniPC begins a millionth below, where the first step of the Flow-SDE would have a hundred
    times its noise."""
    policy = make("wan", path=with_scheduler("wan", tmp_path / "model"), steps=5, noise_level=0.7)
    scheduler = diffusers.UniPCMultistepScheduler.from_pretrained(
        policy.place, subfolder="scheduler"
    )
    scheduler.set_timesteps(5)
    torch.testing.assert_close(policy.times, scheduler.sigmas.double(), atol=2e-6, rtol=0)
    assert policy.times[0] == 1 and policy.times[-1] == 0
    with torch.no_grad():
        first = next(iter(policy.path(policy.rollout(PROMPTS, 1, Rng.of("same")))))
        assert policy.dist(first).std.flatten().tolist() == pytest.approx([0.7] * 2)
