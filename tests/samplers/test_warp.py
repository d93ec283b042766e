"""Warped distributions: sums, supports, and the rule for the token that was chosen."""

import pytest
import torch

from samplers.warp import Warp

LOGITS = torch.randn(64, 23, generator=torch.Generator().manual_seed(0)) * 3
WARPS = [
    Warp(),
    Warp(0.6),
    Warp(top_k=4),
    Warp(top_p=0.7),
    Warp(1.3, top_k=9, top_p=0.5),
    Warp(0),
    Warp(suppressed=(3, 7)),
    Warp(0.8, top_k=5, top_p=0.9, suppressed=(0, 1)),
]


def test_probabilities_sum_to_one_and_suppressed_ids_have_none(subtests):
    for warp in WARPS:
        with subtests.test(warp=warp):
            p = warp(LOGITS).softmax(-1)
            torch.testing.assert_close(p.sum(-1), torch.ones(64))
            assert not p[:, list(warp.suppressed)].any()
            support = (p > 0).sum(-1)
            assert (support <= (warp.top_k or 23)).all() and (support >= 1).all()


def test_it_is_what_transformers_does(subtests):
    for warp in WARPS[:5]:
        with subtests.test(warp=warp):
            from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

            x = LOGITS.clone()
            for processor in (
                TemperatureLogitsWarper(warp.temperature) if warp.temperature != 1 else None,
                TopKLogitsWarper(warp.top_k) if warp.top_k else None,
                TopPLogitsWarper(warp.top_p) if warp.top_p < 1 else None,
            ):
                x = processor(None, x) if processor else x
            assert torch.equal(warp(LOGITS), x)


def test_nucleus_keeps_the_token_that_crosses():
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    for top_p, count in ((0.4, 1), (0.5, 1), (0.51, 2), (0.8001, 3), (1.0, 4)):
        assert int((Warp(top_p=top_p)(p.log()).softmax(-1) > 0).sum()) == count


@pytest.mark.parametrize("warp", [Warp(top_k=3), Warp(top_p=0.6), Warp(0.7, 5, 0.8)], ids=str)
def test_the_token_that_was_sampled_stays_finite_however_its_logits_round(warp):
    ids = (
        warp(LOGITS)
        .softmax(-1)
        .multinomial(20, replacement=True, generator=torch.Generator().manual_seed(1))
    )
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


def test_ties_at_the_edge_are_all_kept():
    assert torch.equal(
        Warp(top_k=2)(torch.tensor([1.0, 2.0, 1.0, 0.0])).isneginf(),
        torch.tensor([0, 0, 0, 1]).bool(),
    )


def test_gradients_are_those_of_the_truncated_distribution():
    x = LOGITS[:1].double().clone().requires_grad_()
    warped = Warp(0.5, top_k=4)
    warped(x, keep=x.argmax(-1)).log_softmax(-1).max().backward()
    support = ~warped(x).isneginf()[0]
    p = (x[0, support] / 0.5).softmax(-1).detach()
    expected = ((p == p.max()).double() - p) / 0.5
    torch.testing.assert_close(x.grad[0, support], expected)
    assert not x.grad[0, ~support].any()


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_what_means_nothing_is_refused(options):
    with pytest.raises(ValueError, match="temperature must be"):
        Warp(**options)


def test_greedy_keeps_the_first_of_the_largest():
    logits = torch.tensor([[0.5, 2.0, -1.0, 2.0], [3.0, 2.0, 3.0, -4.0]])
    assert Warp(0)(logits).isfinite().tolist() == [
        [False, True, False, False],
        [True, False, False, False],
    ]
    assert Warp(0, suppressed=(1,))(logits).isfinite().tolist() == [
        [False, False, False, True],
        [True, False, False, False],
    ]


def test_many_positions_are_warped_one_by_one(subtests):
    for warp in WARPS:
        with subtests.test(warp=warp):
            logits = LOGITS.view(4, 16, 23)
            keep = logits.argmin(-1)
            whole = warp(logits)
            warped_logits = warp(logits, keep)
            for b in range(4):
                for t in range(16):
                    assert torch.equal(whole[b, t], warp(logits[b, t][None])[0])
                    assert torch.equal(
                        warped_logits[b, t], warp(logits[b, t][None], keep[b, t][None])[0]
                    )
