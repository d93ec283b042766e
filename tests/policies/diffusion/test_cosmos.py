"""Cosmos by the policy ``pipeline``: its states, which grow with their noise, are those of a flow,
and its guardrail is left out only where a user says so."""

from __future__ import annotations

import json
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from torch.distributions import Normal

from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES
from mmrl.policies.diffusion import pipeline_folder
from mmrl.policies.diffusion.guardrails import Passing, Remembering
from mmrl.policies.diffusion.pipeline_folder import rounding
from mmrl.zoo.models.any_pipeline.replay_check import check_replay
from mmrl.zoo.models.any_pipeline.replay_draws import Draws
from samplers.kernels import flow_sde
from tests.fixtures.replay_cases import CASES
from tests.policies.diffusion.test_any_pipeline import (
    PROMPTS,
    RED,
    RNG,
    assert_on_policy,
    evaluated,
    make,
    place_of,
    sampled,
)

SMALLEST = 0.002  # sigma at which Cosmos 2 ends
ONE = PROMPTS[:1]


def loaded(name, place=None):
    """The folder by diffusers alone, whose class is given a guardrail that passes everything."""
    cls = getattr(diffusers, CASES[name].pipeline)
    pipe = cls.from_pretrained(place or place_of(name), safety_checker=Passing())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def euler_of(pipe):
    """Its own solver, UniPC, without its history."""
    euler = {"solver_order": 1, "disable_corrector": list(range(9))}
    unipc = diffusers.UniPCMultistepScheduler
    pipe.scheduler = unipc.from_config(pipe.scheduler.config, **euler)
    return pipe


def called(name, pipe, noise, guidance, steps=4, output_type="latent", **more):
    call = CASES[name].call | ({"image": RED} if name.endswith("-video") else {}) | more
    with Draws(noise):
        media = pipe(
            prompt=PROMPTS[0]["text"],
            num_inference_steps=steps,
            guidance_scale=guidance,
            output_type=output_type,
            return_dict=False,
            generator=torch.Generator().manual_seed(0),
            **call,
        )[0]
    return media.float()


def first_noise(policy):
    return RNG.normal(torch.arange(1), policy.shape, 0, torch.float32)


@pytest.mark.parametrize("name", ["cosmos2", "cosmos1-video"])
def test_latents_and_pictures_are_those_of_its_own_pipeline(name):
    guidance = 2.5
    policy = make(name, guidance_scale=guidance, fixed_batch_rows=None)
    rollout, ours = evaluated(policy, ONE)
    pipe = loaded(name)
    latents = called(name, pipe, first_noise(policy), guidance)
    sample = rollout.sample[:, :, 0] if name == "cosmos2" else rollout.sample
    torch.testing.assert_close(sample * (1 + SMALLEST), latents, atol=1e-4, rtol=0)
    theirs = called(name, pipe, first_noise(policy), guidance, output_type="pt")
    torch.testing.assert_close(ours, theirs, atol=1e-4 + rounding(theirs), rtol=0)
    if name == "cosmos1-video":  # which draws in its steps, by a row's place
        policy = make(name, steps=3, check=True)
        assert_on_policy(policy)
        assert policy.together is False


def test_cosmos25_goes_on_from_the_picture_that_it_holds():
    """Whose velocity is that from its first noise, which a replay begins in any step without."""
    call = CASES["cosmos25"].call | {"num_frames": 9}
    inputs = {"prompt": "text", "image": "image"}
    policy = make("cosmos25", call, guidance_scale=2.5, inputs=inputs, check=True)
    policy.prepare(ONE)
    rollout, ours = evaluated(policy, ONE)
    pipe = euler_of(loaded("cosmos25"))
    given = {"image": RED, "num_frames": 9}
    latents = called("cosmos25", pipe, first_noise(policy), 2.5, **given)
    torch.testing.assert_close(rollout.sample, latents, atol=1e-4, rtol=0)
    with torch.no_grad():  # though noise of the last step lies on them, they are shown as they are
        noisy = policy.decode(sampled(policy, 2, ONE))
    torch.testing.assert_close(noisy[:, 0], ours[:, 0].expand_as(noisy[:, 0]), atol=1e-4, rtol=0)
    assert (noisy[0, -1] - noisy[1, -1]).abs().max() > 1e-2


def test_the_times_are_the_sigmas_and_the_empty_last_step_is_none():
    policy = make("cosmos2", steps=5)
    edges = [rho ** (1 / 7) for rho in (80.0, SMALLEST)]
    sigmas = [(edges[0] + k / 4 * (edges[1] - edges[0])) ** 7 for k in range(5)]
    assert policy.times.tolist() == pytest.approx([s / (1 + s) for s in sigmas], rel=1e-5)
    assert policy.steps == 4
    x = RNG.normal(torch.arange(2), policy.shape, 0, torch.float32)
    with torch.no_grad():  # the ends are passed as the largest and the smallest sigma
        ends = policy.velocity(x, torch.tensor([1.0, 0.0]), policy.encode(PROMPTS))
    assert ends.isfinite().all()


