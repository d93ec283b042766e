"""Consistency models by the policy ``pipeline``: their samplers' own noise makes the decisions."""

import shutil

import diffusers
import pytest
import torch
from torch.distributions import Normal

from mmrl.config.options import EvaluateOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.experiment.evaluation import evaluate
from mmrl.objectives import PolicyGradient
from mmrl.policies.diffusion.flow_plan import planned
from mmrl.policies.diffusion.pipeline_folder import media_of
from mmrl.scoring import Scorer
from mmrl.train.minibatches import passes
from mmrl.zoo.models.any_pipeline import replay_consistency
from mmrl.zoo.models.any_pipeline.replay_scheduler import one_step_form
from samplers.noise import Rng
from tests.experiment.test_resume import resumes
from tests.fixtures import tiny_diffusers
from tests.fixtures.replay_cases import CASES
from tests.policies.diffusion.test_any_pipeline import (
    PROMPTS,
    make,
    noises,
    place_of,
    plain_pictures,
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
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 2, Rng.of("same"))
    steps = SAMPLED[name]["steps"]
    assert rollout.mask.tolist() == [[True] * (steps - 1) + [False]] * 4
    signs = torch.tensor([1.0, -0.5, 2.0, -1.0])[:, None]
    gradients = []
    for by_hand in (False, True):
        policy.net.zero_grad()
        for point in passes(policy.path(rollout.replace(advantage=signs)), 4):
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
    "sana_sprint": {"steps": 2, "lora": 2},
    "z_image": {"steps": 3, "scheduler": "lcm"},
    "sd": {"steps": 3, "scheduler": "lcm", "lora": 2},
}


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_gives_plain_diffusers_our_pictures(name, tmp_path):
    """With the noise that the library's scheduler draws between its steps."""
    policy = make(name, fixed_batch_rows=None, **EXPORTED[name])
    trainer_of(policy).iterate()
    policy.export(tmp_path)
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(PROMPTS[:1], 1, Rng.of("same"))
        ours = policy.decode(rollout)
    assert not rollout.mask.any()  # evaluation keeps the noise, and decides nothing
    lora = "lora" in EXPORTED[name]
    pipe = diffusers.DiffusionPipeline.from_pretrained(place_of(name) if lora else tmp_path)
    kind = type(policy.replay.scheduler)
    if lora:
        pipe.load_lora_weights(tmp_path)
    if lora and "scheduler" in EXPORTED[name]:
        pipe.scheduler = kind.from_pretrained(tmp_path, subfolder="scheduler")
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
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(PROMPTS[:1], 1, Rng.of("same"))
    assert rollout.latents.time.shape[1] == 5


def test_under_autocast_scores_are_near_those_of_float32():
    options = {"steps": 2, "scheduler": "lcm"}
    trainer = trainer_of(make("flux", **options), precision="bf16")
    update = trainer.update.run
    batches = []
    trainer.update.run = lambda batch: batches.append(batch) or update(batch)
    assert trainer.iterate()["ratio/max_deviation"] == 0.0
    point = next(iter((exact := make("flux", **options)).path(batches[0].rollout)))
    with torch.no_grad():
        apart = (exact.dist(point).log_prob(point.target) - point.recorded).abs().max()
    assert point.mask.all() and 1e-6 < apart < 0.02


def test_rows_of_uneven_groups_are_those_of_even_ones():
    policy = make("flux", steps=2, scheduler="lcm")
    with torch.no_grad():
        even, uneven = (policy.rollout(PROMPTS, n, Rng.of("same")) for n in (2, (2, 1)))
        policy.pass_sizes.rows = 1
        single = policy.rollout(PROMPTS, (2, 1), Rng.of("same"))
    assert uneven.group.tolist() == [0, 0, 1]
    for rollout in (uneven, single):
        torch.testing.assert_close(rollout.sample, even.sample[:3], atol=1e-5, rtol=0)
        torch.testing.assert_close(rollout.logprob, even.logprob[:3], atol=1e-5, rtol=0)


def redness(media, prompts):
    return media[:, 0].flatten(1).mean(1) - media[:, 1:].flatten(1).mean(1)


def test_a_few_steps_of_training_raise_a_held_out_reward():
    """Of prompts that were not trained on, by more than both intervals."""
    policy = make("flux", steps=2, fixed_batch_rows=None, scheduler="lcm")
    sizes = {"group_size": 8, "train_batch_size": 16, "micro_batch_size": 16}
    trainer = trainer_of(policy, **sizes, max_grad_norm=None)
    trainer.scorer = Scorer({"redness": redness})
    held_out = [{"text": text} for text in ("a green two", "a red nine on top", "two digits")]
    measured = []
    for iterations in (3, 0):
        options = EvaluateOptions(num_samples=4)
        measured.append(evaluate(policy, held_out, trainer.scorer, options)["redness"])
        for _ in range(iterations):
            trainer.iterate()
    before, after = measured
    assert after.low > before.high + 0.01, measured


def test_a_student_of_few_steps_resumes_to_the_bit(tmp_path):
    resumes(lambda: trainer_of(make("sana_sprint", lora=2, steps=2)), tmp_path)


def test_a_folder_that_has_the_few_step_sampler_is_sampled_by_it(tmp_path):
    shutil.copytree(tiny_diffusers.folder("z_image"), tmp_path / "student")
    diffusers.FlowMatchLCMScheduler(shift=3.0).save_pretrained(tmp_path / "student" / "scheduler")
    index = tmp_path / "student" / "model_index.json"
    index.write_text(
        index.read_text().replace("FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler")
    )
    policy = make("z_image", path=str(tmp_path / "student"), steps=3)
    assert policy.renews and planned(policy, 1, Rng.of("same")).eta.tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("sana_sprint", {"steps": 1}, "SCMScheduler adds noise .* at least 2 steps, not 1"),
        ("sana_sprint", {"scheduler": "lcm"}, "scheduler: lcm is for flows .* has SCMScheduler"),
        ("cogvideox", {"scheduler": "lcm"}, "whose betas LCMScheduler knows"),
        ("mochi", {"scheduler": "lcm"}, "invert_sigmas"),
    ],
)
def test_what_has_no_few_step_form_is_refused_in_one_sentence(name, options, says):
    with pytest.raises(UserError, match=says) as error:
        make(name, **options)
    assert "\n" not in str(error.value)


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
