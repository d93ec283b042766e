"""No failure of a reward passes for a low score: retries, bisection, counting, and when to stop."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.scoring import Scorer

B = 8
# sample i is worth i / 10
MEDIA = torch.arange(B, dtype=torch.float32).view(B, 1, 1, 1).expand(B, 3, 4, 4) / 10
PROMPTS = [{"text": f"prompt {i}"} for i in range(B)]
GOOD = torch.arange(B) / 10


def value(media, prompts):
    return media[:, 0, 0, 0]


class Flaky:
    """Raises, or returns NaN, as long as ``budget`` lasts, whenever a guilty sample is in the
    batch."""

    def __init__(self, guilty=(), budget=10**9, nan=False):
        self.guilty = {f"prompt {i}" for i in guilty}
        self.budget = budget
        self.nan = nan
        self.calls = []

    def __call__(self, media, prompts):
        self.calls.append([int(p["text"].split()[1]) for p in prompts])
        values = value(media, prompts).clone()
        bad = [p["text"] in self.guilty for p in prompts]
        if any(bad) and self.budget > 0:
            self.budget -= 1
            if not self.nan:
                raise RuntimeError("the judge is out")
            values[torch.tensor(bad)] = torch.nan
        return values


def score(reward, media=MEDIA, **options):
    scorer = Scorer({"mine": reward}, **options)
    return scorer(media, PROMPTS)["mine"], scorer


def without(*rows):
    expected = GOOD.clone()
    expected[list(rows)] = torch.nan
    return expected


def same(values, expected):
    torch.testing.assert_close(values, expected, equal_nan=True)


def test_healthy_rewards_are_asked_once_and_come_back_with_their_weights():
    flaky = Flaky()
    scorer = Scorer({"a": flaky, "b": lambda media, prompts: -value(media, prompts)}, {"a": 2.0})
    rewards = scorer(MEDIA.bfloat16().to(torch.float64), PROMPTS)
    assert isinstance(rewards, Rewards) and list(rewards) == ["a", "b"]
    assert all(v.dtype == torch.float32 and v.shape == (B,) for v in rewards.values())
    assert (
        rewards.weights == {"a": 2.0, "b": 1.0} and len(flaky.calls) == 1 and scorer.failures == {}
    )
    torch.testing.assert_close(rewards.total(), rewards["a"])
    assert set(scorer.seconds) == {"a", "b"} and all(s > 0 for s in scorer.seconds.values())


def test_a_fault_is_looked_at_again_and_then_only_the_guilty_are_lost():
    """A batch that raises is called once more, then in halves; of values that are not finite the
    guilty are asked for alone."""
    every = list(range(B))
    for nan in (False, True):
        passing = Flaky(guilty=[3, 4], budget=1, nan=nan)
        values, scorer = score(passing)
        same(values, GOOD)
        assert passing.calls == [every, [3, 4] if nan else every] and scorer.failures == {}
        lasting = Flaky(guilty=[2, 7], nan=nan)
        values, scorer = score(lasting)
        same(values, without(2, 7))
        assert lasting.calls[:2] == [every, [2, 7] if nan else every]
        assert len(lasting.calls) <= (2 if nan else 2 + 4 * 3)
        failure = scorer.failures["mine"]
        assert failure.count == 2 and failure.prompt == "'prompt 7'"
        cause = "returned NaN" if nan else "RuntimeError: the judge is out"
        assert cause in failure.cause and (nan or __file__ in failure.cause)


def test_a_second_look_that_raises_loses_only_the_guilty():
    calls = []

    def moody(media, prompts):
        calls.append(len(prompts))
        values = value(media, prompts).clone()
        if len(prompts) == B:
            values[:3] = torch.nan
        elif any(p["text"] == "prompt 1" for p in prompts):
            raise OSError("no answer")
        return values

    values, scorer = score(moody)
    same(values, without(1))
    assert scorer.failures["mine"].count == 1 and calls[:2] == [B, 3]


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, B - 1)), st.sets(st.integers(0, B - 1)))
def test_any_mixture_of_faults_loses_exactly_the_guilty(raising, nan):
    inner = Flaky(guilty=nan - raising, nan=True)
    outer = Flaky(guilty=raising)

    def both(media, prompts):
        return outer(media, prompts) + 0 * inner(media, prompts)

    values, scorer = score(both, max_failures=1.0)
    same(values, without(*(raising | nan)))
    assert sum(failure.count for failure in scorer.failures.values()) == len(raising | nan)


def test_too_many_failures_stop_with_reward_count_cause_place_and_remedy():
    same(score(Flaky(guilty=range(4)))[0], without(0, 1, 2, 3))  # exactly one half is allowed
    with pytest.raises(UserError) as caught:
        score(Flaky(guilty=range(5)))
    said = "'mine'|5 of 8|RuntimeError: the judge is out|'prompt 4'|train.max_reward_failure_rate"
    for part in (*said.split("|"), f"{__file__}:"):
        assert part in str(caught.value)
    with pytest.raises(UserError, match="1 of 8 samples.*it returned NaN, also when called again"):
        score(Flaky(guilty=[6], nan=True), max_failures=0.0)


def test_a_dead_reward_is_given_up_early():
    dead = Flaky(guilty=range(B))
    with pytest.raises(UserError, match="2 of 8"):
        score(dead, max_failures=0.2)
    assert len(dead.calls) <= 6


def test_failures_add_up_over_calls_and_each_cause_is_logged_once(caplog):
    scorer = Scorer({"mine": Flaky(guilty=[2, 5])})
    with caplog.at_level(logging.WARNING, logger="mmrl.scoring"):
        scorer(MEDIA, PROMPTS)
        scorer(MEDIA, PROMPTS)
    assert scorer.failures["mine"].count == 4
    assert len(caplog.records) == 1 and "'prompt 2'" in caplog.text
    assert "the judge is out" in caplog.text


def test_interrupts_and_user_errors_pass_through_at_once():
    calls = []

    def reward(media, prompts):
        calls.append(1)
        raise (KeyboardInterrupt if len(calls) == 1 else UserError)("the prompt has no text")

    for error in (KeyboardInterrupt, UserError):
        with pytest.raises(error):
            score(reward)
    assert len(calls) == 2


FORMS = [
    lambda v: v.tolist(),
    lambda v: v.numpy().astype(np.float64),
    lambda v: list(v),
    lambda v: list(v.numpy()),
    lambda v: tuple(v.tolist()),
    lambda v: v.clone().requires_grad_(),
    lambda v: v.double(),
]


@pytest.mark.parametrize("make", FORMS)
def test_lists_arrays_and_tensors_of_floats_are_taken(make):
    same(score(lambda media, prompts: make(value(media, prompts)))[0], GOOD)


EXPECTED = r"torch.float32 of shape \[8, 1\] for 8 samples; expected \[B\] = \[8\]"
BROKEN = [
    (torch.zeros(B, 1), EXPECTED),
    (torch.tensor(0.5), r"shape \[\]"),
    (0.5, r"shape \[\]"),
    ([0.0] * 7, r"shape \[7\]"),
    (torch.zeros(B, dtype=torch.complex64), "complex64"),
    (None, "NoneType that is not numbers"),
    ({"score": 1}, r"shape \[\]"),
    ({"a": [0.0] * B, "b": [0.0] * B}, "sub-scores a, b and does not say which is the reward"),
    (["good"] * B, "list that is not numbers"),
    ([None, "good"] * (B // 2), "not numbers"),
    ([[0.0], [0.0, 1.0]], "not numbers"),
]


@pytest.mark.parametrize(("returned", "says"), BROKEN)
def test_a_reward_that_breaks_the_contract_is_named(returned, says):
    with pytest.raises(UserError, match=f"reward 'mine' returned .*{says}"):
        score(lambda media, prompts: returned)


def test_a_reward_that_changes_its_input_is_caught():
    with pytest.raises(UserError, match="'mine' changed the samples it was given in place"):
        score(lambda media, prompts: value(media.clamp_(0, 0.3), prompts), media=MEDIA.clone())


def test_texts_are_sliced_as_lists():
    def length(media, prompts):
        assert isinstance(media, list)
        if any(text == "bad" for text in media):
            raise ValueError("bad text")
        return [len(text) for text in media]

    texts = ["x" * i for i in range(B)]
    texts[3] = "bad"
    values, _ = score(length, media=texts)
    assert values.isnan().nonzero().flatten().tolist() == [3] and values[7] == 7


def test_no_gradient_is_recorded_and_an_empty_batch_is_fine():
    modes = []
    score(lambda media, prompts: modes.append(torch.is_grad_enabled()) or value(media, prompts))
    assert modes == [False]
    empty = Scorer({"mine": Flaky()})(MEDIA[:0], [])
    assert empty["mine"].shape == (0,)


def test_inference_tensors_can_be_scored_and_a_fault_is_the_users_line():
    with torch.inference_mode():
        media = MEDIA.clone()
    same(score(Flaky(guilty=[1]), media=media)[0], without(1))

    def wrong(media, prompts):
        return torch.stack([media[0], prompts[0]])

    values, scorer = score(wrong, max_failures=1.0)
    assert values.isnan().all() and f"({__file__}:" in scorer.failures["mine"].cause


SETTINGS = [
    ({}, None, 0.5, "no reward is given"),
    ({"jpeg": value}, {"jpg": 1.0}, 0.5, "'jpg', which is not used; did you mean 'jpeg'"),
    ({"jpeg": value}, None, 1.5, "between 0 and 1, got 1.5"),
]


def test_wrong_settings_are_refused():
    for rewards, weights, limit, says in SETTINGS:
        with pytest.raises(UserError, match=says):
            Scorer(rewards, weights, limit)
    with pytest.raises(ValueError, match="8 samples but 3 prompts"):
        Scorer({"mine": value})(MEDIA, PROMPTS[:3])
