"""External images and videos are encoded to the latents that a family's decoder takes."""

from types import SimpleNamespace

import pytest
import torch

from mmrl.core.registry import POLICIES, load_built_in
from samplers.noise import Rng
from tests.fixtures import replay_cases, tiny_diffusers, tiny_vlms

load_built_in()
IMAGE = {"size": 16, "text_length": 16}
VIDEO = IMAGE | {"frames": 5}
CASES = {
    "cogvideox": VIDEO,
    "cogvideox-joined": VIDEO | {"frames": 9},
    "flux": IMAGE,
    "flux2": {"size": 16, "text_length": 12, "text_layers": [1, 2, 3]},
    "hunyuan_video": VIDEO,
    "ltx": VIDEO | {"size": 32},
    "qwen_image": {"size": 16},
    "sana": {"size": 16},
    "sd": {"size": 16},
    "wan": VIDEO,
    "z_image": {"size": 16},
    "flux_kontext": IMAGE,
    "wan_i2v": VIDEO,
}


class Same:
    """An autoencoder that leaves everything as it is, with the scales of another."""

    dtype = torch.float32

    def __init__(self, vae):
        self.config = vae.config
        self.inner = vae

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def encode(self, pixels):
        return SimpleNamespace(
            latent_dist=SimpleNamespace(mode=lambda: pixels), latent=pixels, latents=pixels
        )

    def decode(self, latents, *rest, **options):
        return SimpleNamespace(sample=latents)


def make(case):
    name, path = case.partition("-")[0], str(tiny_diffusers.folder(case))
    return POLICIES.build(name, path=path, steps=2, **CASES[case])


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in ("flux_kontext", "wan_i2v")]
)
def test_encoding_undoes_the_scales_of_decoding(case):
    policy = make(case)
    latents = Rng.of(case).normal(torch.arange(2), policy.shape)
    vae = Same(policy.vae)
    again = policy.latents_of(vae, policy.pixels(vae, latents))
    added = getattr(policy, "added", 0)  # frames that only fill a token
    rows = (again[:, added:], latents[:, added:]) if added else (again, latents)
    torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", ["sd", "wan", "flux_kontext", "wan_i2v"])
def test_a_picture_of_any_size_becomes_a_sample(case):
    """Also where the model begins with a picture."""
    policy = make(case)
    answer = torch.rand(3, 21, 30, generator=torch.Generator().manual_seed(0))
    if policy.capabilities.makes == "video":
        answer = answer.expand(7, -1, -1, -1)
    shown = {"image": tiny_vlms.image(20, 16, 0)}
    prompts = [{"text": "a red seven"} | shown, {"text": "a blue two"} | shown]
    rollout = policy.demonstrate(prompts, [answer, None], Rng.of("any"))
    assert rollout.sample.shape == (2, *policy.shape) and rollout.sample.isfinite().all()
    assert rollout.alive().tolist() == [True, False] and not rollout.mask.any()
    (point,) = policy.renoise(rollout, Rng.of("noise"))
    assert point.mask.tolist() == [[True], [False]]
    with torch.no_grad():
        assert policy.dist(point).mean.isfinite().all()


def opaque(vae, pixels):
    """A picture is one frame, without holes."""
    return vae.encode(torch.cat([pixels, torch.ones(1, 1, 64, 64)], 1)[:, :, None])


# pipeline -> its call, and what its autoencoder is asked for media in -1..1, by hand
ENCODERS = {
    "latte": ({"video_length": 3}, lambda vae, film: vae.encode(film[0])),
    "qwen_image21": ({}, opaque),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_replayed_pipelines_encode_as_their_autoencoders_do(name):
    """Those whose media the encoder has to arrange in another way than most."""
    case, (more, encode) = replay_cases.CASES[name], ENCODERS[name]
    place = str(tiny_diffusers.folder(name))
    options = {"steps": 2, "check": False, "together": case.together} | case.options
    policy = POLICIES.build("pipeline", path=place, call=case.call | more, **options)
    sample = Rng.of("made").normal(torch.arange(1), policy.shape, 0, policy.dtype)
    prompts = [{"text": "a red seven", "image": tiny_vlms.image(16, 16, 0)}]
    with torch.no_grad():
        media = policy.decode(policy.rollout(prompts, 1, Rng.of("any")).replace(sample=sample))
        latents = policy.encode_media(media)
        codes = encode(policy.replay.pipe.vae, 2 * media - 1).latent_dist.mode()
    torch.testing.assert_close(policy.encoder.layout.codes(latents), codes, atol=1e-5, rtol=1e-5)
    assert latents.shape == sample.shape and codes.std() > 1e-3
