"""Hints for prompts that stay hard: which, when, and after a resume."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter
from mmrl.data.base import Outcome, batch, pick
from mmrl.objectives import PolicyGradient
from mmrl.zoo.curricula.selection import Vade
from mmrl.zoo.curricula.suggestions import Forms, Suggestions
from mmrl.zoo.stages.response_reuse import ReusedResponses
from samplers.noise import Rng
from tests.fixtures import toys
from tests.train.test_trainer import make_trainer


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
    assert pick(data, 0.5, 4)["text"] == hinted[2], "also in dynamic sampling"
    with pytest.raises(UserError, match="suggestions: no prompt has the field 'help'"):
        Suggestions(Plain(), field="help")


def test_hints_wait_until_the_kl_to_the_behaviour_policy_drops():
    """AVATAR: a hard prompt gets its hint once the KL falls below its moving mean."""
    rule = {"share": 1.0, "after": 1, "decay": 0.5, "kl_drop": 1.0}
    data = Suggestions(Plain(), **rule).train
    mean = None
    for iteration, kl in enumerate([0.2, 0.4, 0.25, float("nan"), 0.5, 0.3]):
        data.see_update({"kl_behavior": kl})
        data.learn(told([0, 0, 0, 0, 0]))
        if kl == kl:
            mean = kl if mean is None else mean
            dropped = kl < mean
            mean += 0.5 * (kl - mean)
        assert any("Hint" in text for text in texts(data, iteration)) == dropped
        again = Suggestions(Plain(), **rule).train
        again.load_state_dict(json.loads(json.dumps(data.state_dict())))
        assert texts(again, iteration) == texts(data, iteration)
        data = again


def test_a_run_measures_the_kl_to_what_sampled():
    """(rho - 1) - log rho over its decisions; old answers are among them."""

    labels = [prompt | {"hint": "3"} for prompt in toys.prompts(8)]
    source = SimpleNamespace(train=labels, held_out=[])
    data = Suggestions(source, share=1.0, below=2.0, after=1, kl_drop=1.0).train
    reuse = ReusedResponses(threshold=None, when="always", place="append")
    sizes = {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 16}
    trainer = make_trainer("causal", lr=3e-2, prompts=data, stages=(reuse,), **sizes)
    values = [trainer.iterate()["kl_behavior"] for _ in range(6)]
    assert values[0] == 0.0 and max(values) > 0, "one step on what was just sampled, then old ones"
    assert data.divergence is not None
    policy = toys.make("causal")
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(2), 3, Rng.of(1))
    rollout = rollout.replace(advantage=torch.ones(6, 1), logprob=rollout.logprob + 0.3)
    (point,) = policy.path(rollout)
    meter = Meter()
    with meter.listening(), torch.no_grad():
        PolicyGradient().loss(policy, point)
        logp = policy.dist(point).log_prob(point.target)
    gaps = (logp - rollout.logprob)[rollout.mask].tolist()
    expected = sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps)
    assert meter.means()["kl_behavior"] == pytest.approx(expected, abs=1e-6)


def test_every_prompt_is_asked_in_one_of_its_forms():
    forms = {"think": "{text} Think first.", "plain": "{text}"}
    data = Forms(Plain(200), forms, weights={"think": 3.0, "plain": 1.0}).train
    prompts = batch(data, 200, 0, 0)
    assert prompts == batch(data, 200, 0, 0)
    share = sum(prompt["form"] == "think" for prompt in prompts) / 200
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / 200) ** 0.5
    for prompt in prompts:
        assert prompt["text"].endswith(" Think first.") == (prompt["form"] == "think")
    later = {prompt["entry"]: prompt["form"] for prompt in batch(data, 200, 1, 0)}
    assert any(later[prompt["entry"]] != prompt["form"] for prompt in prompts)
    with pytest.raises(UserError, match="each form is a template"):
        Forms(Plain(), {"a": "x"})


def test_all_forms_of_a_question_are_asked_together():
    forms = {"tool": "{text} Use it.", "plain": "{text} Without."}
    rule = Forms(Plain(6), forms, together=True)
    data = Suggestions(rule, after=1, share=1.0).train
    assert data.prompts_per_question == 2
    prompts = batch(data, 6, 1, 0)
    drawn = batch(rule.train.inner, 3, 1, 0)
    for place, prompt in enumerate(prompts):
        name = ("tool", "plain")[place % 2]
        assert prompt["form"] == name and prompt["question"] == place // 2
        assert prompt["text"] == forms[name].replace("{text}", drawn[place // 2]["text"])
    with pytest.raises(UserError, match="forms: together asks a question in all its forms"):
        Vade(rule).train.batch(4, 0, 0)
