"""Prompts that all answers of a group attend to together while they are sampled: the same samples
and log-probs as with a copy of the prompt for every row."""

from dataclasses import replace

import pytest
import torch

from mmrl.policies.vlm import cascade, generate, prefix_sharing
from mmrl.policies.vlm.families import DIRECT
from mmrl.policies.vlm.policy import VLM
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_policy import logprobs, quiet, rolled  # noqa: F401

ASKED = [
    {"text": "what is this?", "images": [tiny_vlms.image(60, 50, 0)]},
    {"text": "hello, what is a much longer question than the others?"},
    {"text": "and?", "images": [tiny_vlms.image(56, 56, 1)]},
]


@pytest.fixture
def counted(monkeypatch):
    """Counts the layers that attend by a cascade, and turns cascades off."""

    class Counted:
        calls = 0

        def off(self):
            monkeypatch.setattr(prefix_sharing, "fits", lambda *_: False)

    counter = Counted()
    attend = cascade.Cascade.attend

    def watched(self, *arguments):
        counter.calls += 1
        return attend(self, *arguments)

    monkeypatch.setattr(cascade.Cascade, "attend", watched)
    return counter


def sampler(name="qwen2_5_vl", dtype=torch.float64, stops=range(0, 256, 8), **options):
    vlm = VLM(str(tiny_vlms.folder(name)), max_new_tokens=16, record_entropy=True, **options)
    vlm.net.to(dtype)
    vlm.ending = replace(vlm.ending, stops=tuple(stops))
    vlm.checked = True  # the comparison with the class would be counted too
    return vlm


def assert_equal(one, other, atol):
    assert torch.equal(one.sample, other.sample)
    assert torch.equal(one.mask, other.mask)
    torch.testing.assert_close(one.logprob, other.logprob, atol=atol, rtol=0)
    torch.testing.assert_close(one.entropies(), other.entropies(), atol=atol, rtol=0)


@pytest.mark.parametrize(("refill", "rows"), [("none", None), ("rows", 4), ("longest", 4)])
def test_samples_are_those_of_copied_prompts(counted, refill, rows):
    vlm = sampler(refill=refill)
    vlm.pass_sizes.rows = rows
    together = rolled(vlm, ASKED, copies=6)
    lengths = together.mask.sum(1)
    assert lengths.min() < lengths.max()  # rows leave, and groups become ragged
    calls = counted.calls
    assert calls
    counted.off()
    assert_equal(together, rolled(vlm, ASKED, copies=6), 1e-10)
    assert counted.calls == calls
    torch.testing.assert_close(
        torch.where(together.mask, logprobs(vlm, together).detach(), 0.0),
        together.logprob,
        atol=1e-10,
        rtol=0,
    )


@pytest.mark.parametrize("name", [name for name in tiny_vlms.BUILDERS if name in DIRECT][:3])
def test_every_family_that_attends_plainly_takes_it(counted, name):
    vlm = sampler(name, dtype=torch.float32)
    before = vlm.net.text_config._attn_implementation
    together = rolled(vlm, ASKED[:2], copies=3)
    assert counted.calls
    counted.off()
    assert_equal(together, rolled(vlm, ASKED[:2], copies=3), 1e-5)
    assert vlm.net.text_config._attn_implementation == before


@pytest.mark.parametrize("copies, dtype", [(1, torch.float32), (4, torch.bfloat16)])
def test_it_stands_aside_where_it_would_not_help_or_would_round(counted, copies, dtype):
    rolled(sampler(dtype=dtype), ASKED, copies=copies)
    assert not counted.calls


@pytest.mark.parametrize("stops", [range(0, 256, 8), ()])
def test_looking_seldom_at_the_device_changes_no_answer(monkeypatch, stops):
    vlm = sampler(stops=stops)
    wanted = rolled(vlm, ASKED, copies=6)
    looks = []
    going = generate.Ending.going

    def watched(self, ids, alive, count):
        looks.append(count)
        return going(self, ids, alive, count)

    monkeypatch.setattr(generate.Ending, "going", watched)
    monkeypatch.setattr(generate, "interval", lambda device: generate.LOOK)
    assert_equal(rolled(vlm, ASKED, copies=6), wanted, 1e-10)
    assert sum(looks) <= len(looks) / generate.LOOK + 1
