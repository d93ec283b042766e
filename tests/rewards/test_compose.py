"""Rewards made of rewards, votes without a ground truth, diversity, and advantages whose weights
move."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.advantages import dr_grpo
from mmrl.config import build_rewards
from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Completion, Rewards
from mmrl.scoring import Handling, Scorer
from mmrl.zoo.advantages import temporal
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
    parts = [gives(one), gives(two), gives(three)]
    worst = run(ensemble(parts))
    mean = run(ensemble(parts, how="mean"))
    careful = run(ensemble(parts, how="uncertainty", penalty=penalty))
    each = torch.tensor([one, two, three])
    torch.testing.assert_close(worst, each.amin(0))
    torch.testing.assert_close(
        careful, each.mean(0) - penalty * ((each - each.mean(0)) ** 2).mean(0)
    )
    disagreement = run(ensemble(parts, how="variance"))
    for spread, values in zip(disagreement.tolist(), zip(one, two, three), strict=True):
        middle = sum(values) / 3
        square = sum((value - middle) ** 2 for value in values) / 3
        assert spread == pytest.approx(square, rel=1e-4, abs=1e-5)
    assert (worst <= mean + 1e-5).all() and (careful <= mean + 1e-5).all()
    torch.testing.assert_close(
        run(ensemble([gives(one)] * 2, how="uncertainty")), torch.tensor(one)
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
    steps = torch.rand(B, 5, generator=torch.Generator().manual_seed(0))
    rewards = run(bounded(gives(steps.tolist(), "step"), delta=True))
    torch.testing.assert_close(rewards.flip(1).cumsum(1).flip(1)[:, :-1], steps[:, :-1])
    assert (rewards[:, -1] == 0).all() and card_of(
        bounded(gives(steps.tolist(), "step"), delta=True)
    ).of == "step"
    with pytest.raises(UserError, match="not of steps"):
        bounded(gives([0.0] * B), delta=True)


def test_delta_is_between_steps_that_have_a_reward():
    nan = math.nan
    steps = [[nan, 0.5, nan, 0.75, nan, 1.0, nan], [0.25, nan, nan, nan, nan, nan, nan], [nan] * 7]
    rewards = bounded(gives(steps, "step"), delta=True)(MEDIA[:3], PROMPTS[:3])
    differences = torch.tensor(
        [[nan, -0.25, nan, 0.75, nan, 0.0, nan], [0.0] + [nan] * 6, [nan] * 7]
    )
    torch.testing.assert_close(rewards, differences, equal_nan=True)
    whole = steps[0][1::2]
    torch.testing.assert_close(
        rewards[0].nan_to_num(0.0).flip(0).cumsum(0).flip(0)[[1, 3]], torch.tensor(whole[:2])
    )


@pytest.mark.parametrize(("fp", "fn"), [(0.0, 0.0), (0.1, 0.0), (0.05, 0.3), (0.4, 0.5)])
def test_noisy_verifiers_are_right_on_average(fp, fn):
    for truth in (0.0, 1.0):
        chance = 1 - fn if truth else fp  # of an accepting verifier
        backward, forward = (
            sum(
                p * noisy(gives([verdict]), fp, fn, how=how)(MEDIA[:1], PROMPTS[:1]).item()
                for verdict, p in ((1.0, chance), (0.0, 1 - chance))
            )
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
        (
            lambda: ensemble([gives([0.0], "group"), gives([[0.0]], "step")]),
            "cannot be put together",
        ),
        (lambda: constrain(first, []), "0 judges"),
        (lambda: constrain(first, [second], at_least=[0.1, 0.2]), "1 judges and 2 numbers"),
        (lambda: bounded(first), "needs low, high or delta"),
        (lambda: bounded(first, low=1, high=0), "is not below"),
        (lambda: noisy(first, 0.5, 0.5), "says nothing"),
        (lambda: run(noisy(gives([0.5] * B))), "corrects rewards of 0 and 1"),
    ):
        with pytest.raises(UserError, match=says):
            wrong()


def test_the_whole_is_written_as_a_configuration():
    built = build_rewards(
        {
            "guarded": {
                "use": "gate",
                "weight": 2.0,
                "above": -1.0,
                "cache": "memory",
                "main": {"jpeg_compressibility": {"scale": 0.5}},
                "extra": {
                    "ensemble": {
                        "of": ["jpeg_incompressibility", {"jpeg_incompressibility": {"scale": 2}}]
                    }
                },
            }
        }
    )
    media = pictures(4)
    kb = REWARDS["jpeg_incompressibility"](media, PROMPTS[:4])
    guarded = torch.where(-kb / 2 >= -1, -kb / 2 + kb, -kb / 2)
    torch.testing.assert_close(built["guarded"].reward(media, PROMPTS[:4]), guarded)
    with pytest.raises(UserError, match=r"reward.gate.extra: unknown reward 'jpg'"):
        build_rewards({"gate": {"main": "jpeg_compressibility", "extra": "jpg", "above": 0}})


# votes

TEXTS = [
    "<answer>7</answer>",
    "7.0",
    "<think>hm</think> seven",
    "eight",
    "I say <answer>7</answer>",
    "<think>cut",
]
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


@quick
@given(st.lists(st.sampled_from(["1", "2", "3", ""]), min_size=1, max_size=8), st.randoms())
def test_votes_do_not_depend_on_the_order(texts, random):
    prompts = [{"text": "a"}] * len(texts)
    order = list(range(len(texts)))
    random.shuffle(order)
    rewards = answer_frequency(texts, prompts)
    torch.testing.assert_close(answer_frequency([texts[i] for i in order], prompts), rewards[order])
    assert rewards.sum() == pytest.approx(
        sum(texts.count(t) ** 2 for t in set(texts) - {""}) / len(texts), abs=1e-5
    )


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


TWINS = [{"text": text, "twin": twin} for twin in (1, 2) for text in ("how many?", "what number?")]
SAID = [["4", "4", "5"], ["5", "5", "4"], ["7", "7", "8"], ["8", "8", "7"]]


def test_twins_judge_each_other_however_the_batch_is_cut():
    """In parts of a rollout, every part a version, the labels are those of the whole."""
    whole = Scorer({"co": co_reward()})
    texts = sum(SAID, [])
    prompts = [prompt for prompt in TWINS for _ in range(3)]
    expected = whole(texts, prompts)["co"]
    assert expected.tolist() == [0, 0, 1] * 4
    parts = Scorer({"vote": majority_vote, "co": co_reward()})
    stream = parts.stream(12)
    for number, (answers, prompt) in enumerate(zip(SAID, TWINS, strict=True)):
        stream.put(answers, [prompt] * 3, [number] * 3)
    scores = stream.result()
    assert (
        list(scores) == ["vote", "co"]
        and torch.equal(scores["co"], expected)
        and parts.seconds["co"] > 0
    )
    assert scores["vote"].tolist() == [1, 1, 0] * 4


def test_twins_judge_each_other_across_processes(monkeypatch):
    """Two processes with one version of every question each, and a third without a row."""
    shares = [SAID[::2], SAID[1::2], []]
    prompts_of_process = [TWINS[::2], TWINS[1::2], []]
    majorities = [
        [[str(p["twin"]), p["text"], s[0]] for p, s in zip(prompts, answers, strict=True)]
        for prompts, answers in zip(prompts_of_process, shares, strict=True)
    ]
    whole = co_reward()
    whole(
        sum(SAID, []), [{**prompt, "group": g} for g, prompt in enumerate(TWINS) for _ in range(3)]
    )
    whole.remember()
    for answers, prompts, majority in zip(shares, prompts_of_process, majorities, strict=True):
        reward = co_reward()

        def gathered(rows, expected=majority):
            assert rows == expected
            return sum(majorities, [])

        monkeypatch.setattr("mmrl.scoring.scorer.all_gather_json", gathered)
        scorer = Scorer({"co": reward})
        rewards = scorer(sum(answers, []), [prompt for prompt in prompts for _ in range(3)])["co"]
        assert rewards.tolist() == [0, 0, 1] * len(prompts)
        scorer.remember()
        assert reward.votes == whole.votes and len(reward.votes["1"]) == 2


def test_what_sees_a_whole_iteration_is_no_part_of_others_and_has_no_cache():
    for make in (
        lambda: gate(co_reward(), majority_vote, above=0.5),
        lambda: routed({"a": co_reward()}),
        lambda: by_task({"a": co_reward()}),
    ):
        with pytest.raises(UserError, match="cannot be a part of another"):
            make()
    with pytest.raises(UserError, match="cache cannot be set"):
        Scorer({"co": co_reward()}, handling={"co": Handling(cache="memory")})


def test_confidence_is_what_was_recorded():
    texts = [Completion("a", 3, True, -0.25), Completion("b", 3, True, -2.0), "unknown"]
    rewards = mean_logprob(texts, [{}] * 3, scale=2.0)
    assert rewards[:2].tolist() == [-0.5, -4.0] and rewards[2].isnan()


def test_self_certainty_is_what_was_recorded():
    texts = [Completion("a", 3, True, -0.25, 4.0), Completion("b", 3, True, -2.0), "unknown"]
    rewards = self_certainty(texts, [{}] * 3, scale=0.5)
    assert rewards[0] == 2 and rewards[1:].isnan().all()
    with pytest.raises(UserError, match="policy.vlm.record_self_certainty"):
        self_certainty(texts[1:], [{}] * 2)


# diversity

SAME = ["a red cube", "a red cube", "a red cube"]
DIFFERENT = ["one two", "three four", "five six"]


def test_distances_of_texts_and_pictures(tmp_path):
    reward = pairwise_distance()
    assert reward(SAME, TWO[:3]).abs().max() < 1e-6
    torch.testing.assert_close(reward(DIFFERENT, TWO[:3]), torch.ones(3))
    distances = reward(SAME + DIFFERENT, TWO)
    torch.testing.assert_close(distances, torch.tensor([0.0, 0, 0, 1, 1, 1]), atol=1e-6, rtol=0)
    media = torch.cat([pictures(1).expand(3, -1, -1, -1), pictures(3, seed=5)])
    clip = save_tiny_clip(tmp_path / "clip")
    for model in (None, clip):
        of_pictures = pairwise_distance(model)(media, TWO)
        assert (
            of_pictures[:3].abs().max() < 1e-6
            and (of_pictures[3:] > 0).all()
            and (of_pictures <= 1).all()
        )
        video = media[:, None].expand(-1, 2, -1, -1, -1)
        torch.testing.assert_close(
            pairwise_distance(model)(video, TWO), of_pictures, atol=1e-5, rtol=0
        )


def test_diversity_aware_rewards_are_their_formulas():
    quality = gives([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    media = pictures(B, seed=3)
    pixels = torch.nn.functional.adaptive_avg_pool2d(media, 8).flatten(1).double() - 0.5
    unit = torch.nn.functional.normalize(pixels, dim=1)
    s = (unit @ unit.T).clamp(0, 1)
    wanted_dra = torch.zeros(B)
    wanted_darling = torch.zeros(B)
    for i in range(B):
        rows = [j for j in range(B) if j // 3 == i // 3 and j != i]
        wanted_dra[i] = (i + 1) / (1 + sum(s[i, j] for j in rows))
        wanted_darling[i] = (i + 1) * sum(1 - s[i, j] for j in rows) / len(rows)
    torch.testing.assert_close(dra(quality)(media, TWO), wanted_dra)
    torch.testing.assert_close(darling(quality)(media, TWO), wanted_darling)
    alone = [{"text": str(i), "group": i} for i in range(B)]
    for aware in (dra, darling):
        torch.testing.assert_close(aware(quality)(media, alone), torch.arange(1.0, 7))
    assert card_of(dra(quality)).of == card_of(darling(quality)).of == "group"


# advantages

ROWS = rollout([0, 0, 0, 1, 1, 1])
LOW = torch.tensor([0.1, 0.2, 0.3, 0.0, 0.1, 0.1])
HIGH = torch.tensor([0.9, 0.7, 0.8, 1.0, 0.9, 0.6])


WORDS = ROWS.replace(mask=torch.ones(6, 3, dtype=torch.bool), logprob=torch.zeros(6, 3))


@pytest.mark.parametrize("make", [Running, MaxMin])
def test_an_advantage_of_decisions_keeps_all_of_them(make):
    of = partial(temporal, base=dr_grpo, strength=2.0)
    advantages = make(base=of)(LOW, WORDS)
    middle = make(base=dr_grpo)(LOW, WORDS)
    torch.testing.assert_close(advantages, middle * torch.tensor([3.0, 1.0, 3.0]))


def test_running_moments_skip_an_iteration_in_which_a_reward_failed():
    advantage = Running(base=dr_grpo)
    failed = torch.full((6,), torch.nan)
    assert (
        advantage(Rewards({"a": failed, "b": HIGH}), ROWS).isnan().all()
        and "a" not in advantage.sums
    )
    for _ in range(3):
        advantage(Rewards({"a": LOW + 20, "b": HIGH}), ROWS)
    before = {name: list(values) for name, values in advantage.sums.items()}
    assert before["a"][0] / before["a"][2] == pytest.approx(20 + float(LOW.mean()), abs=1e-4)
    advantage(Rewards({"a": failed, "b": HIGH}), ROWS)
    assert advantage.sums["a"] == before["a"] and advantage.sums["b"] != before["b"]
    part = failed.index_fill(0, torch.tensor([0]), 20.0)
    advantage(Rewards({"a": part, "b": HIGH}), ROWS)
    assert advantage.sums["a"] != before["a"]


@pytest.mark.parametrize("rate", [None, 0.5])
def test_a_reward_that_failed_everywhere_is_not_the_worst_off(rate):
    advantage = MaxMin(base=dr_grpo, rate=rate)
    failed = torch.full((6,), torch.nan)
    for _ in range(2):
        advantage(Rewards({"a": LOW, "b": HIGH}), ROWS)
    before = dict(advantage.log)
    assert len(before) == (2 if rate else 0)
    assert (
        advantage(Rewards({"a": LOW, "b": failed}), ROWS).isnan().all() and advantage.log == before
    )
