"""Compiled passes: the samples, log-probs and gradients of the others, by few graphs.

Graphs are traced and run as they are (a backend that only counts); what the inductor builds of them
is compared by ``scripts/dev/check_compiled.py``."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.vlm import options
from mmrl.policies.vlm.policy import VLM
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_policy import assert_near, gradient, logprobs, rolled

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
def vlm():
    one_layer = partial(tiny_vlms.build, "llava", text_config={"num_hidden_layers": 1})
    with patch.dict(tiny_vlms.BUILDERS, short_llava=one_layer):
        place = str(tiny_vlms.folder("short_llava"))
    policy = VLM(place, max_new_tokens=14, compile="eager")
    policy.net.to(torch.float64)
    policy.net.packs_sparse = False  # those passes are not compiled
    policy.ending = replace(policy.ending, stops=tuple(range(0, 256, 8)))
    with patch.object(torch._dynamo, "list_backends", lambda **_: [counted]):
        options.compile_passes(policy, policy.net, counted)
    return policy


def test_they_compute_what_plain_passes_compute(vlm):
    vlm.refill = "longest"
    vlm.pass_sizes.rows = 4
    quick = rolled(vlm, ASKED, copies=4)
    lengths = quick.mask.sum(1)
    assert lengths.min() < lengths.max()  # rows make room
    scored = torch.where(quick.mask, logprobs(vlm, quick).detach(), 0.0)
    torch.testing.assert_close(scored, quick.logprob, atol=1e-6, rtol=0)
    computed = gradient(vlm, quick)
    with patch.object(vlm.net, "compiled", None):
        plain = rolled(vlm, ASKED, copies=4)
        assert_near(computed, gradient(vlm, quick), 1e-6)
    assert torch.equal(quick.sample, plain.sample) and torch.equal(quick.mask, plain.mask)
    torch.testing.assert_close(quick.logprob, plain.logprob, atol=1e-6, rtol=0)
    # the token, with its draw and, of rows that are refilled, without; the draw; the token once
    # more where a single prompt is left; answers, their log-probs: no more for other rows, columns
    # and lengths
    assert len(graphs) <= 6


def test_what_cannot_be_compiled_is_refused(vlm):
    def refused(match, backend="eager", net=vlm.net, **changes):
        options_of = {"engine": "own", "tree": None} | changes
        with pytest.raises(UserError, match=match):
            options.compile_passes(SimpleNamespace(**options_of), net, backend)

    refused("no backend 'quick'; there are .*inductor", backend="quick")
    refused("needs engine own", engine="hf")
    refused("no tree", tree=object())
    for name, value in (("share", False), ("packed", True)):
        with patch.object(vlm.net, name, value):
            refused("prompts that are shared")
    with patch.object(vlm.net.text_config, "sliding_window", 8, create=True):
        refused("every layer attends to all tokens before")
    with pytest.raises(UserError, match="gradient_checkpointing and policy option compile"):
        vlm.enable_gradient_checkpointing()
    gathered = pytest.raises(UserError, match="gathered layer by layer")
    with patch.object(options, "sharded", lambda net: True), gathered:
        rolled(vlm, ASKED, copies=2)
