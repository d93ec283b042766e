"""Right answers of earlier iterations in groups that have none: which, where, resumed."""

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch

from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.experiment import state
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.rollout.stages import Setup, stages_of
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.advantages import all_samples
from mmrl.zoo.stages.adaptive_sampling import AdaptiveSampling
from mmrl.zoo.stages.answer_memory import marked
from mmrl.zoo.stages.response_reuse import ReusedResponses
from tests.fixtures import toys
from tests.fixtures.stages import met
from tests.policies.vlm.test_vlm_policy import policy_of, quiet  # noqa: F401
from tests.rollout.test_replay_buffer import asked, drawn, point_of


@pytest.fixture(scope="module")
def policy():
    return policy_of(max_new_tokens=5)


def after(memory, prompts, rewards, iteration):
    memory.begin(iteration)
    fresh = drawn(memory.policy, prompts, rewards, iteration)
    memory.observe(prompts, fresh)
    return (fresh, *memory.groups(fresh, iteration, None))


def test_the_last_right_answer_to_the_prompt_takes_the_last_place(policy):
    prompts = asked(3)
    memory = met(ReusedResponses(), policy, prompts)
    first, same, counts = after(memory, prompts, [0, 1, 1, 0, 0, 0, 0, 0, 1.0], 0)
    assert counts["response_reuse/groups"] == 0 and counts["response_reuse/remembered"] == 2
    assert torch.equal(same.rollout.sample, first.rollout.sample)
    second, mixed, counts = after(memory, [prompts[1], prompts[0]], [0, 0, 0, 0, 0, 0.0], 2)
    assert counts == {
        "response_reuse/groups": 1,
        "response_reuse/age": 2,
        "response_reuse/remembered": 2,
    }
    assert mixed.rollout.provenance.is_replayed.tolist() == [False] * 5 + [True]
    assert mixed.rewards["r"].tolist() == [0] * 5 + [1]
    assert torch.equal(mixed.rollout.sample[5], first.rollout.sample[1]), "the first right one"
    assert torch.equal(mixed.rollout.logprob[5], first.rollout.logprob[1])
    assert torch.equal(mixed.rollout.row_id, second.rollout.row_id)
    assert torch.equal(mixed.rollout.group, second.rollout.group)
    assert mixed.media[5] == first.media[1] and mixed.media[:5] == second.media[:5]
    point = point_of(policy, mixed.rollout)
    with torch.no_grad():
        again = policy.dist(point).log_prob(point.target)
    torch.testing.assert_close(
        again[point.mask], mixed.rollout.logprob[point.mask], atol=1e-5, rtol=1e-5
    )
    rows, rewards = mixed.sampled()
    assert len(rows) == 6 and not rewards["r"].any(), "statistics are of what was sampled now"


def test_answers_are_forgotten_by_age_and_size(policy):
    prompts = asked(3)
    memory = met(ReusedResponses(size=2, age=1), policy, prompts)
    after(memory, prompts, [0, 0, 1.0] * 3, 0)
    assert list(memory.memory.by_prompt()) == [1, 2]
    _, _, counts = after(memory, prompts[:2], [0.0] * 6, 1)
    assert counts["response_reuse/groups"] == 1, "that of prompt 0 had to leave"
    assert after(memory, prompts, [0.0] * 9, 2)[2]["response_reuse/groups"] == 0, "too old"


def test_a_changed_prompt_is_not_remembered(policy):
    prompts = asked(1)
    memory = met(ReusedResponses(), policy, prompts)
    after(memory, [dict(prompts[0])], [0, 0, 1.0], 0)
    assert not memory.memory.entries


def test_an_answer_of_the_replay_buffer_is_not_remembered_as_new(policy):
    prompts = asked(1)
    memory = met(ReusedResponses(), policy, prompts)
    memory.begin(0)
    old = drawn(policy, prompts, [0, 0, 1.0])
    old = replace(old, rollout=marked(old.rollout, True))
    memory.observe(prompts, old)
    memory.groups(old, 0, None)
    assert not memory.memory.entries


def test_families_that_cannot_be_shown_old_answers_are_refused():
    options = TrainOptions(1, 2, 2, 1, stages=(ReusedResponses(),))
    with pytest.raises(UserError, match="response_reuse: ToyBare cannot be shown old"):
        stages_of(Setup(options, toys.ToyBare(), [], {}))


def some(texts, prompts):
    return torch.tensor([float(sum(map(ord, text)) % 4 == 0) for text in texts])


def trainer():
    return Trainer(
        policy_of(max_new_tokens=3),
        asked(),
        Scorer({"some": some}),
        all_samples,
        PolicyGradient(),
        partial(adamw, lr=3e-3),
        TrainOptions(
            prompts_per_iteration=2,
            group_size=2,
            train_batch_size=4,
            iterations=8,
            stages=(AdaptiveSampling(rounds=1, until="positive"), ReusedResponses()),
        ),
    )


def test_a_run_of_ar3po_goes_on_from_a_checkpoint_to_the_bit():
    one = trainer()
    two = trainer()
    first = [one.iterate() for _ in range(5)]
    assert all(m["ratio/max_deviation"] < 1e-4 for m in first), "the gate looks at fresh answers"
    state.restore(
        two, *(lambda a, m: (deepcopy(a), json.loads(json.dumps(m))))(*state.capture(one))
    )
    reused = sum(m["response_reuse/groups"] for m in first)
    for _ in range(4):
        metrics = [x.iterate() for x in (one, two)]
        reused += metrics[0]["response_reuse/groups"]
        assert metrics[0]["samples/total"] == 4 + metrics[0]["adaptive/samples"]
        for name in ("reward/mean", "loss", "response_reuse/groups", "adaptive/samples"):
            assert metrics[0].get(name) == metrics[1].get(name)
    assert reused
    weights = [x.policy.weights.full() for x in (one, two)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
