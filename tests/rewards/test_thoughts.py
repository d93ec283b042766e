"""Thoughts of every family, in what shapes the form, what judges write and what listeners hear."""

from __future__ import annotations

import pytest

from mmrl.core.thoughts import THOUGHTS
from rewards import Format, ThinkOrNot
from rewards.judges.listener import reasoning
from rewards.judges.question import Unreadable, answer_of, conclusion_of


def one(reward: object, text: str) -> float:
    return float(reward([text], [{}]))  # type: ignore[operator]


def test_a_thought_of_any_family_is_one(subtests):
    for begin, end in THOUGHTS:
        with subtests.test(begin=begin, end=end):
            text = f"{begin}so{end}\n<answer>7</answer>"
            assert one(Format(), text) == 1 and one(Format("think"), f"{begin}so{end}\n7") == 1
            empty = f"{begin} {end}<answer>7</answer>"
            assert one(ThinkOrNot(), text) == 0.5 and one(ThinkOrNot(), empty) == 1
            assert answer_of(text) == conclusion_of(text) == "7" and reasoning(text) == "so"
            with pytest.raises(Unreadable, match="ends before its reasons do"):
                answer_of(f"{begin}<answer>7</answer>")


def test_what_is_not_one_thought_and_one_answer_has_not_the_form(subtests):
    for text in [
        "<think>so</think> x <answer>7</answer>",
        "x <think>so</think> <answer>7</answer>",
        "<think>so</think> <answer>7</answer> x",
        "<think>so</think> <answer> </answer>",
        "<think>so</think> <answer>7",
        "<think>so</thinking> <answer>7</answer>",
        "<think>so</think> <answer>7</answer><answer>7</answer>",
        "<think>a</think><think>so</think> <answer>7</answer>",
        "<think>so <answer>7</answer></think> <answer>7</answer>",
        "<think>so</think> 7",
        "<answer>7</answer>",
    ]:
        with subtests.test(text=text):
            assert one(Format(), text) == 0 and one(ThinkOrNot(), text) == 0


def test_a_listener_hears_no_answer():
    assert reasoning(r"It is \boxed{\frac{1}{2}}, or <answer>x</answer>so") == "It is , or so"
    assert reasoning("[THINK]two and two[/THINK] It is 4.") == "two and two"
    assert reasoning("a <answer>4") == "a"
