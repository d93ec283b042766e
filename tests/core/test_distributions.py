import math

import pytest
import torch
from torch import distributions as reference

from mmrl.core.distributions import BLOCK, Categorical, Gaussian, Score, drawn
from samplers.noise import Rng


def gaussian(seed, reduction="sum"):
    rng = torch.Generator().manual_seed(seed)
    mean = torch.randn(3, 2, 4, generator=rng, dtype=torch.float64)
    return Gaussian(mean, 0.1 + torch.rand(3, 1, 1, generator=rng, dtype=torch.float64), reduction)


def test_gaussian_equals_torch():
    p, q = gaussian(0), gaussian(1)
    x = gaussian(2).mean
    P, Q = (reference.Normal(d.mean, d.std) for d in (p, q))
    torch.testing.assert_close(p.log_prob(x)[:, 0], P.log_prob(x).flatten(1).sum(1))
    torch.testing.assert_close(p.kl(q)[:, 0], reference.kl_divergence(P, Q).flatten(1).sum(1))
    torch.testing.assert_close(p.entropy()[:, 0], P.entropy().flatten(1).sum(1))
    assert torch.equal(p.kl(gaussian(0)), torch.zeros(3, 1, dtype=torch.float64))
    mean = gaussian(0, "mean")  # divides by the dimensions
    torch.testing.assert_close(mean.log_prob(x) * 8, p.log_prob(x))
    torch.testing.assert_close(mean.kl(gaussian(1, "mean")) * 8, p.kl(q))
    assert Gaussian(p.mean, p.std).reduction == Score(p.mean, p.std).reduction == "mean"


def test_samples_copies_and_scores_of_a_gaussian():
    p, noise = gaussian(0), gaussian(1).mean
    torch.testing.assert_close(p.sample(noise), p.mean + p.std * noise, atol=1e-12, rtol=0)
    twice = p.repeat(2)
    assert torch.equal(twice.mean, p.mean.repeat_interleave(2, 0)) and twice.reduction == "sum"
    assert torch.equal(twice.std, p.std.repeat_interleave(2, 0))
    for reduction, count in (("sum", 1), ("mean", 8)):
        distance = -(p.mean - noise).square().flatten(1).sum(1, keepdim=True) / count
        torch.testing.assert_close(Score(p.mean, p.std, reduction).log_prob(noise), distance)


def categorical(seed, vocabulary=7, impossible=False):
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 2, vocabulary, generator=rng, dtype=torch.float64)
    if impossible:
        logits[..., ::3] = -torch.inf
    return Categorical(logits.requires_grad_())


@pytest.mark.parametrize("impossible", [False, True])
def test_categorical_probabilities_sum_to_one_by_enumeration(impossible):
    p = categorical(0, impossible=impossible)
    each = torch.stack([p.log_prob(torch.full((3, 2), v)).exp() for v in range(7)])
    torch.testing.assert_close(each.sum(0), torch.ones(3, 2, dtype=torch.float64))
    torch.testing.assert_close(p.entropy(), -(each * each.clamp_min(1e-300).log()).sum(0))


@pytest.mark.parametrize("impossible", [False, True])
def test_categorical_kl_equals_torch_and_has_finite_gradients(impossible):
    p = categorical(0, impossible=impossible)
    q = categorical(1, impossible=impossible)
    possible = p.logits.isfinite()[0, 0]
    expected = reference.kl_divergence(
        *(reference.Categorical(logits=d.logits[..., possible]) for d in (p, q))
    )
    torch.testing.assert_close(p.kl(q), expected)
    for grad in torch.autograd.grad((p.kl(q) + p.entropy()).sum(), [p.logits, q.logits]):
        assert grad[..., possible].isfinite().all() and not grad[..., ~possible].nan_to_num().any()


def test_draws_invert_the_cumulative_distribution_and_report_their_log_probs(subtests):
    for vocab in [7, BLOCK, 5 * BLOCK, 5 * BLOCK + 1]:
        for dtype in [torch.float32, torch.float64]:
            with subtests.test(vocab=vocab, dtype=dtype):
                rng = Rng.of("drawn")
                logits = 3 * rng.normal(torch.arange(6), (vocab,), dtype=dtype)
                # whole ranges of a truncated vocabulary are impossible, also at its ends
                logits[:, ::3] = -math.inf
                logits[:, vocab // 2 :] = -math.inf
                uniform = rng.uniform(torch.arange(6), (400,), 1)
                uniform[:, 0], uniform[:, 1] = 2.0**-33, 1 - 2.0**-33
                token, logprob = drawn(logits, uniform)
                p = logits.double().softmax(-1)
                expected = p.log().gather(-1, token).to(dtype)
                torch.testing.assert_close(logprob, expected, rtol=1e-5, atol=1e-5)
                above = p.cumsum(-1).gather(-1, token)
                slack = 1e-12 if dtype == torch.float64 else 1e-6
                assert (above > uniform - slack).all()
                assert (above - p.gather(-1, token) <= uniform + slack).all()
                if dtype == torch.float64:
                    assert torch.equal(token, (p.cumsum(-1)[:, None] <= uniform[..., None]).sum(-1))


def test_the_kl_of_a_deterministic_step_is_that_of_the_least_std():
    """A standard deviation of 0 counts as 1e-12, so that the divergence is finite."""
    mean = torch.zeros(1, 1, dtype=torch.float64)
    none, one = Gaussian(mean, mean), Gaussian(mean, mean + 1.0)
    for p, q, s, t in ((none, one, 1e-12, 1.0), (one, none, 1.0, 1e-12)):
        expected = math.log(t / s) + 0.5 * ((s / t) ** 2 - 1)
        assert float(p.kl(q)) == pytest.approx(expected, rel=1e-12)
    density = 12 * math.log(10) - 0.5 * math.log(2 * math.pi)
    assert float(none.log_prob(mean)) == pytest.approx(density, rel=1e-12)


@pytest.mark.parametrize("vocab", [4, 2 * BLOCK])
def test_a_number_at_an_edge_belongs_to_the_token_behind_it(vocab):
    """The first token whose cumulative probability is above the number, between blocks and inside
    of one."""
    edges = torch.arange(1, 4) / 4
    token, _ = drawn(torch.zeros(1, vocab, dtype=torch.float64), edges[None].double())
    assert token.tolist() == [[vocab // 4, vocab // 2, 3 * vocab // 4]]


def test_a_long_tail_of_improbable_tokens_is_drawn():
    """Weights of 1e-8 beside one of 1, each of which float32 could not add to the running sum."""
    logits = torch.full((1, BLOCK), math.log(1e-8))
    logits[0, 0] = 0.0
    total = 1 + (BLOCK - 1) * 1e-8
    uniform = torch.tensor([[0.5, (1 + 60.5e-8) / total]], dtype=torch.float64)
    (first, later) = drawn(logits, uniform)[0][0].tolist()
    assert first == 0 and abs(later - 61) <= 12  # float32 knows the total to 6e-8 only
