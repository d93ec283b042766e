"""Scores of a vision-language policy for its own answers: SAR and LaSeR."""

import math
from statistics import fmean

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.types import Completion, Rewards
from mmrl.objectives import PolicyGradient
from mmrl.train.minibatches import passes
from mmrl.zoo.objectives import LaSeR
from mmrl.zoo.objectives import laser as laser_module
from rewards import last_token, self_aligned
from rewards.servers.wire_prompts import marked_texts, marks_of
from samplers.noise import Rng
from samplers.warp import Warp
from tests.policies.vlm.test_vlm_policy import policy_of, prompts, quiet, rolled

assert quiet  # a fixture of that file


@pytest.fixture(scope="module")
def policy():
    return policy_of(record_question_gain=True, self_score="~", temperature=0.8, top_k=40)


@pytest.fixture(scope="module")
def rollout(policy):
    return rolled(policy, prompts()[:2], copies=2)


def token_logprobs(policy, cond, ids):
    """log p of each of the tokens ids, one answer to one prompt, at temperature 1, by the plain
    network."""
    net = policy.net
    batch = policy._batch([cond])
    answer = torch.tensor([ids])
    hidden = net._apart(batch, torch.zeros(1, dtype=torch.long), answer)
    logprob = Warp(suppressed=policy.warp.suppressed)(net.logits(hidden)).log_softmax(-1)
    return logprob[0, range(len(ids)), ids].tolist()


def test_the_gain_is_what_the_question_adds_to_the_log_prob_of_every_token(policy, rollout):
    empty, _ = policy._encoded({"text": ""})
    for row in range(len(rollout)):
        ids = rollout.sample[row][rollout.mask[row]].tolist()
        with torch.no_grad():
            asked = token_logprobs(policy, rollout.cond[int(rollout.group[row])], ids)
            alone = token_logprobs(policy, empty, ids)
        gains = rollout.tokens.question_gain[row][: len(ids)].tolist()
        assert gains == pytest.approx([a - b for a, b in zip(asked, alone)], abs=1e-4)
        drop = 1 - math.exp(fmean(alone) - fmean(asked))  # (ppl(a) - ppl(a | q)) / ppl(a)
        ppl = [math.exp(-fmean(alone)), math.exp(-fmean(asked))]
        assert drop == pytest.approx((ppl[0] - ppl[1]) / ppl[0], abs=1e-9)
        reward = self_aligned(policy.decode(rollout), [{}] * len(rollout))
        assert float(reward[row]) == pytest.approx(max(-1, min(1, drop)), abs=1e-3)


def test_the_verdict_is_the_log_prob_of_the_token_behind_the_answer(policy, rollout):
    token = policy.self_score_id
    for row in range(len(rollout)):
        ids = rollout.sample[row][rollout.mask[row]].tolist()
        point = next(iter(policy.path(rollout[row : row + 1])))
        longer = torch.tensor([[*ids, token]])
        again = point.replace(target=longer, state=longer, mask=torch.ones_like(longer).bool())
        with torch.no_grad():
            wanted = float(policy.dist(again).log_prob(longer)[0, -1])
        assert float(rollout.tokens.last_logprob[row]) == pytest.approx(wanted, abs=1e-4)
    media = policy.decode(rollout)
    scores = last_token(media, [{}] * 4, scale=0.5, reference=-3.0)
    wanted = [0.5 * (float(x) + 3) for x in rollout.tokens.last_logprob]
    assert scores.tolist() == pytest.approx(wanted, abs=1e-5)
    again = marked_texts([str(text) for text in media], marks_of(media))
    assert torch.equal(last_token(again, [{}] * 4), last_token(media, [{}] * 4))
    assert torch.equal(self_aligned(again, [{}] * 4), self_aligned(media, [{}] * 4))


