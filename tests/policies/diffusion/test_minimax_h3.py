"""MiniMax H3 by the policy ``pipeline``: its video and its sound, each at its own times, are one
decision, and what the pipeline's blocks give."""

from __future__ import annotations

from types import SimpleNamespace

import diffusers
import pytest
import torch
from torch.distributions import Normal

from mmrl.core.errors import UserError
from mmrl.objectives import PolicyGradient
from mmrl.zoo.models.any_pipeline.replay_check import check_replay
from mmrl.zoo.models.any_pipeline.replay_draws import Draws
from mmrl.zoo.models.any_pipeline.replay_states import States
from mmrl.zoo.models.any_pipeline.replay_times import odds_ratio, shifted
from samplers.kernels import flow_sde
from tests.fixtures import tiny_modular
from tests.fixtures.replay_cases import MODULAR
from tests.policies.diffusion.test_any_pipeline import PROMPTS, RNG, evaluated, make, sampled
from tests.policies.diffusion.test_sound import assert_heard

SIZE = MODULAR["minimax_h3"].call  # the shortest that it makes
SHIFTS = (12.0, 3.0)
VIDEO = (37, 16)  # rows and numbers of a row
SOUND = (414, 4)
STEPS = 3  # of its call, of which the last is the end
NUMBERS = 37 * 16 + 414 * 4


def h3(**options):
    return make("minimax_h3", fixed_batch_rows=None, **({"steps": STEPS} | options))


@pytest.fixture(scope="module")
def plain():
    """A policy that no test trains."""
    return h3()


def own_blocks(workflow="t2va"):
    """MiniMax H3 by diffusers alone."""
    place = str(tiny_modular.folder("minimax_h3"))
    blocks = diffusers.MiniMaxH3Blocks().get_workflow(workflow)
    pipe = diffusers.MiniMaxH3ModularPipeline(blocks=blocks, pretrained_model_name_or_path=place)
    pipe.load_components()
    return pipe


def parts(state):
    """The video's and the sound's rows, written apart from the policy's own way."""
    return state[:, :592].reshape(-1, *VIDEO), state[:, 592:].reshape(-1, *SOUND)


def called(pipe, noise, text, **call):
    video, sound = noise[:, :592], noise[:, 592:]
    with Draws([video, sound]):
        media = pipe(
            prompt=text,
            num_inference_steps=STEPS,
            output_type="pt",
            output=["videos", "audio"],
            generator=torch.Generator().manual_seed(0),
            **SIZE,
            **call,
        )
    return media["videos"], media["audio"]


def agree(policy, pipe, **call):
    """The media of the noiseless policy, which are those of the pipeline's blocks."""
    _, media = evaluated(policy, PROMPTS[:1])
    noise = RNG.normal(torch.arange(1), (NUMBERS,), 0, torch.float32)
    assert_heard(media, *called(pipe, noise, PROMPTS[0]["text"], **call))
    return media


def test_without_noise_it_is_what_its_own_blocks_give(plain):
    policy = plain
    assert policy.replay.states.ratio(1) == pytest.approx(SHIFTS[1] / SHIFTS[0], rel=1e-6)
    assert policy.times.tolist() == pytest.approx([1.0, 12 / 13, 0.0], rel=1e-6)
    check_replay(policy, PROMPTS[:1])
    media = agree(policy, own_blocks())
    assert policy.capabilities.sound and policy.capabilities.makes == "video"
    assert media.sampling_rate == 320


def test_the_log_prob_is_that_of_both_states_each_at_its_own_times(plain, monkeypatch):
    """What its own blocks hand to their two schedulers, put into the Gaussian of each."""
    policy = plain
    rollout = sampled(policy)
    assert rollout.mask.all()
    handed, pipe = [], own_blocks()
    step = diffusers.MiniMaxH3Scheduler.step

    def listening(self, output, t, sample, **more):
        handed.append((-output[None], self.sigmas))  # towards the data
        return step(self, output, t, sample, **more)

    monkeypatch.setattr(diffusers.MiniMaxH3Scheduler, "step", listening)
    points = list(policy.path(rollout))
    for k, point in enumerate(points):
        for row, prompt in enumerate(PROMPTS):
            handed.clear()
            state = point.state[row : row + 1]
            at_step(pipe, k, state, prompt["text"])
            logprob = 0.0
            for x, target, (v, sigmas) in zip(
                parts(state), parts(point.target[row : row + 1]), handed[:2], strict=True
            ):
                mean, std = flow_sde(x, v, sigmas[0], sigmas[1], policy.noise_level)
                logprob = logprob + Normal(mean, std).log_prob(target).sum()
            logprob = logprob / NUMBERS
            torch.testing.assert_close(rollout.logprob[row, k], logprob, atol=1e-6, rtol=1e-5)


def at_step(pipe, k, state, text):
    """Run its own blocks from a state after k steps: with the times that are left."""
    plain = diffusers.MiniMaxH3Scheduler.set_timesteps

    def later(self, steps, device=None):
        plain(self, steps, device)
        plain(self, sigmas=self.sigmas[k:].tolist(), device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusers.MiniMaxH3Scheduler, "set_timesteps", later)
        video, sound = parts(state.clone())  # into which its loop writes
        frames = video.reshape(1, 37, 1, 1, 4, 1, 2, 2).permute(0, 4, 1, 5, 2, 6, 3, 7)
        pipe(
            prompt=text,
            latents=frames.reshape(1, 4, 37, 2, 2),
            audio_latents=sound.reshape(2, 207, 4).permute(0, 2, 1),
            num_inference_steps=STEPS,
            output_type="pt",
            output=["videos"],
            **SIZE,
        )


def test_from_a_picture_it_is_what_its_own_blocks_give():
    inputs = {"prompt": "text", "image": "image"}
    policy = h3(inputs=inputs)
    agree(policy, own_blocks(workflow="fl2va"), image=PROMPTS[0]["image"])


def test_what_looks_at_samples_of_one_time_is_refused_in_a_sentence(plain):
    rollout = sampled(plain).replace(advantage=torch.ones(2, 1))
    with pytest.raises(UserError, match="MiniMaxH3.* has video and sound at different times") as e:
        next(iter(plain.renoise(rollout, RNG)))
    assert "\n" not in str(e.value)
    point = next(iter(plain.path(rollout)))
    assert PolicyGradient().loss(plain, point).shape == (2, 1)
    with pytest.raises(UserError, match="noise, of which a video and its sound .* two; leave"):
        PolicyGradient(timestep_weighting="noise").loss(plain, point)


def test_odds_of_times():
    base = torch.linspace(1, 0, 6, dtype=torch.float64)
    first, other = (s * base / (1 + (s - 1) * base) for s in SHIFTS)
    ratio = odds_ratio(first, other)
    assert ratio == pytest.approx(0.25)
    torch.testing.assert_close(shifted(first, ratio), other)
    assert odds_ratio(first, first) == 1.0
    assert odds_ratio(first, first**2) is None and odds_ratio(first, first[1:]) is None
    states = States(SimpleNamespace(prepare_latents=None, prepare_audio_latents=None))
    states.relate(1, first[[0, -1]], first[[0, -1]])  # of a single step, which says nothing
    states.relate(1, first, other)
    assert states.ratio(1) == ratio
    with pytest.raises(UserError, match="at different times that no shift makes of each other"):
        states.relate(1, first, first**2)
    with pytest.raises(UserError, match="that no shift makes"):
        states.relate(1, first, first)  # another shift than before
