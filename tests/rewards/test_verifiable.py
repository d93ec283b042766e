"""Rewards of text that check an answer: the contract that all of them keep, the parser, and
coordinates."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS, load_built_in
from rewards.answers.reading import SEVERITY, final, items, number
from rewards.answers.reading.options import options as letters
from rewards.answers.shapes import boxes, points
from rewards.card import card_of
from tests.fixtures.text_rewards import SMALLEST, prompts_of


def checks(name: str) -> bool:
    """Judges are in tests/rewards/test_judge.py, votes in tests/rewards/test_compose.py."""
    return REWARDS[name].__module__.startswith("rewards.answers")


load_built_in()
NAMES = [
    name for name in sorted(REWARDS) if card_of(REWARDS[name]).media == ("text",) and checks(name)
]
VERIFIABLE = [name for name in NAMES if hasattr(REWARDS[name], "ground_truth")]
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
            values = reward(right, prompts)
            assert values.dtype == torch.float32 and values.tolist() == pytest.approx(
                [high] * len(prompts), abs=2e-5
            )
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
            texts = [
                reward.ground_truth(prompts[0]),
                "nonsense",
                *(reward.ground_truth(p) for p in prompts[1:]),
            ]
            repeated = [prompts[0], *prompts]
            before = deepcopy(repeated)
            state = torch.get_rng_state()
            values = reward(texts, repeated)
            assert torch.equal(
                values, torch.cat([reward([t], [p]) for t, p in zip(texts, repeated)])
            )
            assert torch.equal(values.flip(0), reward(texts[::-1], repeated[::-1]))
            assert repeated == before and torch.equal(torch.get_rng_state(), state)


@settings(max_examples=400, deadline=None)
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
            for field in card_of(REWARDS[name]).needs:
                if field == "text":
                    continue
                lacking = {k: v for k, v in good.items() if k != field} | {"where": "data.jsonl:17"}
                values = reward([reward.ground_truth(good)] * 2, [lacking, good])
                assert math.isnan(values[0]) and not math.isnan(values[1])
                assert "data.jsonl:17" in caplog.text and f'no "{field}"' in caplog.text


def test_pictures_are_refused_in_one_sentence(subtests):
    for name in VERIFIABLE:
        with subtests.test(name), pytest.raises(UserError, match="judges a list of texts"):
            build(name)(torch.zeros(1, 3, 4, 4), prompts_of(name)[:1])


# The parser

CAT = [((10.0, 20.0, 30.0, 40.0), "cat")]
BARE = [((10.0, 20.0, 30.0, 40.0), None)]


def test_boxes_in_every_notation(subtests):
    for text, status, found in [
        ("<answer>[10, 20, 30, 40]</answer>", "ok", BARE),
        ("<answer>[1,1,2,2]</answer> no: <answer>[10,20,30,40]</answer>", "ok", BARE),
        ("<answer>[10,20,30,40]", "repaired", BARE),
        ('```json\n[{"bbox_2d": [10, 20, 30, 40], "label": "cat"}]\n```', "ok", CAT),
        (
            '```json\n[{"bbox_2d": [10, 20, 30, 40], "label": "cat"}, {"bbox_2d": [5, 6',
            "repaired",
            CAT,
        ),
        ("[{'bbox': [10, 20, 30, 40], 'label': 'cat'}]", "repaired", CAT),
        ('{"cat": [10, 20, 30, 40]}', "ok", CAT),
        ('{"cat": [[10, 20], [30, 40]]}', "ok", CAT),
        ('{"x1": 10, "y1": 20, "x2": "30", "y2": 40, "label": "cat"}', "ok", CAT),
        ('{"box_2d": [20, 10, 40, 30], "label": "cat"}', "ok", CAT),
        ('{"objects": [{"bbox_2d": [10, 20, 30, 40], "label": "cat"}]}', "ok", CAT),
        ("(10, 20, 30, 40)", "ok", BARE),
        ("(10, 20), (30, 40)", "ok", BARE),
        (
            "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(10,20),(30,40)<|box_end|>",
            "ok",
            CAT,
        ),
        ("<ref>cat</ref><box>[[10, 20, 30, 40]]</box>", "ok", CAT),
        ("<loc0020><loc0010><loc0040><loc0030> cat", "ok", CAT),
        ("10 20 30 40", "ok", BARE),
        ("[-10.5, 2e1, .5, 40.]", "repaired", [((-10.5, 20.0, 0.5, 40.0), None)]),
        ("[10,20,30,40] and [1,2,3,4]", "repaired", [*BARE, ((1.0, 2.0, 3.0, 4.0), None)]),
        ("There is no cat.", "unparseable", None),
        ("[10, 20, 30]", "unparseable", None),
        ("None", "ok", []),
        ("[]", "ok", []),
        ("", "unparseable", None),
        ("<think>[10,20,30,40]</think>", "unparseable", None),
        ("<think>it is at [10,20,30,40]", "unparseable", None),
    ]:
        with subtests.test(text=text, status=status):
            parsed = boxes(text)
            assert parsed.status == status
            assert (parsed.value and [(s.values, s.label) for s in parsed.value]) == found


def test_points_in_every_notation(subtests):
    for text, found in [
        ("(3, 4)", [(3.0, 4.0)]),
        ('{"point_2d": [3, 4], "label": "ok"}', [(3.0, 4.0)]),
        ('{"x": 3, "y": 4}', [(3.0, 4.0)]),
        ("3 4", [(3.0, 4.0)]),
        ('<point x="3" y="4" alt="a">a</point>', [(3.0, 4.0)]),
        ("[[3, 4], [5, 6]]", [(3.0, 4.0), (5.0, 6.0)]),
        ("<|box_start|>(2,2),(4,6)<|box_end|>", [(3.0, 4.0)]),
        ("[2, 2, 4, 6]", [(3.0, 4.0)]),
    ]:
        with subtests.test(text=text, found=found):
            assert [shape.values for shape in points(text).value] == found


def test_numbers(subtests):
    for text, status, value in [
        ("7", "ok", 7),
        ("seven", "ok", 7),
        ("<answer>-7.50</answer>", "ok", -7.5),
        ("1,234,567", "ok", 1234567),
        ("12 %", "ok", 0.12),
        ("$3.2", "ok", 3.2),
        (r"so \boxed{7}", "ok", 7),
        ("I see 7 dogs.", "repaired", 7),
        ("7 or 8", "wrong_count", None),
        ("dogs", "unparseable", None),
        ("", "unparseable", None),
        ("7 <answer>8</answer>", "ok", 8),
        ("<answer>8", "repaired", 8),
        ("v2", "unparseable", None),
    ]:
        with subtests.test(text=text, status=status):
            assert (number(text).status, number(text).value) == (status, value)


def test_letters(subtests):
    for text, found in [
        ("B", "B"),
        ("(b)", "B"),
        ("B.", "B"),
        ("B) a cat", "B"),
        ("The answer is B", "B"),
        ("Option: C", "C"),
        ("A, C", "AC"),
        ("A and C", "AC"),
        ("AC", "AC"),
        ("A or B", "AB"),
        ("I do not know", ""),
        ("A cat", ""),
        ("B: cat C: dog", ""),
        ("", ""),
        ("no", ""),
        ("Bad", ""),
    ]:
        with subtests.test(text=text, found=found):
            assert letters(text) == set(found)


@settings(max_examples=150, deadline=None)
@given(text=WRITTEN)
def test_the_parser_never_raises(text):
    for parse in (boxes, points, number, items, final):
        parsed = parse(text)
        assert parsed.status in SEVERITY and (
            parsed.value is not None or parsed.status in ("unparseable", "wrong_count")
        )


def test_the_parser_is_quick_on_long_nonsense(subtests):
    for text in [
        "[" * 50_000,
        "{" * 5_000,
        "[1," * 5_000,
        "9" * 100_000,
        "(" * 30_000,
        "<ref>" * 9_000,
    ]:
        with subtests.test(text=text):
            for parse in (boxes, points, number, items):
                assert parse(text).status in SEVERITY
