"""Answers that the policy improves by what is asked of them."""

from dataclasses import replace

import pytest
import torch

from mmrl.config.options import Refinement
from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.rollout.refinement import Refined, listed
from mmrl.rollout.stages import Drawn, Setup
from samplers.noise import Rng
from tests.fixtures import toys
from tests.policies.vlm.test_vlm_policy import policy_of, quiet  # noqa: F401
from tests.rollout.test_replay_buffer import asked
from tests.train.test_trainer import make_trainer


@pytest.fixture(scope="module")
def policy():
    return policy_of(max_new_tokens=6)


def setup_of(policy, prompts, **options):
    """Its rewards are the lengths of texts."""
    plain = make_trainer("causal").options

    def score(rows):
        return Rewards({"r": torch.tensor([len(t) for t in policy.decode(rows)]).float()})

    chosen = replace(plain, refinement=Refinement(**options))
    return Setup(chosen, policy, prompts, {}, score=score)


@pytest.mark.parametrize("place", ["append", "replace"])
def test_a_group_with_room_gets_an_answer_to_the_plain_question(policy, place):
    prompts = [prompt | {"rubric": ["is short", ["is right", 2.0]]} for prompt in asked(2)]
    stage = Refined.build(setup_of(policy, prompts, place=place))
    questions = []

    def draw(prompts, rng, copies=1):
        questions.extend(prompt["text"] for prompt in prompts)
        with torch.no_grad():
            rollout = policy.rollout(prompts, copies, rng)
        media = policy.decode(rollout)
        return Drawn(rollout, media, Rewards({"r": torch.zeros(len(media))}))

    fresh = draw(prompts, Rng.of("own"), 3)
    fresh = replace(fresh, rewards=Rewards({"r": torch.tensor([0, 0.5, 0, 0, 1, 0])}))
    questions.clear()
    stage.begin(0)
    stage.observe(prompts, fresh)
    mixed, counts = stage.groups(fresh, 0, draw)
    assert counts == {"refinement/groups": 1.0}, "the other group has reached the threshold"
    (question,) = questions
    assert question.startswith(prompts[0]["text"]) and str(fresh.media[1]) in question
    assert "- is short\n- is right" in question
    rollout = mixed.rollout
    new = rollout.provenance.is_ground_truth.nonzero()[:, 0].tolist()
    assert new == [3] if place == "append" else new == [2]
    assert rollout.prompt_per_row()[new[0]]["text"] == prompts[0]["text"]
    (point,) = policy.path(rollout[new[0] : new[0] + 1])
    with torch.no_grad():
        logp = policy.dist(point).log_prob(point.target)
    recorded = rollout.logprob[new]
    torch.testing.assert_close(logp[point.mask], recorded[point.mask], atol=1e-5, rtol=0)
    assert mixed.rewards["r"][new[0]] == len(mixed.media[new[0]])
    assert len(mixed.sampled()[0]) == 6


def test_what_cannot_be_refined_is_told(policy):
    with pytest.raises(UserError, match="no prompt has the field 'rubric'"):
        Refined.build(setup_of(policy, asked(1)))
    with pytest.raises(UserError, match="train.refinement: ToyCausal reads no criticism"):
        Refined.build(setup_of(toys.ToyCausal(), toys.prompts(1)))
    with pytest.raises(UserError, match="template may hold"):
        Refinement(template="{question}")
    assert listed("7") == "7" and listed(["a", ("b", 1)]) == "- a\n- b"
