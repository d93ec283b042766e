"""Best of N by a reward or a vote, and what every prompt scored, against plain loops."""

import math
from types import SimpleNamespace

import pytest
import torch

from mmrl.config.options import EvaluateOptions
from mmrl.core.errors import UserError
from mmrl.data.prompts import development_and_test
from mmrl.experiment import evaluation
from mmrl.experiment.build import Session
from mmrl.experiment.evaluation import BestOf
from mmrl.scoring import Scorer
from rewards.base.groups import groups_of
from rewards.card import card
from tests.train.test_trainer import make_trainer


def brightness(media, prompts):
    return media.flatten(1).mean(1)


@card(of="group")
def commonest(media, prompts):
    """A vote: the share of the group that gave the same answer."""
    votes = torch.zeros(len(media))
    for rows in groups_of(prompts):
        texts = [media[row] for row in rows]
        for row in rows:
            votes[row] = texts.count(media[row]) / len(rows)
    return votes


@pytest.mark.parametrize("count", [1, 3])
def test_the_best_is_that_of_a_loop_and_never_one_without_a_score(count):
    media = torch.rand(12, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    prompts = [{"text": str(i // count)} for i in range(12)]
    chosen, of_prompt = BestOf(count, Scorer({"b": brightness})).choose(media, prompts)
    for i in range(12 // count):
        rows = range(i * count, (i + 1) * count)
        best = max(rows, key=lambda row: float(media[row].mean()))
        assert torch.equal(chosen[i], media[best]) and of_prompt[i] is prompts[best]
    values = {"a": math.nan, "b": -5.0, "c": math.nan, "d": math.nan}
    reward = lambda media, prompts: torch.tensor([values[text] for text in media])  # noqa: E731
    best = BestOf(2, Scorer({"v": reward}, max_failures=1.0))
    assert best.choose(["a", "b", "c", "d"], [{"text": "x"}] * 4)[0] == ["b", "c"]


def test_a_vote_is_held_among_the_candidates_of_one_sample():
    answers = ["1", "2", "2", "3", "3", "1"]  # of one prompt: two samples, the best of three each
    best = BestOf(3, Scorer({"vote": commonest}))
    chosen, _ = best.choose(answers, [{"text": "x"}] * 6)
    assert chosen == ["2", "3"]


def test_evaluation_scores_the_best_and_keeps_prompts_apart():
    trainer = make_trainer("flow")
    options = EvaluateOptions(prompts=3, num_samples=2)
    prompts = list(trainer.prompts[:3])
    scorer = Scorer({"b": brightness})
    policy = trainer.policy
    plain = evaluation.scores(policy, prompts, scorer, options)
    assert plain.rewards["b"].shape == (3, 2) and plain.diversity.shape == (3,)
    means = evaluation.estimates(plain)["b"]
    assert means.mean == pytest.approx(float(plain.rewards["b"].double().mean()))
    best = evaluation.scores(policy, prompts, scorer, options, best=BestOf(4, scorer))
    many = evaluation.scores(policy, prompts, scorer, EvaluateOptions(prompts=3, num_samples=8))
    expected = many.rewards["b"].view(3, 2, 4).amax(2)
    assert torch.allclose(best.rewards["b"], expected, atol=1e-6)


def test_candidates_in_parts_are_those_of_one_draw(monkeypatch):
    """Not more of them are in memory at once than the bound says, and none is another."""
    policy = make_trainer("flow").policy
    prompts = make_trainer("flow").prompts[:3]
    best = BestOf(4, Scorer({"b": brightness}))
    whole, rows = evaluation.sample(policy, prompts, 2, 0, best=best)
    drawn = []
    true = policy.rollout
    monkeypatch.setattr(
        policy, "rollout", lambda p, c, *rest: drawn.append(len(p) * c) or true(p, c, *rest)
    )
    monkeypatch.setattr(evaluation, "MOST_CANDIDATES", 16)
    parts, same = evaluation.sample(policy, prompts, 2, 0, best=best)
    assert drawn == [16, 8] and torch.allclose(parts, whole, atol=1e-6) and same == rows


def test_evaluation_takes_the_half_that_is_named():
    """They share no text, and stay when prompts are added."""
    prompts = [{"text": f"a picture of {i}"} for i in range(60)]
    development, test = development_and_test(prompts)
    assert 15 < len(test) < 45 and len(development) + len(test) == 60
    longer = development_and_test([{"text": "new"}, *prompts, *prompts[:20]])
    assert {p["text"] for p in longer[1]} - {"new"} == {p["text"] for p in test}
    assert not {p["text"] for p in longer[0]} & {p["text"] for p in longer[1]}

    def chosen(split, held_out=prompts):
        source = SimpleNamespace(held_out=held_out, train=prompts[:1])
        session = SimpleNamespace(source=source, evaluation=EvaluateOptions(split=split))
        return Session.prompts(session)

    assert chosen("all") == prompts and chosen("test") == test
    assert chosen("development") == development and chosen("test", []) == prompts[:1]
    with pytest.raises(UserError, match=r"evaluate\.split=development: 1 held-out prompts are too"):
        chosen("development", prompts[:1])
