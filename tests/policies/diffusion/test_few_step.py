"""Sampling in few steps: an exported student, loaded by plain diffusers, makes our pictures."""

from functools import partial

import diffusers
import pytest
import torch
from diffusers.schedulers import scheduling_flow_match_lcm, scheduling_lcm

from mmrl.core.errors import UserError
from samplers.noise import Rng
from tests.policies.diffusion.test_folder_families import CASES, call
from tests.policies.diffusion.test_folder_families import make as family

make = partial(family, scheduler="lcm", fixed_batch_rows=None)


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
    ("name", "scheduler"), [("z_image", "FlowMatchLCMScheduler"), ("sd", "LCMScheduler")]
)
def test_an_exported_student_gives_plain_diffusers_our_images(name, scheduler, our_noise, tmp_path):
    case = CASES[name]
    policy = make(name, steps=4)
    policy.export(tmp_path)
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe.scheduler).__name__ == scheduler
    for steps in (3, 1):
        policy.steps = steps
        policy.evaluation_times = policy.own_grid()(steps)
        with policy.evaluating(), torch.no_grad():
            rollout = policy.rollout(case.prompts, 1, Rng.of("same"))
        assert rollout.latents.time.shape[1] == steps + 1 and not rollout.mask.any()
        our_noise[:] = range(1, steps + 1)
        theirs = call(pipe, policy, case, rollout, 1.0, "latent")
        torch.testing.assert_close(rollout.sample, theirs, atol=2e-5, rtol=0)


def test_a_folder_with_other_times_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "mmrl.policies.diffusion.few_step._config", lambda place: {"_class_name": "UniPC"}
    )
    with pytest.raises(UserError, match="scheduler: lcm is for folders with a FlowMatch.* UniPC"):
        make("z_image")
