"""Hints for prompts that stay hard: which, when, and after a resume."""

import json

import pytest

from mmrl.core.errors import UserError
from mmrl.data.prompts import Outcome, batch
from mmrl.data.selection import Vade
from mmrl.data.suggestions import Forms, Suggestions


class Plain:
    def __init__(self, count=5):
        self.train = [{"text": f"q{i}", "hint": f"look at {i}"} for i in range(count)]
        self.held_out = []


def told(rewards):
    return [Outcome(i, r, False, (r, r)) for i, r in enumerate(rewards)]


def texts(data, iteration=0):
    return sorted(prompt["text"] for prompt in batch(data, 5, iteration, 0))


def test_prompts_that_stay_hard_are_asked_with_their_hint():
    data = Suggestions(Plain(), share=0.4, below=0.5, after=2).train
    plain = [f"q{i}" for i in range(5)]
    assert texts(data) == plain
    data.learn(told([0, 0.9, 0.2, 1, 1]))
    assert texts(data, 1) == plain, "hard once"
    data.learn(told([0, 0.9, 0.2, 1, 1]))
    hinted = ["q0\nHint: look at 0", "q1", "q2\nHint: look at 2", "q3", "q4"]
    assert texts(data, 2) == hinted, "the lowest two of five, twice"
    again = Suggestions(Plain(), share=0.4, below=0.5, after=2).train
    again.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert texts(again, 2) == hinted
    data.learn(told([1, 0.9, 0.2, 1, 1]))
    assert texts(data, 3)[0].startswith("q0\n") == (data.statistics[0].mean < 0.5)
    data.learn(told([1, 0.9, 0.2, 1, 1]))
    assert texts(data, 4)[0] == "q0", "hard no more"


def test_hints_act_inside_a_selection_and_need_their_field():
    data = Vade(Suggestions(Plain(), after=1, share=1.0)).train
    data.learn(told([0, 0, 0, 0, 0]))
    assert all("\nHint: " in text and text.count("Hint") == 1 for text in texts(data, 1))
    with pytest.raises(UserError, match="suggestions: no prompt has the field 'help'"):
        Suggestions(Plain(), field="help")


def test_every_prompt_is_asked_in_one_of_its_forms():
    forms = {"think": "{text} Think first.", "plain": "{text}"}
    data = Forms(Plain(200), forms, weights={"think": 3.0, "plain": 1.0}).train
    prompts = batch(data, 200, 0, 0)
    assert prompts == batch(data, 200, 0, 0)
    share = sum(prompt["form"] == "think" for prompt in prompts) / 200
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / 200) ** 0.5
    for prompt in prompts:
        thinks = prompt["text"].endswith(" Think first.")
        assert thinks == (prompt["form"] == "think")
    later = {prompt["entry"]: prompt["form"] for prompt in batch(data, 200, 1, 0)}
    assert any(later[prompt["entry"]] != prompt["form"] for prompt in prompts)
    inside = batch(Vade(Forms(Plain(), forms)).train, 5, 0, 0)
    assert all("form" in prompt for prompt in inside)
    with pytest.raises(UserError, match="each form is a template"):
        Forms(Plain(), {"a": "x"})
    with pytest.raises(UserError, match="weights are needed of think, plain"):
        Forms(Plain(), forms, weights={"think": 1.0})


def test_all_forms_of_a_question_are_asked_together():
    forms = {"tool": "{text} Use it.", "plain": "{text} Without."}
    rule = Forms(Plain(6), forms, together=True)
    data = Suggestions(rule, after=1, share=1.0).train
    assert data.together == 2
    prompts = batch(data, 6, 1, 0)
    drawn = batch(rule.train.inner, 3, 1, 0)
    for place, prompt in enumerate(prompts):
        name = ("tool", "plain")[place % 2]
        assert prompt["form"] == name and prompt["question"] == place // 2
        assert prompt["text"] == forms[name].replace("{text}", drawn[place // 2]["text"])
    with pytest.raises(UserError, match="forms: together asks a question in all its forms"):
        Vade(rule).train.batch(4, 0, 0)
    with pytest.raises(UserError, match="leave out weights, or together"):
        Forms(Plain(2), forms, weights={"tool": 1.0, "plain": 2.0}, together=True)
