"""All families of image tokens: exact over all images of a tiny instance, the same token by token
as at once, whatever the precision, and after an export."""

import pytest
import torch

from mmrl.core.errors import UserError
from samplers.noise import Rng
from tests.fixtures import toys
from tests.fixtures.image_tokens import (
    cosine,
    every,
    flat_grad,
    logp,
    policy_of,
    support,
    trainer_of,
)

PROMPT = {"text": "a red seven", "label": 2}
PROMPTS = [PROMPT, {"text": "a blue two left of a green nine", "label": 0}]
IMAGES = {"var": every(2, 5), "glm_image": every(3, 5)}
VOCAB = {"var": 2, "var-3": 2}


def of(name, **options):
    return policy_of(name, vocab=VOCAB.get(name, 3), **options)


def images(name):
    return IMAGES.get(name, every(3, 4))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llamagen-classes", {"guidance_scale": 1.0}),
        ("llamagen", {"guidance_scale": 3.0, "temperature": 0.7}),
        ("var", {"guidance_scale": 3.0, "temperature": 0.7}),
        ("var", {"guidance_scale": 4.0, "top_p": 0.7}),
        ("janus-images", {"guidance_scale": 2.0, "top_p": 0.8, "temperature": 1.3}),
        ("emu3", {"guidance_scale": 2.0, "top_k": 2}),
        ("glm_image", {"temperature": 0.7}),
    ],
)
def test_probabilities_sum_to_1_and_samples_come_at_their_rate(name, options):
    """A token outside the support is scored as if it were inside: what can be sampled sums to 1."""
    policy = of(name, **options)
    ids = images(name)
    copies = 1000
    with torch.no_grad():
        p = logp(policy, ids, PROMPT).exp()
        possible = support(policy, ids, PROMPT)
        rollout = policy.rollout([PROMPT], copies, Rng.of("frequencies"))
    if {"top_k", "top_p"} & set(options):
        assert 1 <= possible.sum() < len(ids)
    else:
        assert possible.all()
    p = p * possible
    assert abs(p.sum() - 1) < 1e-10
    index = (rollout.sample[:, None] == ids).all(2).long().argmax(1)
    torch.testing.assert_close(rollout.logprob.sum(1).exp(), p[index], atol=1e-10, rtol=1e-8)
    counts = torch.bincount(index, minlength=len(ids))
    common = p * copies > 5
    chi = ((counts - p * copies) ** 2 / (p * copies))[common].sum()
    assert chi < common.sum() + 4 * (2 * common.sum()) ** 0.5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llamagen-classes", {"guidance_scale": 1.0}),
        ("llamagen", {"guidance_scale": 4.0}),
        ("var-3", {"guidance_scale": 4.0}),
        ("janus-images", {"guidance_scale": 4.0}),
        ("emu3", {"guidance_scale": 4.0, "size": 24}),
        ("glm_image", {}),
    ],
)
def test_token_by_token_is_all_at_once_with_ragged_prompts(name, options):
    policy = of(name, **options)
    rollout = policy.rollout(PROMPTS, 3, Rng.of("ragged"))
    (point,) = policy.path(rollout)
    with torch.no_grad():
        again = policy.dist(point).log_prob(point.target)
        alone = [logp(policy, rollout.sample[i : i + 1], PROMPTS[i // 3]) for i in range(6)]
    torch.testing.assert_close(again, rollout.logprob, atol=1e-11, rtol=0)
    torch.testing.assert_close(torch.cat(alone), rollout.logprob.sum(1), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["llamagen", "var"])
def test_the_matched_gradient_is_the_true_one_and_the_published_is_not(name):
    """Of the score without guidance, which most codes publish, less the more guidance there is."""
    ids = images(name)
    reward = torch.linspace(-1, 2, len(ids), dtype=torch.float64).sin()

    def found(scale, kind):
        sampled = of(name, guidance_scale=scale)
        p = logp(sampled, ids, PROMPT).exp()
        true = flat_grad(sampled, (p * reward).sum())
        scored = of(name, guidance_scale=scale, logprob_guidance=kind)
        weight = (p * (reward - (p * reward).sum())).detach()
        return cosine(true, flat_grad(scored, (weight * logp(scored, ids, PROMPT)).sum()))

    assert found(5.0, "guided") == pytest.approx(1, abs=1e-9)
    assert found(1.0, "conditional") == pytest.approx(1, abs=1e-9)
    assert found(5.0, "conditional") < found(2.0, "conditional") < 0.9999


@pytest.mark.parametrize("name", ["llamagen", "var", "emu3"])
def test_recomputed_layers_give_the_same_gradient(name):
    plain, again = of(name), of(name)
    again.enable_gradient_checkpointing()
    ids = images(name)[:9]
    first, second = (flat_grad(p, logp(p, ids, PROMPT).sum()) for p in (plain, again))
    torch.testing.assert_close(first, second, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(("name", "options"), [("llamagen", {}), ("var", {"scale_alpha": 0.7})])
def test_the_first_ratio_is_one_in_training(name, options):
    """The second iteration starts from other weights, and a sampler that records something else is
    stopped."""
    policy = of(name, double=False, guidance_scale=3.0, **options)
    before = policy.weights.full()
    trainer = trainer_of(policy, PROMPTS)
    first = trainer.iterate()
    assert first["clip_fraction"] == 0 and first["ratio/max_deviation"] < 1e-4
    after = policy.weights.full()
    assert sum(not torch.equal(before[n], after[n]) for n in before) > 0.9 * len(before)
    second = trainer.iterate()
    assert second["ratio/max_deviation"] < 1e-4 and second["kl"] > 0
    with pytest.raises(UserError, match="re-scored log-probs differ"):
        trainer_of(toys.misremembers(policy, 1e-2), PROMPTS).iterate()


@pytest.mark.parametrize("name", ["var", "janus-images"])
def test_half_precision(name):
    """Scores of bfloat16 weights are recorded in float32; they are not trained. float32 weights
    computed in bfloat16 are: the gate lets rounding pass, and half a nat it does not."""
    policy = of(name, double=False, guidance_scale=3.0)
    policy.net.to(torch.bfloat16)
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 8, Rng.of("half"))
        (point,) = policy.path(rollout)
        gap = (policy.dist(point).log_prob(point.target) - rollout.logprob).abs()
    assert rollout.logprob.dtype == torch.float32 and gap.mean() < 2e-2, float(gap.mean())
    with pytest.raises(UserError, match="rounded away"):
        trainer_of(policy, PROMPTS, precision="bf16")
    policy.net.float()
    first = trainer_of(policy, PROMPTS, precision="bf16").iterate()
    assert first["clip_fraction"] == 0 and first["skipped_steps"] == 0
    with pytest.raises(UserError, match="re-scored log-probs differ .* on average"):
        trainer_of(toys.misremembers(policy, 0.5), PROMPTS, precision="bf16").iterate()


@pytest.mark.parametrize("name", ["llamagen", "janus-images"])
def test_a_compiled_token_is_the_same(name, monkeypatch):
    """One graph, whose shapes are those of the first token, draws the same tokens; here run without
    code generation."""
    graphs = []
    compiled = torch.compile

    def backend(module, inputs):
        graphs.append(len(module.graph.nodes))
        return module.forward

    own = {"backend": backend, "mode": None}
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compiled(fn, **options | own))
    policy = of(name, guidance_scale=3.0)
    with torch.no_grad():
        plain = policy.rollout(PROMPTS, 3, Rng.of("compiled"))
        policy.net.compile_token()
        found = policy.rollout(PROMPTS, 3, Rng.of("compiled"))
    assert len(graphs) == 1 and torch.equal(found.sample, plain.sample)
    torch.testing.assert_close(found.logprob, plain.logprob, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llamagen-classes", {"lora": 2}),
        ("var", {"lora": 2}),
        ("janus-images", {}),
        ("emu3", {}),
    ],
)
def test_what_is_loaded_from_an_export_scores_the_same(name, options, tmp_path):
    """Adapters are in its weights."""
    policy = of(name, double=False, **options)
    with torch.no_grad():
        for p in policy.weights.parameters().values():
            p.add_(0.1)
        policy.export(tmp_path)
        again = of(name, double=False, path=tmp_path)
        ids = images(name)
        torch.testing.assert_close(
            logp(again, ids, PROMPT), logp(policy, ids, PROMPT), atol=1e-4, rtol=0
        )


def test_what_cannot_be_compiled_or_run_is_refused(monkeypatch):
    with pytest.raises(UserError, match="many tokens in a pass"):
        of("var", compile=True)
    for options, sentence in (
        ({"compile": "fastest"}, "no backend 'fastest'"),
        ({"attention": "xformers"}, "needs a CUDA device"),
        ({"attention": "flash"}, "needs a CUDA device"),
    ):
        with pytest.raises(UserError, match=sentence):
            of("janus-images", **options)
    monkeypatch.setattr("mmrl.policies.image_tokens.policy.sharded", lambda net: True)
    with pytest.raises(UserError, match="leave it out, or the sharding"):
        of("janus-images", compile="eager").rollout(PROMPTS, 1, Rng.of("compiled"))
