"""Warped distributions: sums, supports, and the rule for the token that was chosen."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from samplers.warp import Warp

LOGITS = torch.randn(64, 23, generator=torch.Generator().manual_seed(0)) * 3
PLAIN = [Warp(), Warp(0.6), Warp(top_k=4), Warp(top_p=0.7), Warp(1.3, top_k=9, top_p=0.5)]
WARPS = [*PLAIN, Warp(0), Warp(suppressed=(3, 7)), Warp(0.8, 5, 0.9, suppressed=(0, 1))]


def test_supports_are_those_of_transformers_and_suppressed_ids_have_no_probability(subtests):
    for warp in PLAIN:
        with subtests.test(warp=warp):
            x = LOGITS.clone()
            for processor in (
                TemperatureLogitsWarper(warp.temperature) if warp.temperature != 1 else None,
                TopKLogitsWarper(warp.top_k) if warp.top_k else None,
                TopPLogitsWarper(warp.top_p) if warp.top_p < 1 else None,
            ):
                x = processor(None, x) if processor else x
            assert torch.equal(warp(LOGITS), x)
    for warp in WARPS:
        p = warp(LOGITS).softmax(-1)
        assert not p[:, list(warp.suppressed)].any() and ((p > 0).sum(-1) >= 1).all()


@pytest.mark.parametrize(
    ("warp", "logits", "possible"),
    [
        (Warp(top_p=0.4), torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), [1, 0, 0, 0]),
        (Warp(top_p=0.51), torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), [1, 1, 0, 0]),
        (Warp(top_p=0.8001), torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), [1, 1, 1, 0]),
        (Warp(top_k=2), torch.tensor([1.0, 2.0, 1.0, 0.0]), [1, 1, 1, 0]),  # ties are kept
        (Warp(0), torch.tensor([0.5, 2.0, -1.0, 2.0]), [0, 1, 0, 0]),  # the first of the largest
        (Warp(0, suppressed=(1,)), torch.tensor([0.5, 2.0, -1.0, 2.0]), [0, 0, 0, 1]),
    ],
)
def test_what_is_kept(warp, logits, possible):
    assert warp(logits[None]).isfinite().long().tolist() == [possible]


@pytest.mark.parametrize("warp", [Warp(top_k=3), Warp(top_p=0.6), Warp(0.7, 5, 0.8)], ids=str)
def test_the_token_that_was_sampled_stays_finite_however_its_logits_round(warp):
    p = warp(LOGITS).softmax(-1)
    ids = p.multinomial(20, replacement=True, generator=torch.Generator().manual_seed(1))
    moved = LOGITS + torch.randn(LOGITS.shape, generator=torch.Generator().manual_seed(2)) * 0.5
    lost = 0
    for token in ids.unbind(1):
        plain, with_token = (
            warp(moved, keep=k).log_softmax(-1).gather(-1, token[:, None]) for k in (None, token)
        )
        lost += int(plain.isneginf().sum())
        assert with_token.isfinite().all()
        same = warp(LOGITS, keep=token)
        assert torch.equal(same, warp(LOGITS)), "without rounding the rule changes nothing"
    assert lost, "the case that the rule is for"


def test_gradients_are_those_of_the_truncated_distribution():
    x = LOGITS[:1].double().clone().requires_grad_()
    warped = Warp(0.5, top_k=4)
    warped(x, keep=x.argmax(-1)).log_softmax(-1).max().backward()
    support = ~warped(x).isneginf()[0]
    p = (x[0, support] / 0.5).softmax(-1).detach()
    expected = ((p == p.max()).double() - p) / 0.5
    torch.testing.assert_close(x.grad[0, support], expected)
    assert not x.grad[0, ~support].any()


def test_many_positions_are_warped_one_by_one(subtests):
    logits = LOGITS.view(4, 16, 23)
    keep = logits.argmin(-1)
    for warp in WARPS:
        with subtests.test(warp=warp):
            for kept in (None, keep):
                rows = warp(LOGITS, None if kept is None else kept.flatten())
                assert torch.equal(warp(logits, kept).flatten(0, 1), rows)


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_what_means_nothing_is_refused(options):
    with pytest.raises(ValueError, match="temperature must be"):
        Warp(**options)
