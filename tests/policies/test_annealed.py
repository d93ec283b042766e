"""Temperatures that change along an answer: what is scored is what was drawn from, decision by
decision."""

import math
from dataclasses import replace

import pytest
import torch

from mmrl.policies.base import RolloutContext
from mmrl.train.minibatches import passes
from samplers.noise import Rng
from samplers.warp import Anneal, EntropyScale, Warp
from tests.core.test_contract import made
from tests.policies.test_contract_policies import prompts_for, roll

STEEP = {"highest": 1.3, "lowest": 0.4, "decay": 8.0}
MODELS = {
    "vlm": {"temperature": 0.8, "top_k": 9},
    "llamagen": {"top_p": 0.9},
    "var": {},
    "masked_lm": {"sampler": "maskgit"},
}
SCALE = EntropyScale(median=0.3, std=0.5, highest=1.5, lowest=-2.0)


def model(name, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return made("policies", name, extra={**MODELS[name], **options})


def gap(policy, rollout, apart=False):
    """The largest distance of a log-prob scored again to the one recorded."""
    gaps = [torch.zeros(())]
    with torch.no_grad():
        for point in passes(policy.path(rollout), None):
            # apart: of another tensor, by the head alone
            scored = policy.dist(point).log_prob(point.target.clone() if apart else point.target)
            gaps.append(torch.where(point.mask, scored - point.recorded, 0.0).abs().max())
    return float(torch.stack(gaps).max())


def test_the_temperature_falls_as_the_paper_has_it():
    options = Anneal(highest=1.2, lowest=0.1, decay=20.0, growth=5.0, longest=28.0)
    for iteration, d in ((0, 20.0), (1, 25.0), (2, 28.0), (9, 28.0)):
        falls = options.temperatures(60, iteration)
        for t, temperature in enumerate(falls):
            assert temperature == pytest.approx(max(1 + 1.2 - math.exp(t / d), 0.1), abs=1e-12)
        assert falls[0] == pytest.approx(1.2) and falls[-1] == 0.1
    assert Anneal(decay=1.0).temperatures(5000)[-1] == 0.1  # no overflow
    with pytest.raises(ValueError, match="lowest"):
        Anneal(lowest=2.0)


def test_a_warp_divides_by_the_temperature_of_the_place():
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    warp = Warp(0.5, schedule=(2.0, 1.0, 0.25))
    place = torch.tensor([2, 0, 1, 9])
    wanted = torch.stack([row / (0.5 * t) for row, t in zip(logits, (0.25, 2.0, 1.0, 0.25))])
    torch.testing.assert_close(warp(logits, place=place), wanted, atol=1e-12, rtol=0)
    torch.testing.assert_close(warp(logits, place=1), logits / 0.5, atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="places"):
        warp(logits)


def test_a_warp_follows_the_entropy_of_its_logits():
    """HAPO: T (1 + tau h), h the place of log H, clamped to [-1, 1]."""
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = logits * torch.tensor([[0.1], [1.0], [3.0], [9.0], [40.0]])
    warped = Warp(0.9, adaptive=0.2, scale=SCALE)(logits)
    for row, found in zip(logits.tolist(), warped.tolist(), strict=True):
        x = [v / 0.9 for v in row]
        total = math.log(sum(map(math.exp, x)))
        entropy = -sum(math.exp(v - total) * (v - total) for v in x)
        h = (math.log(max(entropy, 1e-6)) - 0.3) / (0.5 + 1e-6)
        h = max(-1.0, min(1.0, h / 1.5 if h > 0 else h / 2.0))
        assert found == pytest.approx([v / (1 + 0.2 * h) for v in x], abs=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_the_first_ratio_is_one_under_an_annealed_temperature(name):
    policy = model(name, anneal={**STEEP, "growth": 8.0}, record_entropy=True)
    with torch.no_grad():
        rollout = policy.rollout(prompts_for(policy), 2, Rng.of("i"), RolloutContext(iteration=3))
    assert gap(policy, rollout) < 1e-4 and gap(policy, rollout, apart=True) < 1e-4
    assert gap(model(name), rollout) > 1e-2  # one temperature is not what was drawn from


@pytest.mark.parametrize("name", ["vlm", "var"])
def test_the_first_ratio_is_one_under_a_temperature_that_follows_the_entropy(name):
    policy = model(name, adaptive_temperature=0.3)
    policy.warp = replace(policy.warp, scale=SCALE)
    rollout = roll(policy)
    assert gap(policy, rollout) < 1e-4
    assert gap(model(name), rollout) > 1e-3
