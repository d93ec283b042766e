"""Modular pipelines of videos with sound by the policy ``pipeline``: LTX-2's blocks give what
LTX2Pipeline gives, those of LTX-2.5, which have no other form, what they give by themselves."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from functools import partial

import diffusers
import pytest
import torch
from diffusers.modular_pipelines.echo.denoise import EchoLoopAfterDenoiser
from torch.distributions import Normal
from torch.nn.attention import flex_attention

from mmrl.core.errors import UserError
from mmrl.objectives import PolicyGradient
from mmrl.policies.diffusion import self_stepping
from mmrl.train.minibatches import passes
from mmrl.zoo.models.any_pipeline.replay_draws import DECODING, Draws
from tests.fixtures import tiny_modular
from tests.policies.diffusion.test_any_pipeline import PROMPTS, make, trainer_of
from tests.policies.diffusion.test_sound import (
    GUIDED,
    RNG,
    SEPARATE,
    SIZE,
    TEXTS,
    evaluated,
    ltx2,
    sampled,
)

LATE = (3, 9, 32, 32)  # of a row, what the decoder of LTX-2.5 draws


@pytest.fixture(autouse=True)
def plain_flex_attention(monkeypatch):
    """The decoder's attention is computed as it is written, not traced first: it has no gradient
    here, and torch's tracing took a fifth of these tests."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def modular(name, call=None, **options):
    options = {"path": str(tiny_modular.folder(name))} | options
    return ltx2(call, **options)


def own_blocks(place=None):
    """LTX-2.5 by diffusers alone."""
    place = place or tiny_modular.folder("ltx25")
    blocks = diffusers.LTX25AutoBlocks()
    pipe = diffusers.LTX25ModularPipeline(blocks=blocks, pretrained_model_name_or_path=str(place))
    pipe.load_components()
    return pipe


def called(pipe, scale, noise, **call):
    """The video and the sound of its blocks, guided as LTX2Pipeline's arguments say."""
    for prefix, guider in (("", pipe.guider), ("audio_", pipe.audio_guider)):
        guider.guidance_scale = call.get(f"{prefix}guidance_scale", scale)
        guider.stg_scale = call.get(f"{prefix}stg_scale", call.get("stg_scale", 0.0))
        guider.modality_scale = call.get("modality_scale", 1.0)
        guider.guidance_rescale = call.get(f"{prefix}guidance_rescale", 0.7)
    pipe.guider.spatio_temporal_guidance_blocks = call.get("spatio_temporal_guidance_blocks", [28])
    late = DECODING.normal(torch.arange(2), LATE, 0, torch.float32)
    with Draws([noise[:, :256], noise[:, 256:], late]):
        media = pipe(
            prompt=TEXTS,
            num_inference_steps=2,
            output_type="pt",
            output=["videos", "audio"],
            **SIZE,
        )
    return media["videos"], media["audio"]


def first_noise():
    return RNG.normal(torch.arange(2), (400,), 0, torch.float32)


@pytest.mark.parametrize(("scale", "call"), [(2.5, {}), (1.0, SEPARATE)])
def test_ltx2_blocks_sample_and_learn_as_ltx2_pipeline(scale, call):
    """Which batches the passes of guidance; blocks make one after the other."""
    outcomes = []
    for policy in (modular("ltx2", call, guidance_scale=scale), ltx2(call, guidance_scale=scale)):
        rollout = sampled(policy)
        signs = torch.tensor([1.0, -0.5])[:, None]
        for point in passes(policy.path(rollout.replace(advantage=signs)), 4):
            (PolicyGradient().loss(policy, point) * point.mask).sum().backward()
        gradients = [p.grad for p in policy.net.parameters() if p.grad is not None]
        gradient = torch.cat([g.flatten() for g in gradients])
        outcomes.append((rollout, policy.decode(rollout), gradient / gradient.abs().max()))
    (ours, media, gradient), (theirs, other, expected) = outcomes
    torch.testing.assert_close(ours.sample, theirs.sample, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.logprob, theirs.logprob, atol=1e-4, rtol=0)
    torch.testing.assert_close(media.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor))
    torch.testing.assert_close(media.sound, other.sound, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gradient, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("scale", "call"), [(3.0, GUIDED), (1.0, SEPARATE)])
def test_ltx25_without_noise_is_what_its_own_blocks_give(scale, call):
    policy = modular("ltx25", call, guidance_scale=scale, check=True)
    policy.prepare(PROMPTS)
    with torch.no_grad():
        media = policy.decode(evaluated(policy))
    video, sound = called(own_blocks(), scale, first_noise(), **call)
    torch.testing.assert_close(media.as_subclass(torch.Tensor), video, atol=1e-4, rtol=0)
    torch.testing.assert_close(media.sound, sound, atol=1e-4, rtol=0)
    assert video.std() > 0.01 and sound.std() > 0.001
    assert policy.capabilities.sound and policy.capabilities.makes == "video"