def test_texts_that_do_not_know_say_what_to_set():
    for reward, option in ((self_aligned, "record_question_gain"), (last_token, "self_score")):
        with pytest.raises(UserError, match=f"policy.vlm.{option}"):
            reward(["a"], [{}])
        text = Completion("a", 1, True, 0.0)
        text.question_gain = 0.5
        text.last_logprob = -2.0
        assert reward([text, "b"], [{}] * 2).isnan().tolist() == [False, True]


def laser(policy, rollout, **options):
    objective = LaSeR(**options)
    earned = Rewards({"right": torch.tensor([1.0, 0.0, 0.0, torch.nan]), "form": torch.ones(4)})
    objective.shaped(policy, rollout, earned)
    return objective


def test_the_loss_is_the_error_of_the_verdict_over_the_answers(policy, rollout):
    for balanced in (True, False):
        error_of_the_verdict(policy, rollout, balanced)


def error_of_the_verdict(policy, rollout, balanced):
    given = rollout.replace(advantage=torch.tensor([[1.0], [-1.0], [0.5], [0.0]]))
    options = {"weight": 0.3, "scale": 0.2, "reference": -4.0, "outcome": "right"}
    objective = laser(policy, given, balanced=balanced, **options)
    plain = PolicyGradient()
    (point,) = objective.points(policy, given, Rng.of("points"))
    with torch.no_grad():
        loss = objective.loss(policy, point)
        base = plain.loss(policy, point)
    extra = torch.where(point.mask, loss - base, 0.0)
    outcome = {0: 1.0, 1: 0.0, 2: 0.0}
    weights = {0: 3 / 2, 1: 3 / 4, 2: 3 / 4}  # one right, two wrong
    for row in range(4):
        size = int(point.mask[row].sum())
        found = float(extra[row].sum()) / size  # the mean over its tokens
        if row not in outcome:
            assert found == pytest.approx(0.0, abs=1e-5)
            continue
        verdict = 0.2 * (float(given.tokens.last_logprob[row]) + 4.0)
        weight = weights[row] if balanced else 1.0
        assert found == pytest.approx(0.3 * weight * (verdict - outcome[row]) ** 2, abs=1e-4)
        assert extra[row, : size - 1].abs().max() < 1e-4
    parts = []
    with torch.no_grad():
        for part in passes([point], 1):
            value = objective.loss(policy, part)
            parts.append(float(torch.where(part.mask, value, 0.0).sum()))
    assert sum(parts) == pytest.approx(float(torch.where(point.mask, loss, 0.0).sum()), abs=1e-3)


def test_right_and_wrong_answers_of_all_processes_count_alike(policy, rollout, monkeypatch):
    monkeypatch.setattr(laser_module, "all_sum", lambda x: x + x.new_tensor([3.0, 0.0]))
    objective = laser(policy, rollout, outcome="right")
    found = objective._targets(rollout.row_id)
    wanted = [[1.0, 0.0, 0.0, 0.0], [6 / 8, 6 / 4, 6 / 4, 0.0]]  # 1 + 3 right, 2 wrong
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=found.dtype))


def test_the_verdict_learns_the_outcome(policy, rollout):
    own = policy_of(self_score="~")
    optimizer = torch.optim.Adam(own.weights.parameters().values(), lr=1e-3)
    given = rollout.replace(advantage=torch.zeros(4, 1))
    objective = laser(own, given, weight=1.0, scale=0.5, reference=-4.0, outcome="right")
    errors = []
    for _ in range(12):
        (point,) = objective.points(own, given, Rng.of("points"))
        loss = torch.where(point.mask, objective.loss(own, point), 0.0).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(float(loss))
    assert errors[-1] < 0.3 * errors[0]


def test_what_cannot_judge_is_refused():
    objective = LaSeR()
    assert dict(objective.unfit(policy_of()))["weight"].count("policy.vlm.self_score") == 1
    assert not dict(objective.unfit(policy_of(self_score="~")))
    with pytest.raises(UserError, match="self_score .* one token"):
        policy_of(self_score="two words")
    with pytest.raises(UserError, match="outcome is 'none'"):
        laser(policy_of(self_score="~"), rolled(policy_of(), prompts()[:2], 2), outcome="none")
