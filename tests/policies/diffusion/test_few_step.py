"""Sampling in few steps: an exported student, loaded by plain diffusers, makes our pictures."""

import json

import diffusers
import pytest
import torch
from diffusers.schedulers import scheduling_flow_match_lcm, scheduling_lcm

from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from samplers.noise import Rng
from samplers.windows import all_but_last, between_steps
from tests.fixtures import tiny_diffusers

load_built_in()
PROMPTS = [{"text": "a red seven"}, {"text": "a blue two"}]


FOLDERS = {"sd3": lambda: "world:digits/sd3-test"}
SIZE = 32


def make(name, **options):
    folder = FOLDERS.get(name, lambda: str(tiny_diffusers.folder(name)))()
    return POLICIES.build(name, path=folder, size=SIZE, scheduler="lcm", **options)


@pytest.fixture
def our_noise(monkeypatch):
    """The pipeline draws what our sampler drew; the list is set to the steps that have noise."""
    steps: list[int] = []

    def ours(shape, **_):
        return Rng.of("same").normal(torch.arange(shape[0]), shape[1:], steps.pop(0))

    monkeypatch.setattr(scheduling_lcm, "randn_tensor", ours)
    monkeypatch.setattr(scheduling_flow_match_lcm, "randn_tensor", ours)
    return steps


@pytest.mark.parametrize(
    ("name", "scheduler"), [("sd3", "FlowMatchLCMScheduler"), ("sd", "LCMScheduler")]
)
def test_an_exported_student_gives_plain_diffusers_our_images(name, scheduler, our_noise, tmp_path):
    policy = make(name, steps=4)
    policy.export(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["scheduler"][1] == scheduler
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe.scheduler).__name__ == scheduler
    for steps in (3, 1):
        policy.evaluation_times = policy.own_grid()(steps)
        with policy.evaluating(), torch.no_grad():
            rollout = policy.rollout(PROMPTS, 1, Rng.of("same"))
        assert rollout.trajectory.time.shape[1] == steps + 1 and not rollout.mask.any()
        our_noise[:] = range(1, steps + 1)
        theirs = pipe(
            prompt=[prompt["text"] for prompt in PROMPTS],
            latents=rollout.latents.states[:, 0].clone(),
            height=SIZE,
            width=SIZE,
            num_inference_steps=steps,
            guidance_scale=1.0,
            output_type="latent",
            **({"max_sequence_length": pipe.tokenizer_3.model_max_length} if name == "sd3" else {}),
        )[0]
        torch.testing.assert_close(rollout.sample, theirs, atol=2e-5, rtol=0)
    # its noise is new: without it the pictures of three steps are others
    with policy.evaluating(), torch.no_grad():
        assert not torch.equal(policy.rollout(PROMPTS, 1, Rng.of("other")).sample, rollout.sample)


def test_an_adapter_comes_with_its_scheduler(tmp_path):
    make("sd3", lora=2).export(tmp_path)
    chosen = diffusers.FlowMatchLCMScheduler.from_pretrained(tmp_path, subfolder="scheduler")
    ours = make("sd3").own_grid()(4)
    chosen.set_timesteps(4)
    torch.testing.assert_close(chosen.sigmas.double(), ours, atol=1e-6, rtol=0)


def test_few_steps_have_noise_between_them():
    assert torch.equal(between_steps(4), all_but_last(4)) and not between_steps(1).any()


def test_a_folder_with_other_times_is_refused():
    with pytest.raises(UserError, match="scheduler: lcm is for folders with a FlowMatchEuler"):
        make("cogvideox", frames=5)
