"""Weights of several rewards that follow the gradients of their objectives, against steps of plain
gradient descent on each reward alone."""

import json
import math
from functools import partial

import pytest
import torch

from mmrl import advantages
from mmrl.config.options import RewardGradients, TrainOptions
from mmrl.core.errors import UserError
from mmrl.experiment import state
from mmrl.experiment.build import read
from mmrl.objectives import PolicyGradient
from mmrl.scoring import Scorer
from mmrl.train.optimizers import sgd
from mmrl.train.trainer import Trainer
from mmrl.zoo.advantages import Running
from tests.core.test_imports import ROOT
from tests.fixtures import toys


def other(sample, prompts):
    """Another wish, which is partly at odds with the first."""
    flat = sample.double().flatten(1)
    return (flat[:, 0] - 0.3 * flat[:, 1:].mean(1)).float()


CONFIG = ROOT / "configs" / "digits" / "flow_grpo.yaml"
REWARDS = "reward={digits: 1.0, jpeg_compressibility: 1.0}"
CONFIGURED = {"toy": 1.0, "other": 0.5}


def trainer_of(family, weights, gradients=None, micro=4, advantage=None, kl=0.0):
    sizes = {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 16, "iterations": 4}
    chosen = {"micro_batch_size": micro, "max_grad_norm": None, "reward_gradients": gradients}
    return Trainer(
        toys.make(family, double=True),
        toys.prompts(4),
        Scorer({"toy": toys.reward, "other": other}, weights),
        advantage or advantages.dr_grpo,
        PolicyGradient(kl=kl),
        partial(sgd, lr=0.1),
        TrainOptions(**sizes, **chosen),
    )


def step(family, weights, **options):
    """The gradient of one iteration, by the weights before and after it."""
    trainer = trainer_of(family, weights, **options)
    before = trainer.policy.weights.full()
    metrics = trainer.iterate()
    after = trainer.policy.weights.full()
    return [(before[name] - after[name]) / 0.1 for name in before], metrics


@pytest.mark.parametrize(("family", "measure"), [("flow", "product"), ("causal", "cosine")])
def test_shares_grow_with_what_gradients_have_in_common(family, measure):
    alone = [
        step(family, {n: w * (n == name) for n, w in CONFIGURED.items()})[0] for name in CONFIGURED
    ]
    total = [sum(parts) for parts in zip(*alone, strict=True)]

    def dot(left, right):
        return sum(float((x * y).sum()) for x, y in zip(left, right, strict=True))

    influence = [dot(g, total) for g in alone]
    if measure == "cosine":
        influence = [
            i / math.sqrt(dot(g, g) * dot(total, total))
            for i, g in zip(influence, alone, strict=True)
        ]
    powers = [0.5 * math.exp(2.0 * i) for i in influence]
    shares = [0.1 / 2 + 0.9 * power / sum(powers) for power in powers]
    options = RewardGradients(rate=2.0, measure=measure, least=0.1)
    for micro, kl in ((4, 0.0), (8, 0.3)):  # the KL does not enter
        gradient, metrics = step(family, CONFIGURED, gradients=options, micro=micro, kl=kl)
        computed = [metrics["reward_weight/toy"], metrics["reward_weight/other"]]
        assert computed == pytest.approx(shares, abs=1e-9)
        assert computed[0] != pytest.approx(0.5, abs=1e-4)
        if not kl:
            weighted = {
                name: 2 * share * CONFIGURED[name]
                for name, share in zip(CONFIGURED, shares, strict=True)
            }
            expected, _ = step(family, weighted)
            for left, right in zip(gradient, expected, strict=True):
                torch.testing.assert_close(left, right, atol=1e-9, rtol=1e-7)


def test_shares_and_memories_survive_a_resume():
    """An advantage that remembers counts every iteration once."""
    trainer, resumed = (
        trainer_of("causal", CONFIGURED, RewardGradients(rate=0.5), advantage=Running())
        for _ in range(2)
    )
    plain = trainer_of("causal", CONFIGURED, advantage=Running())
    trainer.iterate()
    plain.iterate()
    assert trainer.advantage.sums == plain.advantage.sums
    arrays, meta = state.capture(trainer)
    state.restore(resumed, arrays, json.loads(json.dumps(meta)))
    assert resumed.reward_weights.shares == trainer.reward_weights.shares != {}
    assert trainer.iterate()["reward_weight/toy"] == resumed.iterate()["reward_weight/toy"]


def test_what_cannot_be_weighed_is_refused():
    trainer = trainer_of("causal", {"toy": 1.0, "other": 0.0}, RewardGradients())
    with pytest.raises(UserError, match="train.reward_gradients weighs several.*toy is all"):
        trainer.iterate()
    for change, complaint in {
        "train.precision=fp16": "fp16 scales the loss",
        "objective=draft": "follows the gradient of the rewards",
        "reward={digits: 1.0}": "there is 1 with a weight",
    }.items():
        with pytest.raises(UserError, match=f"train.reward_gradients: .*{complaint}"):
            read(CONFIG, [REWARDS, "train.reward_gradients={}", change])
    read(CONFIG, [REWARDS, "train.reward_gradients={rate: 2.0}"])
