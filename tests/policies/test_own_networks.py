"""Networks and decoders as users write them: understood as they are meant, or refused in one
sentence that names the function."""

import pytest
import torch

from mmrl.core.contract import Pictures
from mmrl.core.errors import UserError
from mmrl.zoo.models.diffusion.custom_module import Module
from samplers.noise import Rng
from tests.fixtures import local_code
from tests.policies.diffusion.test_folder_families import trainer_of

PROMPTS = [{"text": "a red seven"}, {"text": "a two"}]
NET = """
import torch
from types import SimpleNamespace
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(49, 32), nn.Linear(32, 48)
        {init}
    def forward(self, x, t{more}):
        {before}
        out = self.b(torch.tanh(self.a(torch.cat([x.flatten(1), t[:, None]], 1)))).view_as(x)
        return {returned}
"""


def made(tmp_path, init="pass", before="pass", returned="out", more="", **options):
    place = tmp_path / f"net{len(list(tmp_path.iterdir()))}.py"  # files are read once
    place.write_text(NET.format(init=init, before=before, returned=returned, more=more))
    chosen = {"shape": [3, 4, 4], "field": None, "steps": 3, "noise_level": 0.7} | options
    return Module(f"{place}:Net", **chosen)


def path_of(policy):
    with torch.no_grad():
        return policy.rollout(PROMPTS, 2, Rng.of("x")).latents.states


def test_networks_are_taken_as_their_author_meant_them(tmp_path):
    """What those of diffusers return, work in the place, frozen layers."""
    calm = path_of(made(tmp_path, before="t = t * 3; x = x * 0.5"))
    assert torch.equal(path_of(made(tmp_path, before="t.mul_(3); x.mul_(0.5)")), calm)
    plain = path_of(made(tmp_path))
    for returned in ("(out,)", "SimpleNamespace(sample=out)", "{'sample': out}"):
        assert torch.equal(path_of(made(tmp_path, returned=returned)), plain)
    policy = made(tmp_path, init="self.a.requires_grad_(False)")
    trained = [name for name, p in policy.net.named_parameters() if p.requires_grad]
    assert trained == ["b.weight", "b.bias"]


NO_NETWORK = [
    ({"returned": "(out, out)"}, r"policy option net .*\[B, shape\] = \[.*it returned tuple"),
    ({"returned": "out.flatten(1)"}, r"policy option net .* it returned \[\d, 48\]"),
    ({"returned": "out * float('nan')"}, "Module.velocity gave NaN or infinity"),
    ({"init": "self.c = nn.Linear(2, 2, device='meta')"}, "c.weight has no numbers"),
    ({"more": ", cond"}, r"is called as net\(x, t\), which its forward does not take"),
    ({"field": "label"}, r"net\(x, t, cond\).*left out by field: null"),
]


def test_networks_that_cannot_be_meant_are_one_sentence(tmp_path):
    for options, sentence in NO_NETWORK:
        with pytest.raises(UserError, match=sentence):
            path_of(made(tmp_path, **options))
    found = trainer_of(made(tmp_path, returned="out.detach()", fixed_batch_rows=4))
    with pytest.raises(UserError, match="no gradient leads from PolicyGradient.loss"):
        found.iterate()


# Decoders: three pictures of 2 x 4 pixels, in 0..1.
RGB = torch.linspace(0, 1, 72).view(3, 3, 2, 4)
GREY = RGB[:, :1]
FORMS = {
    "as the contract says": (RGB, RGB),
    "bytes": ((RGB * 255).round().byte(), (RGB * 255).round() / 255),
    "channels at the end": (RGB.permute(0, 2, 3, 1), RGB),
    "one channel": (GREY, GREY.expand(-1, 3, -1, -1)),
    "one channel at the end": (GREY.permute(0, 2, 3, 1), GREY.expand(-1, 3, -1, -1)),
    "half precision": (RGB.bfloat16(), RGB.bfloat16().float()),
    "a little beyond": (1.1 * RGB - 0.05, (1.1 * RGB - 0.05).clamp(0, 1)),
}


def test_pictures_of_a_decoder_are_understood():
    for form, (given, expected) in FORMS.items():
        for decode in (lambda rows: given[rows], lambda rows: (given[rows],)):  # noqa: B023
            found = Pictures("the decoder")(decode, torch.arange(3))
            torch.testing.assert_close(found, expected, atol=0, rtol=0, msg=form)
    latents = torch.rand(3, 3, 2, 4)
    before = latents.clone()
    Pictures("the decoder")(lambda z: z.mul_(0.5), latents)
    assert torch.equal(latents, before)


REFUSED = {
    "one for all": (lambda codes: RGB[:1], r"for B = 3 rows; it returned \[1, 3, 2, 4\]"),
    "two channels": (lambda codes: RGB[codes, :2], r"it returned \[3, 2, 2, 4\]"),
    "no tensor": (lambda codes: RGB[codes].numpy(), "it returned ndarray"),
    "numbers up to 255": (lambda codes: RGB[codes] * 255, "from 0 to 255. Return"),
    "in -1..1": (lambda codes: 2 * RGB[codes] - 1, r"4\d% of its first .* from -1 to 1. Return"),
    "whole numbers": (lambda codes: (RGB[codes] * 255).long(), "bytes .uint8, .* not torch.int64"),
    "not a number": (lambda codes: RGB[codes] / 0, "NaN or infinity"),
    "a mean over rows": (lambda codes: RGB[codes] - RGB[codes].mean(0) + 0.4, "independently"),
}


def test_pictures_that_cannot_be_meant_are_one_sentence():
    for decode, sentence in REFUSED.values():
        with pytest.raises(UserError, match=f"^the decoder .*{sentence}"):
            Pictures("the decoder")(decode, torch.arange(3))


def drawn(**methods):
    """Samples and pictures of the model of docs/unified.md with some of its methods replaced."""
    policy = local_code.flow(think=None)
    for name, method in methods.items():
        setattr(policy.model, name, method(getattr(policy.model, name)))
    with torch.no_grad():
        rollout = policy.rollout([{"text": "a seven", "task": "generate"}], 3, Rng.of("x"))
        sample = rollout.sample.clone()
        return [*sample, *policy.decode(rollout), *rollout.sample]


def in_place(method):
    """The same numbers by a method that changes what it is given."""

    def call(x, *rest, **more):
        output = method(x.clone(), *rest, **more)
        x.mul_(2)
        return output

    return call


def test_code_of_a_unified_model_may_work_in_place():
    for one, other in zip(drawn(velocity=in_place, images=in_place), drawn(), strict=True):
        assert torch.equal(one, other)


NO_MODEL = [
    ({"velocity": lambda m: lambda *a, **k: m(*a, **k)[:, :1]}, "the method velocity must"),
    ({"velocity": lambda m: lambda *a, **k: m(*a, **k) / 0}, "gave NaN or infinity"),
    ({"velocity": lambda m: lambda *a, **k: m(*a, **k) + m(*a, **k).mean(0)}, "independently"),
    ({"images": lambda m: lambda z: m(z)[:1]}, "the method images must return"),
]


def test_code_of_a_unified_model_is_refused_in_one_sentence():
    for methods, sentence in NO_MODEL:
        with pytest.raises(UserError, match=sentence):
            drawn(**methods)
