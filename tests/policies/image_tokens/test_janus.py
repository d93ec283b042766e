"""Janus: exact by enumeration on a tiny instance of transformers' own class, and equal to its own
generation."""

import warnings

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.image_tokens.policy import ImageTokenPolicy
from mmrl.zoo.models.image_tokens.janus import Janus
from samplers.noise import Rng
from samplers.warp import Warp
from tests.fixtures.image_tokens import (
    assert_compiles,
    assert_frequencies,
    assert_half_precision,
    assert_importance_weights_are_unbiased,
    assert_sampled_is_scored,
    assert_trains,
    cosine,
    every,
    flat_grad,
    gradients,
    logp,
    support,
    tiny_janus,
)

PROMPT = {"text": "a red seven"}
PROMPTS = [PROMPT, {"text": "a blue two left of a green nine"}]
VOCAB = 3
TOKENS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A complete folder of the real class: three image tokens, four to an image."""
    return tiny_janus(tmp_path_factory.mktemp("janus"), VOCAB)


@pytest.fixture
def make(folder):
    def make(double=True, **options) -> ImageTokenPolicy:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = Janus(folder, **options)
        policy.net.to(torch.float64 if double else torch.float32)
        return policy

    return make


IDS = every(VOCAB, TOKENS)
REWARD = torch.linspace(-1, 2, len(IDS), dtype=torch.float64).sin()
MODES = [
    {"guidance_scale": 1.0},
    {"guidance_scale": 3.0},
    {"guidance_scale": 3.0, "temperature": 0.7},
    {"guidance_scale": 2.0, "top_k": 2},
    {"guidance_scale": 2.0, "top_p": 0.8, "temperature": 1.3},
    {"guidance_scale": 3.0, "logprob_guidance": "guided_stopgrad_uncond"},
]


@pytest.mark.parametrize("options", MODES[2:], ids=str)
def test_probabilities_of_all_images_sum_to_1(make, options):
    policy = make(**options)
    with torch.no_grad():
        p = logp(policy, IDS, PROMPT).exp()
    if "top_k" not in options and "top_p" not in options:
        assert abs(p.sum() - 1) < 1e-12 and (p > 0).all()
    # a token outside the support is scored as if it were inside: what can be sampled sums to 1
    else:
        possible = support(policy, IDS, PROMPT)
        assert 1 < possible.sum() < len(IDS) and abs(p[possible].sum() - 1) < 1e-12


@pytest.mark.parametrize("options", MODES[2:4], ids=str)
def test_samples_come_at_the_rate_of_their_score(make, options):
    policy = make(**options)
    copies = 1000
    with torch.no_grad():
        rollout = policy.rollout([PROMPT], copies, Rng.of("frequencies"))
        p = logp(policy, IDS, PROMPT).exp() * support(policy, IDS, PROMPT)
    index = (rollout.sample * VOCAB ** torch.arange(TOKENS - 1, -1, -1)).sum(1)
    counts = torch.bincount(index, minlength=len(IDS))
    assert (counts[p == 0] == 0).all()
    assert_frequencies(counts, p, copies)
    torch.testing.assert_close(rollout.logprob.sum(1).exp(), p[index], atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("options", MODES[2:4], ids=str)
def test_importance_weights_are_unbiased(make, options):
    policy = make(**{k: v for k, v in options.items() if k != "top_k"})
    assert_importance_weights_are_unbiased(
        policy, lambda: logp(policy, IDS, PROMPT), REWARD, within=1e-12
    )


@pytest.mark.parametrize(
    "options",
    [{"guidance_scale": 1.0}, {"guidance_scale": 5.0, "temperature": 0.7}],
)
def test_the_matched_gradient_is_the_true_one(make, options):
    true, estimated = gradients(make, IDS, REWARD, PROMPT, **options)
    assert cosine(estimated, true) > 1 - 1e-9
    # Llama's norms are in float32 throughout
    torch.testing.assert_close(estimated, true, atol=1e-6, rtol=0)


def test_the_mismatched_gradient_is_not(make):
    conditional = {"logprob_guidance": "conditional"}
    cosines = [
        cosine(*gradients(make, IDS, REWARD, PROMPT, guidance_scale=s, **conditional))
        for s in (1.0, 2.0, 5.0)
    ]
    assert (
        cosines[0] == pytest.approx(1, abs=1e-12)
        and cosines[0] > cosines[1] + 0.01
        and cosines[1] > cosines[2]
    )


@pytest.mark.parametrize("train", ["language", "generation"])
def test_without_gradient_through_the_unconditional_branch(make, train):
    """The gradient of the guided score with z_u held fixed, also in the head, and the same
    value."""
    stop, whole = (
        make(guidance_scale=3.0, logprob_guidance=kind, train=train)
        for kind in ("guided_stopgrad_uncond", "guided")
    )
    torch.testing.assert_close(
        logp(stop, IDS, PROMPT), logp(whole, IDS, PROMPT), atol=1e-12, rtol=0
    )
    gradient = flat_grad(stop, (REWARD * logp(stop, IDS, PROMPT)).sum())
    inputs = whole.collate(whole.encode([PROMPT]) * len(IDS))
    z = whole.net.vocabulary(whole.net.teach(inputs, IDS))
    z_empty = whole.net.vocabulary(whole.net.teach(whole.empty(inputs), IDS)).detach()
    guided = (z_empty + 3 * (z - z_empty)).log_softmax(-1).gather(-1, IDS[..., None]).sum((1, 2))
    torch.testing.assert_close(
        gradient, flat_grad(whole, (REWARD * guided).sum()), atol=1e-10, rtol=1e-8
    )


@pytest.mark.parametrize("train", ["language", "generation"])
def test_what_is_trained_gets_a_gradient(make, train):
    policy = make(train=train)
    logp(policy, IDS[:2], PROMPT).sum().backward()
    with_gradient = {name for name, p in policy.net.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, p in policy.net.named_parameters() if p.requires_grad}
    assert any("generation_head" in name for name in with_gradient) == (train == "generation")


@pytest.mark.parametrize("guidance", [4.0])
def test_token_by_token_is_all_at_once_with_ragged_prompts(make, guidance):
    policy = make(guidance_scale=guidance)
    rollout = assert_sampled_is_scored(policy, PROMPTS)
    assert len({encoded["ids"].shape for encoded in rollout.cond}) == 2


@pytest.mark.parametrize("guidance", [5.0])
def test_greedy_tokens_are_those_of_transformers(make, guidance):
    """Its own generation crashes at guidance 1, so the unguided case is compared at 1 + 1e-6."""
    policy = make(double=False, guidance_scale=guidance)
    compare(policy, guidance)


def test_unguided_greedy_tokens_are_those_of_transformers(make):
    compare(make(double=False, guidance_scale=1.0), 1 + 1e-6)


def compare(policy, guidance):
    policy.warp = Warp(temperature=0.0)
    ours = policy.rollout(PROMPTS, 1, Rng.of("greedy")).sample
    inputs = policy.collate(policy.encode(PROMPTS))
    hf = policy.net.hf
    hf.generation_config.bos_token_id = policy.bos
    hf.generation_config.pad_token_id = policy.pad
    hf.generation_config.generation_kwargs = {"boi_token_id": policy.start}
    theirs = hf.generate(
        inputs["ids"],
        attention_mask=inputs["mask"],
        generation_mode="image",
        guidance_scale=guidance,
        do_sample=False,
    )
    assert torch.equal(ours, theirs)
    images = policy.decode(policy.rollout(PROMPTS, 1, Rng.of("greedy")))
    expected = (hf.decode_image_tokens(theirs).permute(0, 3, 1, 2) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(images, expected.detach(), atol=1e-6, rtol=0)


def test_scoring_with_gradient_checkpointing_is_the_same(make):
    plain = make(guidance_scale=2.0)
    again = make(guidance_scale=2.0)
    again.enable_gradient_checkpointing()
    first, second = (flat_grad(p, logp(p, IDS[:9], PROMPT).sum()) for p in (plain, again))
    torch.testing.assert_close(first, second, atol=1e-12, rtol=1e-9)


def test_the_first_ratio_is_one_in_training(make):
    assert_trains(make(double=False, guidance_scale=3.0, top_k=2), PROMPTS)


def test_half_precision(make):
    assert_half_precision(make(double=False, guidance_scale=3.0), PROMPTS, apart=2e-2)


def test_a_compiled_token_is_the_same(make, monkeypatch):
    assert_compiles(make(guidance_scale=3.0), PROMPTS, monkeypatch)


def test_what_cannot_be_compiled_is_refused(make, folder, monkeypatch):
    with pytest.raises(UserError, match="no backend 'fastest'"):
        Janus(folder, compile="fastest")
    policy = make(compile="eager")
    policy.rollout(PROMPTS, 1, Rng.of("compiled"))
    monkeypatch.setattr("mmrl.policies.image_tokens.policy.sharded", lambda net: True)
    with pytest.raises(UserError, match="leave it out, or the sharding"):
        policy.rollout(PROMPTS, 1, Rng.of("compiled"))


def test_kernels_that_cannot_run_are_refused(folder):
    for kernel in ("xformers", "flash"):
        with pytest.raises(UserError, match="needs a CUDA device"):
            Janus(folder, attention=kernel)


def test_what_memory_allows_is_measured_on_few_tokens(make, monkeypatch):
    policy = make(sampling_memory_gib=1.0)
    widths = []
    draw = policy._draw
    monkeypatch.setattr(policy, "_draw", lambda *given: widths.append(given[4:]) or draw(*given))
    rollout = policy.rollout(PROMPTS, 2, Rng.of("memory"))
    assert widths == [(2,), (2,), ()] and rollout.sample.shape == (4, TOKENS)


def test_a_mismatch_is_named(folder):
    with pytest.warns(UserWarning, match="drawn with guidance 5 and scored without"):
        Janus(folder, logprob_guidance="conditional")


def test_another_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot load it|missing"):
        Janus(str(tmp_path))


def test_exports_load_again(make, tmp_path):
    policy = make(double=False, lora=2)
    with torch.no_grad():
        for p in policy.weights.parameters().values():
            p.add_(0.1)
    policy.export(tmp_path)
    assert (tmp_path / "adapter_config.json").is_file()
    whole = make(double=False)
    whole.export(tmp_path / "whole")
    again = Janus(str(tmp_path / "whole"))
    for key, value in again.net.state_dict().items():
        assert torch.equal(value, whole.net.state_dict()[key]), key
