"""Answers of earlier iterations instead of groups without a gradient: which, with which log-probs,
resumed."""

from functools import partial

import pytest
import torch

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.rollout.stages import Drawn
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.stages.replay_buffer import ReplayBuffer
from samplers.noise import Rng
from tests.fixtures import tiny_vlms, toys
from tests.fixtures.stages import met
from tests.policies.vlm.test_vlm_policy import point_of, policy_of, quiet  # noqa: F401

COPIES = 3


def asked(count=4):
    return [{"text": f"what is {i}?", "images": [tiny_vlms.image(56, 56, i)]} for i in range(count)]


def drawn(policy, prompts, rewards, iteration=0) -> Drawn:
    with torch.no_grad():
        rollout = policy.rollout(prompts, COPIES, Rng.of("memory", iteration))
    return Drawn(
        rollout, policy.decode(rollout), Rewards({"r": torch.tensor(rewards, dtype=torch.float32)})
    )


@pytest.fixture(scope="module")
def policy():
    return policy_of(max_new_tokens=5)


def exchange(memory, prompts, rewards, iteration):
    found = drawn(memory.policy, prompts, rewards, iteration)
    memory.observe(prompts, found)
    return (found, *memory.groups(found, iteration, None))


def test_flat_groups_give_way_to_those_whose_rewards_differed_most(policy):
    prompts = asked()
    memory = met(ReplayBuffer(share=1.0), policy, prompts)
    first, same, counts = exchange(memory, prompts, [0, 0, 1, 0, 0, 3, 1, 1, 1, 0, 0, 2.0], 0)
    assert counts == {"reuse/groups": 0, "reuse/age": 0, "reuse/remembered": 3}
    assert (
        torch.equal(same.rollout.sample, first.rollout.sample)
        and not same.rollout.provenance.is_replayed.any()
    )
    second, found, counts = exchange(memory, [prompts[0], prompts[3]], [1, 1, 1, 0, 1, 0.0], 2)
    assert counts == {"reuse/groups": 1, "reuse/age": 2, "reuse/remembered": 3}
    stale = found.rollout.provenance.is_replayed
    assert stale.tolist() == [True] * 3 + [False] * 3 and found.rewards["r"].tolist() == [
        0,
        0,
        3,
        0,
        1,
        0,
    ]
    assert torch.equal(found.rollout.row_id, second.rollout.row_id)
    old = first.rollout[first.rollout.group == 1]
    assert torch.equal(found.rollout.sample[stale], old.sample)
    assert torch.equal(found.rollout.logprob[stale], old.logprob)
    assert (
        found.rollout.prompt_per_row()[0]["text"] == prompts[1]["text"]
        and found.media[:3] == first.media[3:6]
    )
    point = point_of(policy, found.rollout)
    with torch.no_grad():
        again = policy.dist(point).log_prob(point.target)
    torch.testing.assert_close(
        again[point.mask], found.rollout.logprob[point.mask], atol=1e-5, rtol=1e-5
    )


def test_groups_are_forgotten_by_age_use_and_size(policy):
    prompts = asked()
    mixed = [0, 0, 1, 0, 0, 2, 0, 0, 3, 0, 0, 4.0]
    memory = met(ReplayBuffer(share=0.5, size=3, age=2), policy, prompts)
    exchange(memory, prompts, mixed, 0)
    assert [one.index for one in memory.memory.entries] == [3, 2, 1]
    _, found, counts = exchange(memory, prompts, [1.0] * 12, 1)
    assert counts["reuse/groups"] == 2 and found.rollout.provenance.is_replayed.sum() == 6, (
        "half of the groups at most"
    )
    assert [one.index for one in memory.memory.entries] == [1], "used once"
    assert exchange(memory, prompts, [1.0] * 12, 3)[2]["reuse/groups"] == 0, "too old"


def test_what_is_not_in_the_data_is_not_remembered(policy):
    prompts = asked(2)
    memory = met(ReplayBuffer(), policy, prompts)
    exchange(memory, [dict(prompts[0]), prompts[1]], [0, 0, 1, 0, 0, float("nan")], 0)
    assert not memory.memory.entries, "a changed prompt, and a group with a missing reward"


# -------------------------------------------------------------------------------------------------
# in a training run


def some(texts, prompts):
    """Three answers in four earn the same, so that groups are flat now and then."""
    return torch.tensor([float(sum(map(ord, text)) % 4 == 0) for text in texts])


def test_policies_without_prompts_to_encode_again_are_refused():
    with pytest.raises(UserError, match="train.stages.replay_buffer: ToyBare"):
        Trainer(
            toys.ToyBare(),
            [{"text": "a", "label": 0}],
            Scorer({"some": some}),
            advantages.grpo,
            PolicyGradient(),
            partial(adamw, lr=1e-3),
            TrainOptions(
                prompts_per_iteration=1,
                group_size=2,
                train_batch_size=2,
                iterations=1,
                stages=(ReplayBuffer(),),
            ),
        )
