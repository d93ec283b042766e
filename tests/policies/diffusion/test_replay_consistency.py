"""Consistency models by the policy ``pipeline``: their samplers' own noise makes the decisions."""

import diffusers
import pytest
import torch
from torch.distributions import Normal

from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.objectives import PolicyGradient
from mmrl.policies.diffusion.flow_plan import planned
from mmrl.policies.diffusion.pipeline_folder import media_of
from mmrl.train.minibatches import passes
from mmrl.zoo.models.any_pipeline import replay_consistency
from mmrl.zoo.models.any_pipeline.replay_scheduler import one_step_form
from samplers.noise import Rng
from tests.fixtures.replay_cases import CASES
from tests.policies.diffusion.test_any_pipeline import (
    PROMPTS,
    SIGNS,
    evaluated,
    make,
    noises,
    place_of,
    plain_pictures,
    sampled,
    trainer_of,
)

load_built_in()


def library_mean_and_std(policy, x, output, k):
    """The next state's mean and deviation, written from the papers for the library's scheduler."""
    scheduler, (t, s) = policy.replay.scheduler, policy.times[k : k + 2]
    name = type(scheduler).__name__
    if name == "FlowMatchLCMScheduler":
        return (1 - s) * (x - t * output), s
    if name == "SCMScheduler":
        now, after = scheduler.timesteps[k : k + 2].double()
        return after.cos() * (now.cos() * x - now.sin() * output), after.sin() * 0.5
    now, after = ((1000 * time).round().long() - 1 for time in (t, s))
    alpha, alpha_after = (scheduler.alphas_cumprod[i].double() for i in (now, after))
    clean = (x - (1 - alpha).sqrt() * output) / alpha.sqrt()
    scaled = 10.0 * now
    denoised = scaled / (scaled**2 + 0.25).sqrt() * clean + 0.25 / (scaled**2 + 0.25) * x
    return alpha_after.sqrt() * denoised, (1 - alpha_after).sqrt()


SAMPLED = {
    "lcm": {"steps": 3},
    "sana_sprint": {"steps": 2},
    "flux": {"steps": 3, "scheduler": "lcm", "guidance_scale": 2.5},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_scores_and_gradients_are_those_of_the_librarys_gaussian_steps(name):
    policy = make(name, **SAMPLED[name])
    rollout = sampled(policy, 2)
    steps = SAMPLED[name]["steps"]
    assert rollout.mask.tolist() == [[True] * (steps - 1) + [False]] * 4
    gradients = []
    for by_hand in (False, True):
        policy.net.zero_grad()
        for point in passes(policy.path(rollout.replace(advantage=SIGNS)), 4):
            if not by_hand:
                assert torch.equal(policy.dist(point).log_prob(point.target), point.recorded)
                (PolicyGradient().loss(policy, point) * point.mask).sum().backward()
                continue
            k = int((policy.times - point.time[0].double()).abs().argmin())
            cond = {"prompt": rollout.cond["prompt"][point.group]}
            output = policy.velocity(point.state, point.time, cond)
            mean, std = library_mean_and_std(policy, point.state.double(), output.double(), k)
            score = Normal(mean, std).log_prob(point.target.double()).flatten(1).mean(1)
            torch.testing.assert_close(score, point.recorded[:, 0].double(), atol=1e-5, rtol=0)
            (-score * point.advantage[:, 0]).sum().backward()  # REINFORCE
        gradients.append(torch.cat([p.grad.flatten() for p in policy.net.parameters()]))
    scale = gradients[1].abs().max()
    assert scale > 0
    torch.testing.assert_close(gradients[0] / scale, gradients[1] / scale, atol=1e-5, rtol=0)


EXPORTED = {
    "z_image": {"steps": 3, "scheduler": "lcm"},
    "sd": {"steps": 3, "scheduler": "lcm", "lora": 2},
}


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_gives_plain_diffusers_our_pictures(name, tmp_path):
    """With the noise that the library's scheduler draws between its steps."""
    policy = make(name, fixed_batch_rows=None, **EXPORTED[name])
    trainer_of(policy).iterate()
    policy.export(tmp_path)
    rollout, ours = evaluated(policy, PROMPTS[:1])
    assert not rollout.mask.any()  # evaluation keeps the noise, and decides nothing
    lora = "lora" in EXPORTED[name]
    pipe = diffusers.DiffusionPipeline.from_pretrained(place_of(name) if lora else tmp_path)
    kind = type(policy.replay.scheduler)
    if lora:
        pipe.load_lora_weights(tmp_path)
        pipe.scheduler = kind.from_pretrained(tmp_path, subfolder="scheduler")
    else:  # a folder that has the few-step sampler is sampled by it
        again = make(name, path=str(tmp_path), steps=3)
        assert again.renews and planned(again, 1, Rng.of("same")).eta.tolist() == [1, 1, 0]
    assert type(pipe.scheduler) is kind
    drawn = noises(policy, rollout.row_id)
    theirs = media_of(plain_pictures(name, policy, 1.0, drawn, pipe), policy.pipeline)
    torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=0)
    before = media_of(plain_pictures(name, policy, 1.0, drawn[:1], pipe), policy.pipeline)
    assert (before - theirs).abs().max() > 1e-4  # other noise, another picture


def test_another_number_of_steps_in_evaluation_has_its_own_times():
    """The time in the middle that Sana Sprint has by default belongs to two steps. The check
    compares pictures, of a path that does not begin with pure noise."""
    call = CASES["sana_sprint"].call | {"max_timesteps": 1.4}
    policy = make("sana_sprint", call, steps=2, evaluation_steps=4, check=True)
    policy.prepare(PROMPTS)
    assert policy.times.tolist() == pytest.approx([1.4 / 1.5708, 1.3 / 1.5708, 0])
    expected = torch.linspace(1.4 / 1.5708, 0, 5).double()
    torch.testing.assert_close(policy.evaluation_times, expected, atol=1e-6, rtol=0)
    rollout, _ = evaluated(policy, PROMPTS[:1])
    assert rollout.latents.time.shape[1] == 5


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        (diffusers.LCMScheduler(clip_sample=True), "LCMScheduler clips samples"),
        (diffusers.FlowMatchLCMScheduler(scale_factors=[0.5]), "several shapes"),
        (diffusers.TCDScheduler(), "TCDScheduler is a sampler of consistency models whose"),
    ],
)
def test_schedulers_whose_steps_have_no_density_are_refused(scheduler, says):
    with pytest.raises(UserError, match=says):
        one_step_form(scheduler)


def test_angles_beyond_noise_are_refused():
    scheduler = diffusers.SCMScheduler()
    scheduler.set_timesteps(2, max_timesteps=1.6)
    with pytest.raises(UserError, match="max_timesteps must be at most 1.5708"):
        replay_consistency.angles(scheduler)
