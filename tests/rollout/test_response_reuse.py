"""Right answers of earlier iterations in groups that have none: which, where, resumed."""

from dataclasses import replace

import pytest

from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.rollout.stages import Setup, stages_of
from mmrl.zoo.stages.answer_memory import marked
from mmrl.zoo.stages.response_reuse import ReusedResponses
from tests.fixtures import toys
from tests.fixtures.stages import met
from tests.policies.vlm.test_vlm_policy import policy_of, quiet  # noqa: F401
from tests.rollout.test_replay_buffer import asked, drawn


@pytest.fixture(scope="module")
def policy():
    return policy_of(max_new_tokens=5)


def after(memory, prompts, rewards, iteration):
    memory.begin(iteration)
    fresh = drawn(memory.policy, prompts, rewards, iteration)
    memory.observe(prompts, fresh)
    return (fresh, *memory.groups(fresh, iteration, None))


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
