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
    policy = make("wan-two")
    bystander = make("wan-two")
    before = _AttentionBackendRegistry.get_active_backend()
    attention_backends.use(policy.net, "xformers")
    assert backends(policy.net) == {AttentionBackendName._NATIVE_MATH} and backends(
        bystander.net
    ) == {None}
    assert _AttentionBackendRegistry.get_active_backend() == before
    attention_backends.use(policy.net, "sdpa")
    assert backends(policy.net) == {AttentionBackendName.NATIVE}


@pytest.mark.parametrize("case", ["flux", "sd", "sd3"])
def test_samples_are_the_same_on_every_backend(case, xformers):
    policy = sd3() if case == "sd3" else make(case)
    with torch.no_grad():
        plain = policy.rollout(PROMPTS, 1, Rng.of("same")).sample
        attention_backends.use(policy.net, "xformers")
        sample = policy.rollout(PROMPTS, 1, Rng.of("same")).sample
        attention_backends.use(policy.net, "sdpa")
        again = policy.rollout(PROMPTS, 1, Rng.of("same")).sample
    torch.testing.assert_close(sample, plain, atol=1e-4, rtol=1e-4)
    assert not torch.equal(sample, plain) and torch.equal(again, plain)


def sd3():
    return SD3(locate("world:digits/sd3-test"), size=32, steps=2)


def test_the_first_step_is_on_policy_with_a_backend_chosen_by_name(xformers, monkeypatch):
    policy = make("flux", guidance_scale=2.0)
    monkeypatch.setattr(AttentionChoice, "_chosen", lambda *_: "xformers")
    policy.attending.backend = "xformers"
    metrics = trainer_of(policy).iterate()
    assert (
        policy.attending.used == "xformers"
        and metrics["ratio/max_deviation"] == 0.0
        and metrics["grad_norm"] > 0
    )


@pytest.mark.parametrize(("name", "package"), [("xformers", "xformers"), ("flash", "flash-attn")])
def test_a_backend_that_cannot_run_here_is_refused_with_the_remedy(name, package, monkeypatch):
    with pytest.raises(
        UserError, match=f"attention = {name} needs a CUDA device.*use auto or sdpa"
    ):
        make("flux", attention=name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_backends, "version", lambda _: None)
    with pytest.raises(UserError, match=f"pip install {package}"):
        attention_backends.check(name)
    monkeypatch.setattr(attention_backends, "version", lambda _: "1")
    choice = AttentionChoice(make("flux").net, name)
    with pytest.raises(UserError, match="runs on CUDA only; the model is on cpu"):
        choice.settle(lambda: None)


def test_networks_without_a_fitting_layer_say_so(monkeypatch):
    monkeypatch.setattr(AttentionChoice, "_chosen", lambda self, *_: self.backend)
    policy = make("sd")
    policy.attending.backend = "flash"
    with pytest.raises(
        UserError, match="UNet2DConditionModel has no attention layer that can use it"
    ):
        policy.attending.settle(lambda: None)
    assert attention_backends.able(policy.net, "xformers") and not attention_backends.able(
        policy.net, "flash"
    )


def test_a_backend_that_fails_on_the_network_is_refused_by_name_and_passed_over_by_auto(
    monkeypatch,
):
    def broken():
        raise ValueError("no kernel for this\nand more")

    monkeypatch.setattr(AttentionChoice, "_chosen", lambda self, *_: self.backend)
    monkeypatch.setitem(attention_backends.BACKENDS, "xformers", "_native_math")
    policy = make("flux")
    policy.attending.backend = "xformers"
    with pytest.raises(
        UserError, match="cannot run this model in this precision: no kernel for this; use auto"
    ):
        policy.attending.settle(broken)
    assert attention_backends._seconds(broken) == float("inf")


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


def compiled(backend="eager", **options):
    torch._dynamo.reset()
    return make("flux", compile=backend, **options)


def test_compiled_blocks_sample_and_train_as_plain_ones():
    """Sampling records gradients too: a graph that does not may round in another way than one that
    does."""
    options = {"guidance_scale": 2.0, "lora": 2, "steps": 2}
    make("flux")  # built now: that draws from the generator which adapters begin with
    plain = make("flux", **options)
    quick = compiled("aot_eager", **options)
    calls = []
    assert (
        quick.compiled and sum(m._compiled_call_impl is not None for m in quick.net.modules()) == 2
    )
    quick.net.x_embedder.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    runs = []
    for policy in (plain, quick):
        metrics = trainer_of(policy).iterate()
        assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
        runs.append(policy.weights.full())
    assert all(calls) and len(calls) > 3 and quick.trained is quick.net
    for name, value in runs[0].items():
        torch.testing.assert_close(runs[1][name], value, atol=2e-5, rtol=1e-4)


def test_a_compiler_that_is_not_there_is_the_users_to_mend(monkeypatch):
    with pytest.raises(
        UserError, match="policy option compile: no backend 'no_such_backend'; there are .*inductor"
    ):
        compiled("no_such_backend")
    policy = make("flux")
    policy.compiled = True

    def broken(*_):
        raise torch._dynamo.exc.BackendCompilerFailed(
            lambda: None, RuntimeError("no C++ compiler"), None
        )

    monkeypatch.setattr(policy, "velocity", broken)
    with (
        torch.no_grad(),
        pytest.raises(UserError, match="cannot build this model's kernels here.*or leave it out"),
    ):
        policy.rollout(PROMPTS, 1, Rng.of("same"))
