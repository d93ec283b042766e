"""Modular pipelines of videos with sound by the policy ``pipeline``: LTX-2's blocks give what
LTX2Pipeline gives, those of LTX-2.5 and Echo, which have no other form, what they give by
themselves."""

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

from mmrl.core.errors import UserError
from mmrl.policies.diffusion import self_stepping
from mmrl.zoo.models.any_pipeline.replay_draws import DECODING, Draws
from tests.fixtures import tiny_modular
from tests.fixtures.replay_cases import MODULAR
from tests.policies.diffusion.test_any_pipeline import (
    PROMPTS,
    RNG,
    assert_same_policies,
    evaluated,
    make,
    plain_flex_attention,  # noqa: F401  a fixture of each test here too
    sampled,
)
from tests.policies.diffusion.test_sound import SEPARATE, SIZE, TEXTS, assert_heard, ltx2

LATE = (3, 9, 32, 32)  # of a row, what the decoder of LTX-2.5 draws
PICTURED = {"prompt": "text", "image": "image"}
SIGMAS = MODULAR["echo"].call["sigmas"]


def modular(name, call=None, **options):
    return ltx2(call, **({"path": str(tiny_modular.folder(name))} | options))


def own_blocks(name):
    """The folder by diffusers alone."""
    kind = {"ltx25": "LTX25", "echo": "Echo"}[name]
    blocks = diffusers.LTX25AutoBlocks() if name == "ltx25" else diffusers.EchoBlocks()
    cls = getattr(diffusers, f"{kind}ModularPipeline")
    pipe = cls(blocks=blocks, pretrained_model_name_or_path=str(tiny_modular.folder(name)))
    pipe.load_components()
    return pipe


def called(pipe, noises, **call):
    """The video and the sound of blocks that draw these numbers, of both parts, in turn."""
    with ExitStack() as stack:
        for noise in noises[::-1]:  # the innermost answers first
            stack.enter_context(Draws(noise))
        texts = {"prompt": TEXTS} | call
        media = pipe(output_type="pt", output=["videos", "audio"], **SIZE, **texts)
    return media["videos"], media["audio"]


def parts(noise):
    return [noise[:, :256], noise[:, 256:]]


def noise_of(step=0, rows=2, numbers=400):
    return RNG.normal(torch.arange(rows), (numbers,), step, torch.float32)


def guide(pipe, scale):
    """Set the guiders as LTX2Pipeline's arguments say."""
    call = SEPARATE | {"guidance_scale": scale, "audio_guidance_rescale": 0.7}
    for prefix, guider in (("", pipe.guider), ("audio_", pipe.audio_guider)):
        for name in ("guidance_scale", "stg_scale", "guidance_rescale"):
            setattr(guider, name, call[prefix + name])
        guider.modality_scale = call["modality_scale"]
    pipe.guider.spatio_temporal_guidance_blocks = call["spatio_temporal_guidance_blocks"]


def test_ltx2_blocks_sample_and_learn_as_ltx2_pipeline():
    """Which batches the passes of guidance; blocks make one after the other."""
    forms = (partial(modular, "ltx2"), ltx2)
    assert_same_policies(*(form(call=SEPARATE, guidance_scale=2.5) for form in forms), copies=1)


def test_ltx25_without_noise_is_what_its_own_blocks_give():
    policy = modular("ltx25", SEPARATE, guidance_scale=2.5, check=True)
    policy.prepare(PROMPTS[:1])
    _, media = evaluated(policy, PROMPTS[:1])
    pipe = own_blocks("ltx25")
    guide(pipe, 2.5)
    late = DECODING.normal(torch.arange(1), LATE, 0, torch.float32)
    drawn = [[*parts(noise_of(rows=1)), late]]
    assert_heard(media, *called(pipe, drawn, prompt=TEXTS[:1], num_inference_steps=2))
    assert policy.capabilities.sound and policy.capabilities.makes == "video"


# --------------------------------------------------------------------------------------------------
# Echo, whose blocks step their latents by themselves, with fresh noise


def echo(**options):
    return make("echo", fixed_batch_rows=None, **options)


def test_echo_from_a_picture_is_what_its_own_blocks_give_and_holds_the_first_frame():
    """The decision is what comes after the first frame, as with LTX-2."""
    policy = echo(inputs=PICTURED, check=True)
    policy.prepare(PROMPTS[:1])
    assert policy.shape == (16 * 8 + 144,) and not policy.replay.draws
    unused = torch.full((1, 128), 7.0)  # what is drawn for the first frame
    each = [noise_of(step, 1, 272) for step in range(3)]
    drawn = [[torch.cat([unused, noise[:, :128]], 1), noise[:, 128:]] for noise in each]
    given = {"prompt": TEXTS[0], "image": PROMPTS[0]["image"], "sigmas": SIGMAS}
    assert_heard(evaluated(policy, PROMPTS[:1])[1], *called(own_blocks("echo"), drawn, **given))


def test_echos_log_prob_is_that_of_both_latents_around_its_predicted_data(monkeypatch):
    policy = echo(logprob_reduction="sum")
    assert policy.renews and policy.times.tolist() == pytest.approx(SIGMAS)
    rollout = sampled(policy)
    assert rollout.mask.tolist() == [[True, True, False]] * 2  # the last step adds no noise
    points = list(policy.path(rollout))
    step = EchoLoopAfterDenoiser.__call__
    predicted, blocks = [], own_blocks("echo")

    def listening(self, pipe, state, **more):
        data = (state.predicted_video_x0, state.predicted_audio_x0)
        predicted.append(torch.cat([part.flatten(1) for part in data], 1))
        return step(self, pipe, state, **more)

    monkeypatch.setattr(EchoLoopAfterDenoiser, "__call__", listening)
    for k, point in enumerate(points):
        predicted.clear()
        now, later = SIGMAS[k : k + 2]
        called(blocks, [parts(point.state)] * 2, sigmas=[now, later, 0.0])
        expected = Normal((1 - later) * predicted[0], later).log_prob(point.target).sum(1)
        torch.testing.assert_close(rollout.logprob[:, k], expected, atol=1e-3, rtol=1e-5)


def test_models_that_step_in_other_ways_are_refused_in_a_sentence(monkeypatch):
    with pytest.raises(UserError, match="takes 8 steps, not 2"):
        modular("echo")
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
