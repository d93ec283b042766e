"""LTX-2 by the policy ``pipeline``: a video and its sound are one decision, and both are those of
diffusers' own LTX2Pipeline."""

from __future__ import annotations

from dataclasses import replace

import diffusers
import pytest
import torch
from torch.distributions import Normal

from mmrl.core.errors import UserError
from mmrl.core.media.sound import SoundVideos
from mmrl.zoo.models.any_pipeline.replay_check import check_replay
from mmrl.zoo.models.any_pipeline.replay_draws import Draws
from samplers.kernels import flow_sde
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers
from tests.fixtures.replay_cases import PROMPT_GUIDED
from tests.fixtures.replay_cases import SOUND as SIZE
from tests.policies.diffusion.test_any_pipeline import PROMPTS, make, place_of, trainer_of

RNG = Rng.of("same")
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


def sampled(policy, copies=1):
    with torch.no_grad():
        return policy.rollout(PROMPTS, copies, RNG)


@pytest.mark.parametrize(("scale", "call"), [(3.0, GUIDED), (1.0, SEPARATE)])
def test_without_noise_video_and_sound_are_diffusers_own(scale, call, plain):
    policy = ltx2(call, guidance_scale=scale)
    with policy.evaluating(), torch.no_grad():
        media = policy.decode(sampled(policy))
    video, sound = called(plain, first_state(plain), guidance_scale=scale, **call)
    torch.testing.assert_close(media.as_subclass(torch.Tensor), video, atol=1e-4, rtol=0)
    torch.testing.assert_close(media.sound, sound, atol=1e-4, rtol=0)
    assert video.std() > 0.01 and sound.std() > 0.01
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
    policy, plain = ltx2(sound_share=0.4, check=True), ltx2()
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
    assert trainer_of(policy).iterate()["ratio/max_deviation"] == 0.0
    with pytest.raises(UserError, match="sound_share: the log-prob of logprob_reduction sum"):
        ltx2(sound_share=0.4, logprob_reduction="sum")
    with pytest.raises(UserError, match="sound_share: FluxPipeline makes no sound"):
        make("flux", sound_share=0.4)


def test_the_first_step_is_on_policy_and_both_are_learned():
    policy = ltx2(guidance_scale=2.5, check=True)
    before = {name: value.clone() for name, value in policy.net.named_parameters()}
    metrics = trainer_of(policy).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
    for name in ("proj_out.weight", "audio_proj_out.weight"):
        assert not torch.equal(before[name], policy.net.get_parameter(name)), name