def test_it_trains_on_policy_and_its_export_gives_its_blocks_our_video_and_sound(tmp_path):
    policy = modular("ltx25", guidance_scale=2.5)
    with torch.no_grad():
        before = policy.decode(evaluated(policy))
    metrics = trainer_of(policy).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
    policy.export(tmp_path / "export")
    shutil.move(tmp_path / "export", tmp_path / "elsewhere")
    pipe = own_blocks(tmp_path / "elsewhere")
    with torch.no_grad():
        media = policy.decode(evaluated(policy))
    video, sound = called(pipe, 2.5, first_noise())
    torch.testing.assert_close(media.as_subclass(torch.Tensor), video, atol=1e-4, rtol=0)
    torch.testing.assert_close(media.sound, sound, atol=1e-4, rtol=0)
    assert (media.sound - before.sound).abs().max() > 1e-4  # the training is heard


def test_a_row_is_decoded_alike_alone_and_among_others():
    """Though its decoder draws numbers, which are those of the row's own."""
    policy = modular("ltx25")
    rollout = sampled(policy, 2)
    with torch.no_grad():
        media = policy.decode(rollout)
        alone = policy.decode(rollout[torch.tensor([2])])
        same = rollout.replace(sample=rollout.sample[:1].expand_as(rollout.sample).clone())
        others = policy.decode(same)
    torch.testing.assert_close(alone[0], media[2], atol=1e-5, rtol=0)
    assert (others[1] - others[0]).abs().max() > 1e-3  # no two rows have the same noise


def test_ltx2_blocks_from_a_picture_are_the_other_form():
    """Which step the frames after the first: no other numbers are decisions."""
    scale = 2.5
    call = SIZE | {"image_crf": 0}
    inputs = {"prompt": "text", "image": "image"}
    sizes = {"steps": 2, "fixed_batch_rows": None, "guidance_scale": scale}
    classic = make("ltx2_i2v", call=call, **sizes)
    policy = modular("ltx2", call, inputs=inputs, guidance_scale=scale)
    assert policy.shape == classic.shape == (8 * 1 * 4 * 4 + 144,)
    outcomes = []
    for each in (policy, classic):
        with torch.no_grad():
            rollout = each.rollout(PROMPTS[:1], 2, RNG)
            outcomes.append((rollout, each.decode(rollout)))
    (ours, media), (theirs, other) = outcomes
    torch.testing.assert_close(ours.sample, theirs.sample, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.logprob, theirs.logprob, atol=1e-4, rtol=0)
    torch.testing.assert_close(media.sound, other.sound, atol=1e-5, rtol=1e-4)


# --------------------------------------------------------------------------------------------------
# Echo, whose blocks step their latents by themselves, with fresh noise


SIGMAS = [1.0, 0.75, 0.4, 0.0]
ECHO = {"sigmas": SIGMAS}


def echo(**options):
    return modular("echo", ECHO, **({"steps": 3} | options))


def echo_blocks(place=None):
    """Echo by diffusers alone."""
    place = str(place or tiny_modular.folder("echo"))
    blocks = diffusers.EchoBlocks()
    pipe = diffusers.EchoModularPipeline(blocks=blocks, pretrained_model_name_or_path=place)
    pipe.load_components()
    return pipe


def echo_alone(noises, place=None, sigmas=SIGMAS):
    """The video and the sound of the pipeline's blocks, which draw these numbers [B, 400] in
    turn."""
    return echo_called(echo_blocks(place), noises, sigmas)


def echo_called(pipe, noises, sigmas=SIGMAS):
    with ExitStack() as stack:
        for noise in noises[::-1]:  # the innermost answers first
            stack.enter_context(Draws([noise[:, :256], noise[:, 256:]]))
        media = pipe(
            prompt=TEXTS, sigmas=sigmas, output_type="pt", output=["videos", "audio"], **SIZE
        )
    return media["videos"], media["audio"]


def echo_noises():
    return [RNG.normal(torch.arange(2), (400,), step, torch.float32) for step in range(3)]


def test_echo_is_what_its_own_blocks_give_with_the_same_noise():
    policy = echo(check=True)
    assert policy.renews and policy.times.tolist() == pytest.approx(SIGMAS)
    policy.prepare(PROMPTS)
    with torch.no_grad():
        media = policy.decode(evaluated(policy))
    video, sound = echo_alone(echo_noises())
    torch.testing.assert_close(media.as_subclass(torch.Tensor), video, atol=1e-4, rtol=0)
    torch.testing.assert_close(media.sound, sound, atol=1e-4, rtol=0)
    assert video.std() > 0.01 and sound.std() > 0.001


