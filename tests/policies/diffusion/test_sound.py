"""LTX-2 by the policy ``pipeline``: a video and its sound are one decision, and both are those of
diffusers' own LTX2Pipeline."""

from __future__ import annotations

from dataclasses import replace

import diffusers
import pytest
import torch
from torch.distributions import Normal

from mmrl.core.errors import UserError
from mmrl.zoo.models.any_pipeline.replay_check import check_replay
from mmrl.zoo.models.any_pipeline.replay_draws import Draws
from samplers.kernels import flow_sde
from tests.fixtures import tiny_diffusers
from tests.fixtures.replay_cases import PROMPT_GUIDED
from tests.fixtures.replay_cases import SOUND as SIZE
from tests.policies.diffusion.test_any_pipeline import (
    PROMPTS,
    RNG,
    evaluated,
    make,
    place_of,
    sampled,
)

TEXTS = [prompt["text"] for prompt in PROMPTS]
VIDEO = (32, 8)  # tokens and channels of the tiny latents
SOUND = (9, 16)
# the guidances of LTX-2.3 together: of the prompt, of skipped attention, of the other modality
GUIDED = {"stg_scale": 0.7, "spatio_temporal_guidance_blocks": [0], "modality_scale": 2.0}
SEPARATE = GUIDED | {"audio_guidance_scale": 4.0, "audio_stg_scale": 0.4, "guidance_rescale": 0.5}


def ltx2(call=None, **options):
    chosen = {"steps": 2, "fixed_batch_rows": None}
    return make("ltx2", call=SIZE | (call or {}), **(chosen | options))