def test_the_log_prob_is_that_of_a_flow_of_what_its_scheduler_is_handed(monkeypatch):
    guidance = 2.5
    policy = make(
        "cosmos2", guidance_scale=guidance, logprob_reduction="sum", fixed_batch_rows=None
    )
    rollout = sampled(policy, 1, ONE)
    handed = []
    step = diffusers.FlowMatchEulerDiscreteScheduler.step

    def listening(self, output, t, sample, **more):
        handed.append((output, sample, self.sigmas[len(handed)]))
        return step(self, output, t, sample, **more)

    monkeypatch.setattr(diffusers.FlowMatchEulerDiscreteScheduler, "step", listening)
    point = next(iter(policy.path(rollout)))
    sigma = point.time / (1 - point.time)
    called("cosmos2", loaded("cosmos2"), point.state * (1 + sigma) / 80, guidance)
    noise, state, first = handed[0]
    torch.testing.assert_close(first[None], sigma, atol=1e-3, rtol=1e-5)
    velocity = noise - (state - first * noise)  # e - x_0
    times = [point.time, point.transition.next_time, point.transition.noise_level]
    mean, std = flow_sde(point.state, velocity, *times, second=times[1])
    logprob = Normal(mean, std).log_prob(point.target).flatten(1).sum(1)
    torch.testing.assert_close(rollout.logprob[:, 0], logprob, atol=2e-3, rtol=1e-5)


def test_rewards_gradients_are_refused_where_pictures_cut_them_off():
    policy = make("cosmos2")
    rollout = sampled(policy, 1, ONE)
    leaf = rollout.sample.clone().requires_grad_()
    with pytest.raises(UserError, match="pictures through which no gradient goes"):
        policy.decode(rollout.replace(sample=leaf))


# --------------------------------------------------------------------------------------------------
# the guardrail


class Checker(torch.nn.Module):
    """The package's interface: rejects a word, darkens what it sees, counts its work."""

    def __init__(self):
        super().__init__()
        self.read = []
        self.places = []

    def to(self, device=None, dtype=None):
        self.places.append(str(device))

    def check_text_safety(self, prompt):
        self.read.append(prompt)
        return "forbidden" not in prompt

    def check_video_safety(self, frames):
        return None if frames.mean() < 1 else frames // 2


@pytest.fixture
def guarded(monkeypatch):
    """The package as if it were installed."""
    from diffusers.pipelines.cosmos import pipeline_cosmos2_text2image as module

    made = []

    def build():
        made.append(Checker())
        return made[-1]

    monkeypatch.setattr(module, "CosmosSafetyChecker", build)
    policy = make("cosmos2", guardrail=True, fixed_batch_rows=None)
    return SimpleNamespace(policy=policy, checker=made[0])


def test_without_the_package_it_is_one_sentence_that_names_both_remedies():
    says = "pip install cosmos_guardrail.* guardrail to false"
    with pytest.raises(UserError, match=says) as said:
        POLICIES.build("pipeline", path=place_of("cosmos2"))
    assert "\n" not in str(said.value)


def test_a_package_that_cannot_be_imported_is_one_sentence(monkeypatch):
    """Such as one installed without its dependencies: diffusers raises when it is asked."""

    def broken(*_):
        raise RuntimeError("Failed to import the pipeline:\nno cv2 here")

    monkeypatch.setattr(pipeline_folder, "find_class", broken)
    with pytest.raises(UserError, match="cannot be imported: no cv2 here; install what is missing"):
        make("cosmos2")


def test_where_the_package_is_installed_it_is_used_by_default(guarded, tmp_path):
    policy, checker = guarded.policy, guarded.checker
    _, ours = evaluated(policy, ONE)
    _, plain = evaluated(make("cosmos2", fixed_batch_rows=None), ONE)
    torch.testing.assert_close(ours, (plain * 255).round() // 2 / 255)
    # a prompt is read once, though the pipeline is called for every step, and work is on the device
    assert sorted(checker.read) == sorted({"a", ONE[0]["text"]})
    assert checker.places == ["cpu"] * len(checker.places)
    assert isinstance(policy.replay.pipe.safety_checker, Checker)
    policy.export(tmp_path)  # which names no class of the package
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["safety_checker"] == [None, None]


def test_a_prompt_that_it_rejects_is_one_sentence_and_a_picture_that_it_blocks_is_black(guarded):
    prompts = [*PROMPTS, {"text": "a forbidden seven"}]
    with pytest.raises(UserError, match="the prompt 'a forbidden seven': Cosmos Guardrail") as said:
        guarded.policy.rollout(prompts, 1, RNG)
    assert "\n" not in str(said.value)
    with pytest.raises(UserError, match="Cosmos Guardrail detected unsafe"):
        check_replay(guarded.policy, prompts[2:])
    dark = np.zeros((1, 4, 4, 3), np.uint8)
    shown = guarded.policy.replay.pipe.safety_checker.check_video_safety(dark)
    assert shown.shape == dark.shape and not shown.any()


def test_it_works_on_the_network_device_and_waits_on_the_cpu():
    checker = Checker()
    wrapped = Remembering(checker)
    wrapped.to("cuda:3")
    wrapped.to("cpu")
    assert wrapped.check_text_safety("a seven") and wrapped.check_text_safety("a seven")
    assert checker.places == ["cuda:3", "cpu"] and checker.read == ["a seven"]
