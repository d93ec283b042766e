"""A tiny vision-language model learns by rewards: in a few iterations, and from rewards of single
steps."""

from functools import partial

import pytest
import torch

from mmrl import advantages
from mmrl.advantages.process import process
from mmrl.config.options import TrainOptions
from mmrl.core.metrics import Meter
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.objectives.surrogates import ppo, reinforce
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from rewards import KeySteps
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_policy import policy_of, quiet, rolled  # noqa: F401


def letters(texts, prompts):
    """Share of small letters among eight tokens of a byte each."""
    return [sum("a" <= c <= "z" for c in text) / 8 for text in texts]


def test_a_few_iterations_raise_the_reward():
    asked = [{"text": "what is this?", "images": [tiny_vlms.image(56, 56, i)]} for i in range(2)]
    trainer = Trainer(
        policy_of(max_new_tokens=8, remove_padding=True),
        asked,
        Scorer({"letters": letters}),
        advantages.grpo,
        PolicyGradient(),
        partial(adamw, lr=1e-2),
        TrainOptions(prompts_per_iteration=2, group_size=16, train_batch_size=32, iterations=10),
    )
    found = [trainer.iterate()["reward/mean"] for _ in range(10)]
    assert found[0] < 0.3 and sum(found[-2:]) / 2 > found[0] + 0.4


def test_rewards_of_steps_reach_the_tokens_that_earned_them():
    """The ground truth in the group names both steps: its tokens are worth what is still to
    come."""
    asked = [
        {
            "text": "count",
            "answer": 3,
            "key_steps": ["two", "one more"],
            "images": [tiny_vlms.image(56, 56, 0)],
        }
    ]
    reward = KeySteps(each=True)
    trainer = Trainer(
        policy_of(max_new_tokens=64),
        asked,
        Scorer({"key_steps": reward}),
        process,
        PolicyGradient(),
        partial(adamw, lr=1e-3),
        TrainOptions(
            prompts_per_iteration=1,
            group_size=3,
            train_batch_size=3,
            iterations=1,
            ground_truth_rollout="key_steps",
            loss_agg_mode="seq_mean_token_mean",
        ),
    )
    batch = trainer.collect()
    rollout = batch.rollout
    earned = batch.rewards["key_steps"]
    given = rollout.provenance.is_ground_truth
    assert given.tolist() == [False, False, True] and earned.shape == rollout.mask.shape == (3, 64)
    text = reward.ground_truth(asked[0])
    ends = [text.index(step) + len(step) - 1 for step in ("two", "one more")]
    last = int(rollout.mask[2].sum()) - 1
    assert (earned[2] > 0).nonzero()[:, 0].tolist() == [*ends, last] and earned[
        2
    ].nansum() == pytest.approx(1.0)
    worth = rollout.advantage[2]
    levels = [worth[0], worth[ends[0] + 1], worth[ends[1] + 1], worth[last]]
    assert (
        levels == sorted(levels, reverse=True)
        and len({round(float(x), 5) for x in levels[:3]}) == 3
    )
    assert (worth[: ends[0] + 1] == worth[0]).all() and (rollout.advantage[:2] < 0).all()
    assert trainer.update.improve(batch, rollout, trainer._rng("update"), True, Meter())


def test_prompts_of_like_length_are_read_together():
    lengths = [40, 3, 38, 5, 36, 4]
    given = [{"text": "x" * n} for n in lengths]
    one = policy_of(fixed_batch_rows=4)
    whole = policy_of()
    sizes = []
    read = one.net.read
    one.checked = True  # the comparison with the class reads them too
    one.net.read = lambda inputs: sizes.append(tuple(inputs["input_ids"].shape)) or read(inputs)
    found = rolled(one, given, copies=2)
    wanted = rolled(whole, given, copies=2)
    assert torch.equal(found.sample, wanted.sample) and torch.equal(found.mask, wanted.mask)
    own = sorted((cond["input_ids"].shape[1] for cond in wanted.cond), reverse=True)
    assert sizes == [(2, own[0]), (2, own[2]), (2, own[4])]


def test_the_first_steps_gradient_is_that_of_reinforce():
    one = policy_of()
    rollout = rolled(one)
    advantage = torch.linspace(-1, 1, len(rollout))[:, None]
    (point,) = one.path(rollout.replace(advantage=advantage))
    found = []
    for surrogate in (ppo, reinforce):
        loss = PolicyGradient(surrogate).loss(one, point.replace(on_policy=True))
        found.append(
            torch.autograd.grad(
                (loss * point.mask).sum(), list(one.net.parameters()), allow_unused=True
            )
        )
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-6))
