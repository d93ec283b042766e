"""Replayed pipelines that change a picture or a video: they begin on the way, and prompts have
videos."""

from types import SimpleNamespace

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.policies.diffusion.video_rates import rate_of
from samplers.noise import Rng
from tests.fixtures import clips
from tests.policies.diffusion.test_any_pipeline import (
    FILM,
    PROMPTS,
    assert_on_policy,
    make,
    noises,
    sampled,
)

load_built_in()
SIZE = {"height": 16, "width": 16}
WAN = {"steps": 5, "video_frames": 5, "fixed_batch_rows": None}


@pytest.fixture(scope="module")
def half():
    """A pipeline that begins in the middle of its way."""
    return make("z_image-from", SIZE | {"strength": 0.5}, steps=4, evaluation_steps=6)


def test_a_pipeline_begins_where_its_strength_says(half):
    """And is given the time of a state between its own times, wherever it begins."""
    assert half.times.tolist() == pytest.approx([0.75, 0.5, 0])  # of 4 steps at shift 3: 1, 0.9 ...
    assert len(half.evaluation_times) == 4
    whole = make("z_image-from", SIZE | {"strength": 1.0}, steps=4)
    x = Rng.of("state").normal(torch.arange(2), half.shape, 0, torch.float32)
    t = torch.tensor([0.6, 0.95])
    with torch.no_grad():
        seen = [policy.velocity(x, t, policy.encode(PROMPTS)) for policy in (half, whole)]
    torch.testing.assert_close(*seen, atol=1e-6, rtol=1e-5)


def test_noise_is_not_what_an_autoencoder_draws_for_the_picture(half):
    """Both are as many numbers, and the autoencoder's are drawn first."""
    rows = torch.arange(2)
    noise = Rng.of("noise").normal(rows, half.shape, 0, torch.float32)
    with torch.no_grad():
        cond = half.encode(PROMPTS[:1])
        first = torch.cat([half.begin(noise[i : i + 1], cond) for i in rows])
    torch.testing.assert_close(first[1] - first[0], 0.75 * (noise[1] - noise[0]))


def test_a_video_of_a_prompt_is_changed_on_policy():
    policy = make("wan_v2v", SIZE | {"strength": 0.6}, check=True, **WAN)
    vae = policy.replay.pipe.vae
    encode, encoded = vae.encode, []
    vae.__dict__["encode"] = lambda *args: encoded.append(1) or encode(*args)
    assert (policy.capabilities.makes, policy.media.frames) == ("video", 5)
    assert policy.media.fps == 16  # the published model's
    assert_on_policy(policy)
    assert policy.steps == 3  # of five
    encoded.clear()
    sampled(policy, 2)
    assert len(encoded) == 4  # once a sample, whatever the steps
    call = policy.arguments.of(policy.arguments.numbers(PROMPTS).tolist(), None)
    assert [len(video) for video in call["video"]] == [5, 5]
    with torch.no_grad():  # less strength, nearer to the video
        starts = []
        for other in (FILM, FILM[::-1]):
            cond = policy.encode([PROMPTS[0] | {"video": other}])
            starts.append(policy.begin(noises(policy, torch.arange(1))[0], cond))
    assert (starts[0] - starts[1]).abs().max() > 1e-3


def test_videos_are_files_or_frames(tmp_path):
    arguments = make("wan_v2v", SIZE, **WAN).arguments
    file = str(clips.film(tmp_path / "clip.mp4", 9))

    def shown(video, **more):
        prompt = {"text": "a", "video": video, "origin": "prompts.jsonl:7"} | more
        return arguments.of(arguments.numbers([prompt]).tolist(), None)["video"]

    colours = [frame.getpixel((8, 8))[0] for frame in shown(file)]
    # at 8 a second, and the pipeline's are 16
    assert colours == pytest.approx([0, 0, 50, 50, 100], abs=6)
    frames = [frame.getpixel((0, 0)) for frame in shown(FILM, fps=16)]
    assert frames == [frame.getpixel((0, 0)) for frame in FILM]
    (tmp_path / "bad.mp4").write_text("no video")
    says = {
        str(tmp_path / "bad.mp4"): "prompts.jsonl:7: cannot read the video .*bad.mp4.*no video",
        str(tmp_path / "none.mp4"): "prompts.jsonl:7: cannot read .*none.mp4.*no such file",
        str(
            clips.film(tmp_path / "short.mp4", 1)
        ): "prompts.jsonl:7: .*short.mp4.*it lasts 0.12 s, and 5 ",
    }
    for video, sentence in says.items():
        with pytest.raises(UserError, match=sentence):
            shown(video)
    with pytest.raises(UserError, match="prompts.jsonl:7: .*which have no times"):
        shown(FILM)


def test_a_pipeline_without_a_rate_has_that_of_its_published_model():
    """CogVideoX makes 8 frames a second, version 1.5 16, Wan 16 and its TI2V 24; their calls say
    none of it."""
    assert make("cogvideox_v2v", SIZE, video_frames=5).media.fps == 8
    assert rate_of("CogVideoXTransformer3DModel", SimpleNamespace(patch_size_t=2)) == 16
    assert rate_of("WanTransformer3DModel", SimpleNamespace(out_channels=16)) == 16
    assert rate_of("WanTransformer3DModel", SimpleNamespace(out_channels=48)) == 24
    assert rate_of("AutoencoderKL", None) is None