def test_a_row_is_the_same_alone_and_among_others(policy):
    rollout = sampled(policy, 2)
    with torch.no_grad():
        alone = policy.rollout(PROMPTS[1:], 2, RNG.after(2, 1))
        media, media_alone = policy.decode(rollout), policy.decode(alone)
    torch.testing.assert_close(alone.sample, rollout.sample[2:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(media_alone.sound, media[2:].sound, atol=1e-5, rtol=1e-4)
    for part in parts(rollout.sample):  # and no two rows have the same noise
        assert (part[0] - part[1]).abs().max() > 0.1


def test_a_state_between_the_pipelines_times_is_guided_at_its_own():
    """Rescaled guidance computes with the scheduler's sigma, which has to be that of the state."""
    call = SEPARATE | {"guidance_rescale": 0.7}
    policies = [ltx2(call, guidance_scale=2.5, steps=steps) for steps in (3, 2)]
    x = RNG.normal(torch.arange(2), (400,), 0, torch.float32)
    t = policies[0].times[1:2].float().expand(2)
    assert not torch.isin(t[0].double(), policies[1].times)
    with torch.no_grad():
        own, other = (p.velocity(x, t, p.encode(PROMPTS)) for p in policies)
    torch.testing.assert_close(other, own, atol=1e-4, rtol=1e-4)


def test_an_export_gives_diffusers_our_video_and_sound(tmp_path):
    policy = ltx2(lora=2)
    untrained = policy.decode(evaluated(policy))
    trainer_of(policy).iterate()
    policy.export(tmp_path)
    pipe = diffusers.DiffusionPipeline.from_pretrained(place_of("ltx2"))
    adapted = {name.split(".lora_")[0].split(".")[2] for name in policy.weights.full()}
    assert {"attn1", "audio_attn1", "audio_to_video_attn", "video_to_audio_attn"} <= adapted
    pipe.load_lora_weights(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    video, sound = called(pipe, first_state(pipe), guidance_scale=1.0)
    media = policy.decode(evaluated(policy))
    torch.testing.assert_close(media.as_subclass(torch.Tensor), video, atol=1e-4, rtol=0)
    torch.testing.assert_close(media.sound, sound, atol=1e-4, rtol=0)
    for before, after in ((untrained, media), (untrained.sound, media.sound)):
        assert (before - after).abs().max() > 1e-3  # the training is seen and heard


def evaluated(policy):
    with policy.evaluating():
        return sampled(policy)


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


def test_rewards_get_each_video_with_its_own_sound(policy):
    """Also when parts are decoded and joined, and where one row is asked for after the other."""
    rollout = sampled(policy, 2)
    with torch.no_grad():
        media = policy.decode(rollout)
        policy.pass_sizes.rows = 3
        again = policy.decode(rollout)
        policy.pass_sizes.rows = None
    assert isinstance(again, SoundVideos) and again.sound.shape[:2] == (4, 2)
    torch.testing.assert_close(again.sound, media.sound, atol=1e-5, rtol=1e-4)
    assert torch.equal(again[torch.tensor([2, 0])].sound, again.sound[[2, 0]])


def test_what_is_no_one_decision_is_refused(policy):
    with pytest.raises(UserError, match="set num_frames, height and width in policy option call"):
        policy.replay.states.learn(1, torch.zeros(1, 3, 16))
    with pytest.raises(
        UserError, match="takes no videos of others: .* diffusers has nothing that makes"
    ):
        policy.encode_media(torch.zeros(1, 9, 3, 32, 32))
    prepare = policy.replay.pipe.__dict__.pop("prepare_audio_latents")
    policy.replay.states.count = 1
    try:
        with pytest.raises(UserError, match="it does not say how the others are prepared"):
            policy.replay.conditions(policy.arguments.example(), 2)
    finally:
        policy.replay.pipe.__dict__["prepare_audio_latents"] = prepare
        policy.replay.states.count = 2


def test_what_is_known_of_a_prompt_has_no_noise_in_it(policy):
    inputs = policy.replay.conditions(policy.arguments.example(), 2).inputs
    assert {"hidden_states", "audio_hidden_states"} <= set(inputs)
    read = ("encoder_hidden_states", "audio_encoder_hidden_states", "video_coords", "audio_coords")
    states = policy.prompt_states(PROMPTS[:1])
    assert states.shape == (1, sum(inputs[name].shape[-1] for name in read))


def test_guidance_costs_the_passes_that_the_page_says(policy):
    """And none without guidance, though the pipeline's own call begins with three."""
    rollout = sampled(policy)
    x = rollout.sample
    for each, count in ((policy, 1), (ltx2(GUIDED, guidance_scale=3.0), 3)):
        part = each._asks(each.times[:1].float().expand(2))[0]
        names = each._passes(part, x, each.encode(PROMPTS), each.guidance_scale)
        assert names == ("transformer",) * count


def test_from_a_picture_only_what_is_stepped_is_the_decision():
    """The first frame's latents are the picture's, and no numbers of the log-prob."""
    scale, call = 2.5, {"image_crf": 0} | GUIDED
    policy = make("ltx2_i2v", call=SIZE | call, steps=2, fixed_batch_rows=None)
    policy.guidance_scale = scale
    assert policy.shape == (8 * 1 * 4 * 4 + 144,)
    with policy.evaluating(), torch.no_grad():
        media = policy.decode(policy.rollout(PROMPTS[:1], 1, RNG))
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
    torch.testing.assert_close(media.as_subclass(torch.Tensor), video, atol=1e-4, rtol=0)
    torch.testing.assert_close(media.sound, heard, atol=1e-4, rtol=0)
    assert trainer_of(policy).iterate()["ratio/max_deviation"] == 0.0
