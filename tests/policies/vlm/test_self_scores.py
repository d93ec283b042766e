"""Scores of a vision-language policy for its own answers: SAR and LaSeR."""

import math
from statistics import fmean

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.objectives import PolicyGradient
from mmrl.train.minibatches import passes
from mmrl.zoo.objectives import LaSeR
from mmrl.zoo.objectives import laser as laser_module
from rewards import last_token, self_aligned
from rewards.servers.wire_prompts import marked_texts, marks_of
from samplers.noise import Rng
from samplers.warp import Warp
from tests.policies.vlm.test_vlm_policy import policy_of, prompts, rolled


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
    torch.testing.assert_close(scores.float(), 0.5 * (rollout.tokens.last_logprob + 3).float())
    again = marked_texts([str(text) for text in media], marks_of(media))  # to another computer
    for reward, option in ((self_aligned, "record_question_gain"), (last_token, "self_score")):
        assert torch.equal(reward(again, [{}] * 4), reward(media, [{}] * 4))
        with pytest.raises(UserError, match=f"policy.vlm.{option}"):
            reward(["a"], [{}])


def laser(policy, rollout, **options):
    objective = LaSeR(**options)
    earned = Rewards({"right": torch.tensor([1.0, 0.0, 0.0, torch.nan]), "form": torch.ones(4)})
    objective.shaped(policy, rollout, earned)
    return objective


@pytest.mark.parametrize("balanced", [True, False])
def test_the_loss_is_the_error_of_the_verdict_over_the_answers(policy, rollout, balanced):
    given = rollout.replace(advantage=torch.tensor([[1.0], [-1.0], [0.5], [0.0]]))
    options = {"weight": 0.3, "scale": 0.2, "reference": -4.0, "outcome": "right"}
    objective = laser(policy, given, balanced=balanced, **options)
    (point,) = objective.points(policy, given, Rng.of("points"))
    with torch.no_grad():
        loss = objective.loss(policy, point)
        base = PolicyGradient().loss(policy, point)
    extra = torch.where(point.mask, loss - base, 0.0)
    weights = {0: 3 / 2, 1: 3 / 4, 2: 3 / 4}  # one right, two wrong, one without an outcome
    for row in range(4):
        size = int(point.mask[row].sum())
        verdict = 0.2 * (float(given.tokens.last_logprob[row]) + 4.0)
        weight = weights.get(row, 0) if balanced else float(row in weights)
        wanted = 0.3 * weight * (verdict - float(row == 0)) ** 2
        assert float(extra[row].sum()) / size == pytest.approx(wanted, abs=1e-4)
        assert extra[row, : size - 1].abs().max() < 1e-4
    with torch.no_grad():
        parts = [objective.loss(policy, part)[part.mask].sum() for part in passes([point], 1)]
    assert float(sum(parts)) == pytest.approx(float(loss[point.mask].sum()), abs=1e-3)


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


def test_what_cannot_judge_is_refused(policy, rollout):
    assert "policy.vlm.self_score" in dict(LaSeR().unfit(policy_of()))["weight"]
    assert not dict(LaSeR().unfit(policy))
    with pytest.raises(UserError, match="self_score .* one token"):
        policy_of(self_score="two words")
    with pytest.raises(UserError, match="outcome is 'none'"):
        laser(policy, rollout, outcome="none")