def test_echo_from_a_picture_is_what_its_own_blocks_give_and_holds_the_first_frame():
    """The decision is what comes after the first frame, as with LTX-2."""
    inputs = {"prompt": "text", "image": "image"}
    policy = echo(inputs=inputs, check=True)
    policy.prepare(PROMPTS[:1])
    assert policy.shape == (16 * 8 + 144,) and not policy.replay.draws
    with policy.evaluating(), torch.no_grad():
        media = policy.decode(policy.rollout(PROMPTS[:1], 1, RNG))
    unused = torch.full((1, 128), 7.0)  # what is drawn for the first frame
    each = [RNG.normal(torch.arange(1), (272,), k, torch.float32) for k in range(3)]
    drawn = [[torch.cat([unused, noise[:, :128]], 1), noise[:, 128:]] for noise in each]
    with ExitStack() as stack:
        for noises in drawn[::-1]:
            stack.enter_context(Draws(noises))
        own = echo_blocks()(
            prompt=TEXTS[0],
            image=PROMPTS[0]["image"],
            sigmas=SIGMAS,
            output_type="pt",
            output=["videos", "audio"],
            **SIZE,
        )
    torch.testing.assert_close(media.as_subclass(torch.Tensor), own["videos"], atol=1e-4, rtol=0)
    torch.testing.assert_close(media.sound, own["audio"], atol=1e-4, rtol=0)
    metrics = trainer_of(policy).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0


def test_echos_log_prob_is_that_of_both_latents_around_its_predicted_data(monkeypatch):
    policy = echo(logprob_reduction="sum")
    rollout = sampled(policy)
    assert rollout.mask.tolist() == [[True, True, False]] * 2  # the last step adds no noise
    points = list(policy.path(rollout))
    step = EchoLoopAfterDenoiser.__call__
    predicted = []

    def listening(self, pipe, state, **more):
        data = (state.predicted_video_x0, state.predicted_audio_x0)
        predicted.append(torch.cat([part.flatten(1) for part in data], 1))
        return step(self, pipe, state, **more)

    monkeypatch.setattr(EchoLoopAfterDenoiser, "__call__", listening)
    for k, point in enumerate(points):
        predicted.clear()
        echo_alone([point.state, point.state], sigmas=[SIGMAS[k], SIGMAS[k + 1], 0.0])
        later = SIGMAS[k + 1]
        expected = Normal((1 - later) * predicted[0], later).log_prob(point.target).sum(1)
        torch.testing.assert_close(rollout.logprob[:, k], expected, atol=1e-3, rtol=1e-5)


def test_echo_trains_on_policy_and_its_export_gives_its_blocks_our_video(tmp_path):
    policy = echo(lora=2)
    with torch.no_grad():
        before = policy.decode(evaluated(policy))
    metrics = trainer_of(policy).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
    policy.export(tmp_path)
    with torch.no_grad():
        media = policy.decode(evaluated(policy))
    pipe = echo_blocks()
    pipe.load_lora_weights(tmp_path)
    video, sound = echo_called(pipe, echo_noises())
    torch.testing.assert_close(media.as_subclass(torch.Tensor), video, atol=1e-4, rtol=0)
    torch.testing.assert_close(media.sound, sound, atol=1e-4, rtol=0)
    assert (media.sound - before.sound).abs().max() > 1e-4  # the training is heard


@pytest.mark.parametrize("make_policy", [echo, partial(modular, "ltx25")], ids=["echo", "ltx25"])
def test_half_precision_scores_as_it_sampled(make_policy):
    policy = make_policy(dtype="bfloat16", lora=2, check=True, fixed_batch_rows=4)
    metrics = trainer_of(policy).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0


def test_echo_takes_the_steps_that_its_sigmas_say():
    with pytest.raises(
        UserError, match="^policy option steps: Echo.* takes 3 steps, not 4, as its"
    ):
        echo(steps=4)
    with pytest.raises(UserError, match="takes 8 steps, not 2"):
        modular("echo")


def test_a_state_of_echo_between_its_times_is_seen_at_its_own():
    policies = [echo(), modular("echo", {"sigmas": [1.0, 0.6, 0.0]}, steps=2)]
    x = RNG.normal(torch.arange(2), (400,), 0, torch.float32)
    t = torch.full((2,), 0.75)
    with torch.no_grad():
        own, other = (p.velocity(x, t, p.encode(PROMPTS)) for p in policies)
    torch.testing.assert_close(other, own, atol=1e-5, rtol=1e-5)


def test_mistakes_are_told_in_a_sentence():
    with pytest.raises(UserError, match="audio_latents is set by the policy"):
        modular("ltx25", {"audio_latents": 0})
    with pytest.raises(UserError, match="stg_strength does not exist in a call of LTX25"):
        modular("ltx25", {"stg_strength": 1.0})


def test_models_that_step_in_other_ways_are_refused_in_a_sentence(monkeypatch):
    says = "EchoModularPipeline cannot be replayed: it has no scheduler, so it steps its"
    monkeypatch.setattr(self_stepping, "LOOP", "")  # were Echo not known
    with pytest.raises(UserError, match=says) as said:
        modular("echo")
    assert "\n" not in str(said.value)


def test_only_libraries_that_are_installed_are_loaded(tmp_path):
    """A part may be of a folder of diffusers' pipelines, such as ``ltx2``, and of no other."""
    shutil.copytree(tiny_modular.folder("ltx25"), tmp_path / "model")
    file = tmp_path / "model" / "modular_model_index.json"
    index = json.loads(file.read_text())
    index["connectors"][2]["type_hint"][0] = "ltx3"
    file.write_text(json.dumps(index))
    with pytest.raises(UserError, match="connectors is of 'ltx3'"):
        modular("ltx25", path=str(tmp_path / "model"))