@pytest.fixture(scope="module")
def plain():
    pipe = diffusers.DiffusionPipeline.from_pretrained(place_of("ltx2"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def policy():
    return ltx2()


def parts(state):
    """A video's and a sound's latents, written apart from the policy's own way."""
    return state[:, :256].reshape(-1, *VIDEO), state[:, 256:].reshape(-1, *SOUND)


def first_state(pipe):
    """The rows' own noise, drawn for latents that the pipeline has not packed yet."""
    noise = RNG.normal(torch.arange(2), (400,), 0, torch.float32)
    video = pipe._pack_latents(noise[:, :256].reshape(2, 8, 2, 4, 4))
    sound = pipe._pack_audio_latents(noise[:, 256:].reshape(2, 8, 9, 2))
    return torch.cat([video.flatten(1), sound.flatten(1)], 1)


def called(pipe, state, texts=TEXTS, steps=2, **call):
    """What diffusers' pipeline makes of these latents."""
    video, sound = parts(state)
    # the pipeline standardises sounds that it is given, and no videos
    statistics = pipe.audio_vae
    return pipe(
        prompt=texts,
        latents=video,
        audio_latents=sound * statistics.latents_std + statistics.latents_mean,
        num_inference_steps=steps,
        output_type="pt",
        return_dict=False,
        **(SIZE | PROMPT_GUIDED | call),
    )


def assert_heard(media, video, sound):
    """The media are this video and this sound, which are not nothing."""
    torch.testing.assert_close(media.as_subclass(torch.Tensor), video, atol=1e-4, rtol=0)
    torch.testing.assert_close(media.sound, sound, atol=1e-4, rtol=0)
    assert video.std() > 0.01 and sound.std() > 0.001


def test_without_noise_video_and_sound_are_diffusers_own(plain):
    policy = ltx2(SEPARATE, guidance_scale=2.5)
    _, media = evaluated(policy)
    assert_heard(media, *called(plain, first_state(plain), guidance_scale=2.5, **SEPARATE))
    assert media.sampling_rate == plain.vocoder.config.output_sampling_rate


def test_the_log_prob_is_that_of_both_latents(plain, monkeypatch):
    """What diffusers' pipeline hands to its two schedulers, put into the SDE's Gaussian."""
    policy = ltx2(guidance_scale=2.5)
    rollout = sampled(policy)
    point = next(iter(policy.path(rollout)))
    velocities = []
    step = diffusers.FlowMatchEulerDiscreteScheduler.step
    monkeypatch.setattr(
        diffusers.FlowMatchEulerDiscreteScheduler,
        "step",
        lambda self, output, *rest, **more: (
            velocities.append(output) or step(self, output, *rest, **more)
        ),
    )
    called(plain, point.state, guidance_scale=2.5)
    logprob = torch.zeros(2)
    for state, v, target in zip(
        parts(point.state), velocities[:2], parts(point.target), strict=True
    ):
        times = [point.time, point.transition.next_time, point.transition.noise_level]
        mean, std = flow_sde(state, v, *times)
        logprob += Normal(mean, std).log_prob(target).flatten(1).sum(1)
    torch.testing.assert_close(rollout.logprob[:, 0], logprob / 400, atol=1e-3, rtol=1e-5)


def test_the_sound_has_its_share_of_the_log_prob():
    """The mean of the video's numbers and that of the sound's, weighed, also in the divergence."""
    policy, plain = ltx2(sound_share=0.4), ltx2()
    rollout = sampled(policy)
    point = next(iter(policy.path(rollout)))
    dist, bare = policy.dist(point), plain.dist(point)
    each = Normal(bare.mean, bare.std).log_prob(point.target)
    moved = replace(bare, mean=bare.mean + torch.arange(400.0) / 400)
    apart = (moved.mean - bare.mean).square() / (2 * bare.std**2)

    def weighed(x):
        video, sound = parts(x)
        return 0.6 * video.flatten(1).mean(1) + 0.4 * sound.flatten(1).mean(1)

    torch.testing.assert_close(rollout.logprob[:, 0], weighed(each))
    torch.testing.assert_close(
        replace(moved, weight=dist.weight).kl(dist)[:, 0], weighed(apart), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(bare.log_prob(point.target), dist.log_prob(point.target))
    own = ltx2(sound_share=144 / 400).dist(point)  # as many as it has
    torch.testing.assert_close(own.log_prob(point.target), bare.log_prob(point.target))


def test_the_check_hears_a_sound_that_is_not_the_pipelines():
    policy = ltx2()
    finish = policy.replay.finish

    def louder(*args):
        media = finish(*args)
        media.sound = media.sound + 0.01
        return media

    policy.replay.finish = louder
    with pytest.raises(UserError, match="its own loop gives pictures or a sound that differ"):
        check_replay(policy, PROMPTS)


def test_what_is_no_one_decision_is_refused(policy):
    with pytest.raises(UserError, match="set num_frames, height and width in policy option call"):
        policy.replay.states.learn(1, torch.zeros(1, 3, 16))
    with pytest.raises(
        UserError, match="takes no videos of others: .* diffusers has nothing that makes"
    ):
        policy.encode_media(torch.zeros(1, 9, 3, 32, 32))


def test_from_a_picture_only_what_is_stepped_is_the_decision():
    """The first frame's latents are the picture's, and no numbers of the log-prob."""
    scale, call = 2.5, {"image_crf": 0} | GUIDED
    policy = make("ltx2_i2v", call=SIZE | call, steps=2, fixed_batch_rows=None)
    policy.guidance_scale = scale
    assert policy.shape == (8 * 1 * 4 * 4 + 144,)
    _, media = evaluated(policy, PROMPTS[:1])
    pipe = tiny_diffusers.pipeline("ltx2_i2v")
    pipe.set_progress_bar_config(disable=True)
    noise = RNG.normal(torch.arange(1), policy.shape, 0, torch.float32)
    stepped = noise[:, :128].view(1, 8, 1, 4, 4)
    sound = noise[:, 128:].view(1, 9, 8, 2).transpose(1, 2).contiguous()  # packed later
    # what is drawn for the first frame is not used
    drawn = torch.cat([torch.full_like(stepped, 7.0), stepped], 2)
    with Draws([drawn, sound]):
        video, heard = pipe(
            image=PROMPTS[0]["image"],
            prompt=TEXTS[0],
            num_inference_steps=2,
            output_type="pt",
            return_dict=False,
            guidance_scale=scale,
            generator=torch.Generator().manual_seed(0),
            **(SIZE | PROMPT_GUIDED | call),
        )
    assert_heard(media, video, heard)
