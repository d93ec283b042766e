"""Attention backends and compiled blocks of diffusers' networks, without the hardware that most of
them need."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers.models import attention_processor
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from mmrl.core.errors import UserError
from mmrl.core.registry import locate
from mmrl.policies.diffusion import attention_backends
from mmrl.policies.diffusion.attention_backends import AttentionChoice
from mmrl.zoo.models.diffusion.sd3 import SD3
from samplers.noise import Rng
from tests.policies.diffusion.test_folder_families import PROMPTS, make, trainer_of


def definition(q, k, v, attn_bias=None, p=0.0, scale=None, op=None):
    """Attention by its formula, called as xformers' [B, N, D]."""
    scores = q @ k.mT * scale
    return (scores if attn_bias is None else scores + attn_bias).softmax(-1) @ v


@pytest.fixture
def xformers(monkeypatch):
    """What stands for xformers: diffusers' own attention by its definition, which runs
    everywhere."""
    ops = SimpleNamespace(memory_efficient_attention=definition)
    monkeypatch.setattr(attention_processor, "xformers", SimpleNamespace(ops=ops))
    monkeypatch.setitem(attention_backends.BACKENDS, "xformers", "_native_math")


def backends(net):
    processors = [getattr(layer, "processor", None) for layer in net.modules()]
    return {p._attention_backend for p in processors if hasattr(p, "_attention_backend")}


def test_a_backend_reaches_every_layer_behind_the_dispatcher_and_no_other_model(xformers):
    policy, bystander = make("wan-two"), make("wan-two")
    before = _AttentionBackendRegistry.get_active_backend()
    attention_backends.use(policy.net, "xformers")
    assert backends(policy.net) == {AttentionBackendName._NATIVE_MATH}
    assert backends(bystander.net) == {None}
    assert _AttentionBackendRegistry.get_active_backend() == before
    attention_backends.use(policy.net, "sdpa")
    assert backends(policy.net) == {AttentionBackendName.NATIVE}


@pytest.mark.parametrize("case", ["flux", "sd", "sd3"])
def test_samples_are_the_same_on_every_backend(case, xformers):
    policy = sd3() if case == "sd3" else make(case)
    samples = []
    for backend in (None, "xformers", "sdpa"):
        if backend:
            attention_backends.use(policy.net, backend)
        with torch.no_grad():
            samples.append(policy.rollout(PROMPTS, 1, Rng.of("same")).sample)
    plain, sample, again = samples
    torch.testing.assert_close(sample, plain, atol=1e-4, rtol=1e-4)
    assert not torch.equal(sample, plain) and torch.equal(again, plain)


def sd3():
    return SD3(locate("world:digits/sd3-test"), size=32, steps=2)


@pytest.mark.parametrize(("name", "package"), [("xformers", "xformers"), ("flash", "flash-attn")])
def test_a_backend_that_cannot_run_here_is_refused_with_the_remedy(name, package, monkeypatch):
    says = f"attention = {name} needs a CUDA device.*use auto or sdpa"
    with pytest.raises(UserError, match=says):
        make("flux", attention=name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_backends, "version", lambda _: None)
    with pytest.raises(UserError, match=f"pip install {package}"):
        attention_backends.check(name)
    monkeypatch.setattr(attention_backends, "version", lambda _: "1")
    choice = AttentionChoice(make("flux").net, name)
    with pytest.raises(UserError, match="runs on CUDA only; the model is on cpu"):
        choice.settle(lambda: None)


def test_a_backend_without_a_fitting_layer_or_kernel_is_refused_by_name(monkeypatch):
    def broken():
        raise ValueError("no kernel for this\nand more")

    monkeypatch.setattr(AttentionChoice, "_chosen", lambda self, *_: self.backend)
    monkeypatch.setitem(attention_backends.BACKENDS, "xformers", "_native_math")
    for name, backend, trial, says in (
        ("sd", "flash", int, "UNet2DConditionModel has no attention layer that can use it"),
        ("flux", "xformers", broken, "this model in this precision: no kernel for this; use auto"),
    ):
        policy = make(name)
        policy.attending.backend = backend
        with pytest.raises(UserError, match=says):
            policy.attending.settle(trial)
    assert attention_backends._seconds(broken) == float("inf")  # auto passes it over


@pytest.mark.parametrize(("xformers_ms", "chosen"), [(1.01, "xformers"), (1.2, "sdpa")])
def test_auto_takes_xformers_where_it_is_no_slower_and_measures_once(
    xformers_ms, chosen, xformers, monkeypatch
):
    monkeypatch.setattr(attention_backends, "_measured", {})
    measured = []
    times = {AttentionBackendName._NATIVE_MATH: xformers_ms, AttentionBackendName.NATIVE: 1.0}

    def seconds(trial):
        measured.append(trial)
        return times[next(iter(backends(choice.net)))]

    monkeypatch.setattr(attention_backends, "_seconds", seconds)
    for i in range(2):
        choice = AttentionChoice(make("flux").net, "auto")
        notes = []
        backend = choice._measure(torch.float32, lambda: None, notes)
        assert backend == chosen and len(measured) == 2 and len(notes) == (i == 0)
    # on a CPU there is nothing to try
    assert AttentionChoice(make("flux").net, "auto").settle(lambda: None) == []


def test_compiled_blocks_sample_and_train_as_plain_ones():
    """Sampling records gradients too: a graph that does not may round in another way than one that
    does."""
    torch._dynamo.reset()
    make("flux")  # built now: that draws from the generator which adapters begin with
    calls, weights = [], []
    for options in ({}, {"compile": "eager"}):
        policy = make("flux", lora=2, steps=2, **options)
        policy.net.x_embedder.register_forward_hook(
            lambda *_: calls.append(torch.is_grad_enabled())
        )
        metrics = trainer_of(policy).iterate()
        assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
        weights.append(policy.weights.full())
    compiled = [m for m in policy.net.modules() if m._compiled_call_impl is not None]
    assert policy.compiled and len(compiled) == 2 and all(calls[-3:])
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=2e-5, rtol=1e-4)


def test_a_compiler_that_is_not_there_is_the_users_to_mend(monkeypatch):
    says = "policy option compile: no backend 'no_such_backend'; there are .*inductor"
    with pytest.raises(UserError, match=says):
        make("flux", compile="no_such_backend")
    policy = make("flux")
    policy.compiled = True

    def broken(*_):
        error = RuntimeError("no C++ compiler")
        raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, error, None)

    monkeypatch.setattr(policy, "velocity", broken)
    says = "cannot build this model's kernels here.*or leave it out"
    with torch.no_grad(), pytest.raises(UserError, match=says):
        policy.rollout(PROMPTS, 1, Rng.of("same"))
