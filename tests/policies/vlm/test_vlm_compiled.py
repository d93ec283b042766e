"""Compiled passes: the samples, log-probs and gradients of the others, by few graphs.

Graphs are traced and run as they are (a backend that only counts); what the inductor builds of them
is compared by ``scripts/dev/check_compiled.py``."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.vlm import options
from mmrl.policies.vlm.policy import VLM
from samplers.warp import Warp
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_policy import gradient, logprobs, quiet, rolled  # noqa: F401

ASKED = [
    {"text": "what is this?", "images": [tiny_vlms.image(28, 28, 0)]},
    {"text": "hello, what is a longer question?"},
    {"text": "and?", "images": [tiny_vlms.image(56, 28, 1)]},
]
graphs: list[torch.fx.GraphModule] = []


def counted(graph, example_inputs):
    graphs.append(graph)
    return graph


@pytest.fixture(scope="module")
def vlm(quiet):  # noqa: F811
    policy = VLM(str(tiny_vlms.folder("llava")), max_new_tokens=14, compile="eager")
    policy.net.to(torch.float64)
    policy.net.packs_sparse = False  # those passes are not compiled
    policy.ending = replace(policy.ending, stops=tuple(range(0, 256, 8)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo, "list_backends", lambda **_: [counted])
        options.compile_passes(policy, policy.net, counted)
    return policy


@contextmanager
def plainly(policy):
    compiled = policy.net.compiled
    policy.net.compiled = None
    yield
    policy.net.compiled = compiled


def test_they_compute_what_plain_passes_compute(vlm):
    for refill, rows, copies in (("none", None, 6), ("rows", 5, 5), ("longest", 4, 4)):
        vlm.refill = refill
        vlm.pass_sizes.rows = rows
        quick = rolled(vlm, ASKED, copies=copies)
        lengths = quick.mask.sum(1)
        assert lengths.min() < lengths.max()  # rows leave, or make room
        with plainly(vlm):
            plain = rolled(vlm, ASKED, copies=copies)
        assert torch.equal(quick.sample, plain.sample) and torch.equal(quick.mask, plain.mask)
        torch.testing.assert_close(quick.logprob, plain.logprob, atol=1e-6, rtol=0)
        scored = torch.where(quick.mask, logprobs(vlm, quick).detach(), 0.0)
        torch.testing.assert_close(scored, quick.logprob, atol=1e-6, rtol=0)
        with plainly(vlm):
            wanted = gradient(vlm, quick)
        computed = gradient(vlm, quick)
        assert wanted.keys() == computed.keys()
        for name, g in wanted.items():
            torch.testing.assert_close(computed[name], g, atol=1e-6, rtol=1e-6, msg=name)
    # the token, with its draw and, of rows that are refilled, without; the draw; the token once
    # more where a single prompt is left; answers, their log-probs: no more for other rows, columns
    # and lengths
    assert len(graphs) <= 6


def test_what_changes_in_every_iteration_is_not_compiled(vlm):
    before = len(graphs)
    hidden = torch.randn(3, vlm.net.text_config.hidden_size, dtype=torch.float64)
    uniform = torch.rand(3, dtype=torch.float64)
    for warp in (Warp(schedule=(1.0, 0.5)), Warp(adaptive=0.2)):
        place = torch.arange(3)
        vlm.net("draw", draw, hidden, warp, uniform, place)
        assert vlm.net.compiled.chunk_of(warp, False) is None
    assert len(graphs) == before


def draw(logits, warp, uniform, place=None):
    return warp(logits, place=place)


def test_what_cannot_be_compiled_is_refused(vlm, monkeypatch):
    def refused(match, backend="eager", net=vlm.net, **changes):
        options_of = {"engine": "own", "tree": None} | changes
        with pytest.raises(UserError, match=match):
            options.compile_passes(SimpleNamespace(**options_of), net, backend)

    refused("no backend 'quick'; there are .*inductor", backend="quick")
    refused("needs engine own", engine="hf")
    refused("no tree", tree=object())
    for name, value in (("share", False), ("packed", True)):
        with monkeypatch.context() as patch:
            patch.setattr(vlm.net, name, value)
            refused("prompts that are shared")
    with monkeypatch.context() as patch:
        patch.setattr(vlm.net.text_config, "sliding_window", 8, raising=False)
        refused("every layer attends to all tokens before")
    with pytest.raises(UserError, match="gradient_checkpointing and policy option compile"):
        vlm.enable_gradient_checkpointing()
    with monkeypatch.context() as patch:
        patch.setattr(options, "sharded", lambda net: True)
        with pytest.raises(UserError, match="gathered layer by layer"):
            rolled(vlm, ASKED, copies=2)
