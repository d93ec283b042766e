"""The contract that all rewards of text that check an answer keep."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS, load_built_in
from rewards.answers.reading import SEVERITY
from rewards.card import card_of
from tests.fixtures.text_rewards import SMALLEST, prompts_of

load_built_in()
VERIFIABLE = [
    name
    for name, entry in sorted(REWARDS.items())
    if entry.__module__.startswith("rewards.answers") and hasattr(entry, "ground_truth")
]
WRITTEN = st.text(alphabet=st.characters(codec="utf-8"), max_size=80) | st.lists(
    st.sampled_from(
        "<answer> </answer> [ ] { } ( ) , : ; ' \" ```json ``` ``` bbox_2d label 12 -3.5 "
        "1e999 NaN <box> </box>"
        " <ref> </ref> <|box_start|> <|box_end|> <loc0012> <point x= </think> <think> "
        "\\boxed{ } None A) yes"
        " 1:20 <table> <td> <svg> </svg> \n".split(" ")
    ),
    max_size=25,
).map(" ".join)


def build(name):
    return REWARDS.build(name, **SMALLEST[name][0])


def test_every_reward_of_text_is_in_the_table():
    assert set(VERIFIABLE) == set(SMALLEST)


def test_ground_truths_score_the_maximum_and_tricks_less(subtests):
    for name in VERIFIABLE:
        with subtests.test(name=name):
            reward = build(name)
            prompts = prompts_of(name)
            high = card_of(reward).high
            right = [reward.ground_truth(prompt) for prompt in prompts]
            values = reward(right, prompts).tolist()
            assert values == pytest.approx([high] * len(prompts), abs=2e-5)
            assert reward.status(right, prompts) == ["ok"] * len(prompts)
            for prompt in prompts:
                generic = {} if reward.shaping else {"empty": "", "echo": prompt["text"]}
                for trick, text in {**reward.wrong_answers(prompt), **generic}.items():
                    assert reward([text], [prompt]).item() < high, trick


def test_each_sample_is_judged_by_itself_and_nothing_is_changed(subtests):
    for name in VERIFIABLE:
        with subtests.test(name=name):
            reward = build(name)
            prompts = prompts_of(name)
            right = [reward.ground_truth(prompt) for prompt in prompts]
            texts, repeated = [right[0], "nonsense", *right[1:]], [prompts[0], *prompts]
            before = deepcopy(repeated)
            state = torch.get_rng_state()
            values = reward(texts, repeated)
            alone = [reward([t], [p]) for t, p in zip(texts, repeated)]
            assert torch.equal(values, torch.cat(alone))
            assert torch.equal(values.flip(0), reward(texts[::-1], repeated[::-1]))
            assert repeated == before and torch.equal(torch.get_rng_state(), state)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(VERIFIABLE), text=WRITTEN, wrap=st.booleans())
def test_whatever_a_model_writes_has_a_number_in_range_and_a_status(name, text, wrap):
    reward = build(name)
    prompt = prompts_of(name)[0]
    about = card_of(reward)
    text = f"<answer>{text}</answer>" if wrap else text
    (verdict,) = reward.verdicts([text], [prompt])
    assert about.low <= verdict.score <= about.high and verdict.status in SEVERITY


def test_a_broken_prompt_is_nan_and_is_named_once(caplog, subtests):
    for name in VERIFIABLE:
        with subtests.test(name=name):
            caplog.clear()
            reward = build(name)
            good = prompts_of(name)[0]
            for field in set(card_of(REWARDS[name]).needs) - {"text"}:
                lacking = {k: v for k, v in good.items() if k != field} | {"where": "data.jsonl:17"}
                values = reward([reward.ground_truth(good)] * 2, [lacking, good])
                assert math.isnan(values[0]) and not math.isnan(values[1])
                assert "data.jsonl:17" in caplog.text and f'no "{field}"' in caplog.text


def test_pictures_are_refused_in_one_sentence(subtests):
    for name in VERIFIABLE:
        with subtests.test(name), pytest.raises(UserError, match="judges a list of texts"):
            build(name)(torch.zeros(1, 3, 4, 4), prompts_of(name)[:1])
