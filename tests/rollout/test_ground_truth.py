"""The ground truth as a member of its group, and answers that are begun for the model."""

from functools import partial

import pytest
import torch

from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.objectives import PolicyGradient
from mmrl.policies.base import RolloutContext
from mmrl.rollout.stages import Setup, stages_of
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.advantages import soft
from rewards import Count
from samplers.noise import Rng
from tests.fixtures import tiny_vlms
from tests.fixtures.stages import assert_recorded
from tests.policies.vlm.test_vlm_policy import native, point_of, policy_of, quiet  # noqa: F401

ASKED = [
    {"text": "when?", "images": [tiny_vlms.image(70, 60, 0)], "answer": 7, "gold": "a dog"},
    {"text": "say so", "answer": 12, "gold": "a cat"},
]
COPIES = 3


@pytest.fixture(scope="module")
def policy():
    return policy_of(max_new_tokens=12)


def with_truth(policy, truth, prompts=ASKED, copies=COPIES):
    context = RolloutContext(ground_truth=truth)
    with torch.no_grad():
        return policy.rollout(prompts, copies, Rng.of("truth"), context)


def test_the_ground_truth_has_the_models_own_log_probs(policy):
    found = with_truth(policy, lambda prompt: prompt["gold"])
    assert found.provenance.is_ground_truth.tolist() == [False, False, True] * 2
    texts = policy.decode(found)
    assert [texts[2], texts[5]] == ["a dog", "a cat"] and texts[2].finished and texts[2].tokens == 6
    rows = found.provenance.is_ground_truth.nonzero()[:, 0]
    apart = (native(policy, found[rows]) - found.logprob[rows])[found.mask[rows]]
    assert float(apart.abs().max()) < 1e-5 and bool(
        (found.logprob[rows][found.mask[rows]] < 0).all()
    )
    assert_recorded(policy, found)


def test_other_rows_are_those_without_it_and_an_answer_that_cannot_be_given_is_not(policy):
    plain = with_truth(policy, None)
    assert plain.provenance.is_ground_truth is None
    for text in ("yes", None, "x" * 12, "before <|image_pad|> after"):  # too long, forbidden
        found = with_truth(policy, lambda prompt, text=text: text)
        own = ~found.provenance.is_ground_truth
        assert own.tolist() == [True, True, text != "yes"] * 2
        for name in ("sample", "mask", "logprob", "row_id", "group"):
            assert torch.equal(getattr(found, name)[own], getattr(plain, name)[own])


def trainer(policy, truth="count", **options):
    sizes = {
        "prompts_per_iteration": 2,
        "group_size": 3,
        "train_batch_size": 6,
        "iterations": 2,
        "ground_truth_rollout": truth,
        "seed": 1,  # no sample is right by accident, none stops
    } | options
    return Trainer(
        policy,
        ASKED,
        Scorer({"count": Count()}),
        partial(soft, threshold=0.5),
        PolicyGradient(kl=0.01),
        partial(adamw, lr=1e-3),
        TrainOptions(**sizes),
    )


def test_it_is_trained_on_and_enters_no_metric_of_samples():
    one = trainer(policy_of(max_new_tokens=28))
    seen = []
    one.monitors.append(lambda sampled: seen.append(sampled) or {})
    batch = one.collect()
    rollout = batch.rollout
    rewards = batch.rewards
    given = rollout.provenance.is_ground_truth
    assert given.tolist() == [False, False, True] * 2 and rewards["count"][given].tolist() == [1, 1]
    assert (rollout.advantage[given] > 0).all() and (rollout.advantage[~given] < 0).all()
    (sampled,) = seen
    assert len(sampled.media) == len(sampled.rollout) == 4
    assert len(sampled.rewards["count"]) == len(sampled.shaped["count"]) == 4
    assert sampled.rollout.provenance.is_ground_truth.sum() == 0
    metrics = [trainer(policy_of(max_new_tokens=28), truth).iterate() for truth in ("count", None)]
    assert metrics[0]["reward/mean"] == 0 and metrics[0]["samples/total"] == 4
    assert (
        metrics[0]["answer/min"]
        == metrics[0]["answer/max"]
        == 28
        > rollout.mask[given].sum(1).max()
    )
    point = point_of(one.policy, rollout)
    entropy = one.policy.dist(point).entropy().detach()[rollout.mask & ~given[:, None]].mean()
    assert metrics[0]["entropy"] == pytest.approx(float(entropy), rel=1e-5)
    assert (
        metrics[0]["ratio/max_deviation"] < 1e-4
        and metrics[0]["grad_norm"] > 0 == metrics[1]["grad_norm"]
    )


def test_who_writes_it_is_checked(policy):
    scorer = Scorer({"length": lambda texts, prompts: [float(len(t)) for t in texts]})
    sizes = {"prompts_per_iteration": 2, "group_size": 2, "train_batch_size": 4, "iterations": 1}
    options = TrainOptions(**sizes, ground_truth_rollout="length")
    with pytest.raises(UserError, match="reward 'length' cannot write down a ground truth"):
        stages_of(Setup(options, policy, ASKED, scorer.rewards))


def test_an_answer_begun_is_read_as_a_whole_and_scored_after_its_beginning(policy):
    begun = [{**ASKED[0], "prefill": "<answer>"}]
    found = with_truth(policy, None, begun, 2)
    length = policy.inputs.encode(ASKED[0])["input_ids"].shape[1]
    ids = policy.inputs.encode(begun[0])["input_ids"]
    assert policy.inputs.tokenizer.decode(ids[0, length:]) == "<answer>"
    assert torch.equal(ids[:, :length], policy.inputs.encode(ASKED[0])["input_ids"])
    texts = policy.decode(found)
    assert all(text.startswith("<answer>") for text in texts)
    assert [text.tokens for text in texts] == found.mask.sum(1).tolist()
    apart = (native(policy, found) - found.logprob)[found.mask]
    assert float(apart.abs().max()) < 1e-5
    given = with_truth(policy, lambda prompt: "<answer>4", begun, 2)
    assert policy.decode(given)[1] == "<answer>4" and given.mask[1].sum() == 2
