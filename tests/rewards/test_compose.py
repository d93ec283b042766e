"""Rewards made of rewards, votes without a ground truth, diversity, and advantages whose weights
move."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.advantages import dr_grpo
from mmrl.core.errors import UserError
from mmrl.core.types import Completion, Rewards
from mmrl.scoring import Handling, Scorer
from mmrl.zoo.advantages.online import MaxMin, Running
from rewards import (
    answer_frequency,
    bounded,
    by_task,
    co_reward,
    constrain,
    darling,
    dra,
    ensemble,
    gate,
    majority_vote,
    mean_logprob,
    noisy,
    pairwise_distance,
    routed,
    scheduled,
    self_certainty,
)
from rewards.card import card, card_of
from tests.advantages.test_advantages import rollout
from tests.fixtures.tiny_rewards import pictures, save_tiny_clip

B = 6
MEDIA = torch.zeros(B, 3, 2, 2)
PROMPTS = [{"text": "a"}] * B
numbers = st.lists(st.floats(-5, 5, width=32), min_size=B, max_size=B)
quick = settings(max_examples=40, deadline=None)


def gives(values, of="sample", **fields):
    values = torch.tensor(values, dtype=torch.float32)
    return card(of=of, **fields)(lambda media, prompts: values[: len(prompts)].clone())


def run(reward):
    return reward(MEDIA, PROMPTS)


# of rewards


@quick
@given(main=numbers, extra=numbers, above=st.floats(-3, 3, width=32))
def test_the_extra_reward_counts_above_the_gate_only(main, extra, above):
    rewards = run(gate(gives(main), gives(extra), above=above, weight=0.5))
    for r, m, e in zip(rewards.tolist(), main, extra, strict=True):
        assert r == pytest.approx(m + 0.5 * e if m >= above else m, abs=1e-5)


@quick
@given(one=numbers, two=numbers, three=numbers, penalty=st.floats(0, 2, width=32))
def test_ensembles_are_conservative(one, two, three, penalty):
    def of(how, **options):
        return run(ensemble([gives(one), gives(two), gives(three)], how=how, **options))

    each = torch.tensor([one, two, three])
    variance = ((each - each.mean(0)) ** 2).mean(0)
    torch.testing.assert_close(of("worst"), each.amin(0))
    torch.testing.assert_close(of("mean"), each.mean(0))
    torch.testing.assert_close(of("variance"), variance, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        of("uncertainty", penalty=penalty), each.mean(0) - penalty * variance
    )


@quick
@given(main=numbers, judge=numbers, other=numbers)
def test_constraints_are_not_traded(main, judge, other):
    rewards = run(
        constrain(gives(main), [gives(judge), gives(other)], at_least=[0.0, 1.0], otherwise=-9.0)
    )
    for r, m, j, o in zip(rewards.tolist(), main, judge, other, strict=True):
        assert r == pytest.approx(m if j >= 0 and o >= 1 else -9.0)


@quick
@given(values=numbers)
def test_bounds(values):
    rewards = run(bounded(gives(values), low=-1, high=1))
    torch.testing.assert_close(rewards, torch.tensor(values).clamp(-1, 1))
    clip = run(bounded(gives(values), high=0.0, shift=-0.5))
    torch.testing.assert_close(clip, (torch.tensor(values) - 0.5).clamp(max=0))


def test_delta_telescopes():
    nan = math.nan
    steps = torch.rand(B, 5, generator=torch.Generator().manual_seed(0))
    delta = bounded(gives(steps.tolist(), "step"), delta=True)
    rewards = run(delta)
    torch.testing.assert_close(rewards.flip(1).cumsum(1).flip(1)[:, :-1], steps[:, :-1])
    assert (rewards[:, -1] == 0).all() and card_of(delta).of == "step"
    # between those steps that have a reward
    holed = [[nan, 0.5, nan, 0.75, nan, 1.0, nan], [0.25] + [nan] * 6, [nan] * 7]
    differences = [[nan, -0.25, nan, 0.75, nan, 0.0, nan], [0.0] + [nan] * 6, [nan] * 7]
    rewards = bounded(gives(holed, "step"), delta=True)(MEDIA[:3], PROMPTS[:3])
    torch.testing.assert_close(rewards, torch.tensor(differences), equal_nan=True)
    with pytest.raises(UserError, match="not of steps"):
        bounded(gives([0.0] * B), delta=True)


@pytest.mark.parametrize(("fp", "fn"), [(0.0, 0.0), (0.1, 0.0), (0.05, 0.3), (0.4, 0.5)])
def test_noisy_verifiers_are_right_on_average(fp, fn):
    def paid(verdict, how):
        return noisy(gives([verdict]), fp, fn, how=how)(MEDIA[:1], PROMPTS[:1]).item()

    for truth in (0.0, 1.0):
        chance = 1 - fn if truth else fp  # of an accepting verifier
        backward, forward = (
            chance * paid(1.0, how) + (1 - chance) * paid(0.0, how)
            for how in ("backward", "forward")
        )
        assert backward == pytest.approx(truth, abs=1e-5)
        assert forward == pytest.approx((1 - fp - fn) * (truth - 1), abs=1e-5)


def test_a_missing_part_is_missing_in_the_whole():
    holed = gives([math.nan, 1, 1, 1, 1, 1])
    fine = gives([1.0] * B)
    for whole in (
        gate(fine, holed, above=0),
        gate(holed, fine, above=0),
        ensemble([fine, holed]),
        bounded(holed, high=2),
        ensemble([holed, fine], how="uncertainty"),
        constrain(fine, [holed]),
        constrain(holed, [fine]),
        noisy(holed),
    ):
        assert run(whole).isnan().tolist() == [True] + [False] * 5
    shut = gate(gives([0.0] * B), holed, above=0.5)
    assert run(shut).tolist() == [0.0] * B, "what is not counted cannot fail"


def test_cards_are_put_together_and_nonsense_is_refused():
    first = gives([0.0] * B, media="image video", needs="text boxes")
    second = gives([0.0] * B, media="image", needs="text")
    whole = card_of(gate(first, second, above=0))
    assert whole.media == ("image",) and whole.needs == ("text", "boxes") and whole.of == "sample"
    assert card_of(ensemble([first, gives([0.0] * B, "group")])).of == "group"
    for wrong, says in (
        (lambda: gate(first, gives([0.0], media="text"), above=0), "different media"),
        (lambda: ensemble([first]), "at least two"),
        (lambda: ensemble([gives([0.0], "group"), gives([[0.0]], "step")]), "cannot be put togeth"),
        (lambda: constrain(first, []), "0 judges"),
        (lambda: constrain(first, [second], at_least=[0.1, 0.2]), "1 judges and 2 numbers"),
        (lambda: bounded(first), "needs low, high or delta"),
        (lambda: bounded(first, low=1, high=0), "is not below"),
        (lambda: noisy(first, 0.5, 0.5), "says nothing"),
        (lambda: run(noisy(gives([0.5] * B))), "corrects rewards of 0 and 1"),
    ):
        with pytest.raises(UserError, match=says):
            wrong()


# votes

TEXTS = ["<answer>7</answer>", "7.0", "<think>hm</think> seven", "eight"]
TEXTS += ["I say <answer>7</answer>", "<think>cut"]
TWO = [{"text": "a", "group": 0}] * 3 + [{"text": "b", "group": 1}] * 3


def test_the_majority_is_right():
    prompts = [{"text": "a"}] * B
    assert majority_vote(TEXTS, prompts).tolist() == [1, 1, 1, 0, 1, 0]
    assert majority_vote(TEXTS, TWO).tolist() == [1, 1, 1, 1, 0, 0]
    assert majority_vote(TEXTS, prompts, share=0.7).isnan().all()
    assert majority_vote(["", " "], prompts[:2]).tolist() == [0, 0]


def test_frequencies_and_entropy():
    prompts = [{"text": "a"}] * B
    torch.testing.assert_close(
        answer_frequency(TEXTS, prompts), torch.tensor([4, 4, 4, 1, 4, 0]) / 6
    )
    spread = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))
    rewards = answer_frequency(TEXTS, prompts, entropy=0.5)
    torch.testing.assert_close(rewards, torch.tensor([4, 4, 4, 1, 4, 0]) / 6 - 0.5 * spread)


def test_twins_judge_each_other_also_across_batches():
    reward = co_reward()
    a = [{"text": "how many?", "twin": 1, "group": 0}] * 3
    b = [{"text": "what number?", "twin": 1, "group": 1}] * 3
    answers = ["4", "4", "5", "5", "5", "4"]
    assert reward(answers, [*a, *b]).tolist() == [0, 0, 1, 0, 0, 1]
    reward.remember()
    assert reward(["5", "6", "6"], a).tolist() == [1, 0, 0]  # by b's last vote
    assert reward(["5", "6", "6"], a).tolist() == [1, 0, 0]  # an evaluation leaves nothing behind
    reward.remember()
    assert reward(["8", "6", "6"], b).tolist() == [0, 1, 1]
    assert reward(["1", "1", "2"], [{"text": "alone", "twin": 2}] * 3).tolist() == [1, 1, 0]


def test_what_sees_a_whole_iteration_or_remembers_is_no_part_of_others_and_has_no_cache():
    moving = scheduled([gives([1.0])], [0.0], [1.0], 4)
    for make, says in (
        (lambda: gate(co_reward(), majority_vote, above=0.5), "cannot be a part of another"),
        (lambda: routed({"a": co_reward()}), "cannot be a part of another"),
        (lambda: by_task({"a": co_reward()}), "cannot be a part of another"),
        (lambda: gate(moving, gives([1.0]), above=0.0), "remembers earlier iterations"),
    ):
        with pytest.raises(UserError, match=says):
            make()
    for reward, says in ((co_reward(), "cache cannot be set"), (moving, "leave its `cache` out")):
        with pytest.raises(UserError, match=says):
            Scorer({"co": reward}, handling={"co": Handling(cache="memory")})


def test_self_certainty_is_what_was_recorded():
    texts = [Completion("a", 3, True, -0.25, 4.0), Completion("b", 3, True, -2.0), "unknown"]
    rewards = mean_logprob(texts, [{}] * 3, scale=2.0)
    assert rewards[:2].tolist() == [-0.5, -4.0] and rewards[2].isnan()
    rewards = self_certainty(texts, [{}] * 3, scale=0.5)
    assert rewards[0] == 2 and rewards[1:].isnan().all()
    with pytest.raises(UserError, match="policy.vlm.record_self_certainty"):
        self_certainty(texts[1:], [{}] * 2)


# diversity

SAME = ["a red cube", "a red cube", "a red cube"]
DIFFERENT = ["one two", "three four", "five six"]


def test_distances_of_texts_and_pictures(tmp_path):
    expected = torch.tensor([0.0, 0, 0, 1, 1, 1])
    distances = pairwise_distance()(SAME + DIFFERENT, TWO)
    torch.testing.assert_close(distances, expected, atol=1e-6, rtol=0)
    media = torch.cat([pictures(1).expand(3, -1, -1, -1), pictures(3, seed=5)])
    for model in (None, save_tiny_clip(tmp_path / "clip")):
        distances = pairwise_distance(model)(media, TWO)
        assert distances[:3].abs().max() < 1e-6
        assert (distances[3:] > 0).all() and (distances <= 1).all()
        video = media[:, None].expand(-1, 2, -1, -1, -1)
        same = pairwise_distance(model)(video, TWO)
        torch.testing.assert_close(same, distances, atol=1e-5, rtol=0)


def test_diversity_aware_rewards_are_their_formulas():
    quality = gives([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    media = pictures(B, seed=3)
    pixels = torch.nn.functional.adaptive_avg_pool2d(media, 8).flatten(1).double() - 0.5
    unit = torch.nn.functional.normalize(pixels, dim=1)
    s = (unit @ unit.T).clamp(0, 1)
    for i in range(B):
        near = [s[i, j] for j in range(B) if j // 3 == i // 3 and j != i]
        of_dra, of_darling = (i + 1) / (1 + sum(near)), (i + 1) * sum(1 - x for x in near) / 2
        torch.testing.assert_close(dra(quality)(media, TWO)[i].double(), of_dra)
        torch.testing.assert_close(darling(quality)(media, TWO)[i].double(), of_darling)
    alone = [{"text": str(i), "group": i} for i in range(B)]
    for aware in (dra, darling):
        torch.testing.assert_close(aware(quality)(media, alone), torch.arange(1.0, 7))
    assert card_of(dra(quality)).of == card_of(darling(quality)).of == "group"


# advantages

ROWS = rollout([0, 0, 0, 1, 1, 1])
LOW = torch.tensor([0.1, 0.2, 0.3, 0.0, 0.1, 0.1])
HIGH = torch.tensor([0.9, 0.7, 0.8, 1.0, 0.9, 0.6])
FAILED = torch.full((6,), math.nan)


def test_an_iteration_in_which_a_reward_failed_moves_nothing():
    running, worst = Running(base=dr_grpo), MaxMin(base=dr_grpo, rate=0.5)
    for advantage in (running, worst):
        advantage(Rewards({"a": LOW, "b": HIGH}), ROWS)
    sums, weights = list(running.sums["a"]), dict(worst.log)
    for advantage in (running, worst):
        assert advantage(Rewards({"a": FAILED, "b": HIGH}), ROWS).isnan().all()
    assert running.sums["a"] == sums and worst.log == weights
    advantage = MaxMin(base=dr_grpo)  # what failed everywhere is not the worst off
    assert advantage(Rewards({"a": LOW, "b": FAILED}), ROWS).isnan().all()
