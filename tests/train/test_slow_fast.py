"""Fast steps, a step back and a slow step (SFPO), against plain steps taken by hand."""

from functools import partial

import pytest
import torch

from mmrl.config.options import SlowFast
from mmrl.config.plan import arithmetic
from mmrl.core.metrics import Meter
from mmrl.train.optimizers import sgd
from tests.fixtures import toys
from tests.train.test_trainer import make_trainer


def trainer_of(family="flow", micro=8, **options):
    return make_trainer(
        policy=toys.make(family, double=True),
        optimizer=partial(sgd, lr=0.3),
        prompts_per_iteration=4,
        group_size=4,
        train_batch_size=16,
        micro_batch_size=micro,
        max_grad_norm=None,
        **options,
    )


def trained(family="flow", steps=1, **options):
    """Weights before and after an iteration of plain SGD, or of several steps on its batch."""
    trainer = trainer_of(family, **options)
    start = trainer.policy.weights.full()
    if steps == 1:
        trainer.iterate()
    else:
        batch = trainer.collect()
        meter = Meter()
        for step in range(steps):
            rng = trainer.update._rng(batch, 0).fold(0)
            with meter.listening():
                trainer.update.improve(batch, batch.rollout, rng, step == 0, meter)
    return start, trainer.policy.weights.full(), trainer


def same(one, two):
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-12, rtol=0)


@pytest.mark.parametrize("family", ["flow", "causal"])
def test_without_a_step_back_they_are_plain_steps_on_one_batch(family):
    _, fast, _ = trained(family, slow_fast=SlowFast(fast_steps=2, reposition=1.0))
    _, plain, _ = trained(family, steps=3)
    same(fast, plain)


def test_the_slow_step_starts_between():
    """w = w_0 + 0.5 (w_2 - w_0) - lr g(w_0 + 0.5 (w_2 - w_0)), whose first part is w_0 without the
    slow step: with a learning rate of zero for it alone."""
    start, twice, _ = trained(steps=2)
    _, fast, trainer = trained(slow_fast=SlowFast(fast_steps=2, reposition=0.5))
    between = {name: start[name] + 0.5 * (twice[name] - start[name]) for name in start}
    moved = {name: fast[name] - between[name] for name in start}
    assert any(value.abs().max() > 1e-8 for value in moved.values())
    probe = trainer_of()
    batch = probe.collect()
    with torch.no_grad():
        for name, parameter in probe.policy.net.named_parameters():
            parameter.copy_(between[name])
    meter = Meter()
    with meter.listening():
        rng = probe.update._rng(batch, 0).fold(0)
        probe.update.improve(batch, batch.rollout, rng, False, meter)
    same(fast, probe.policy.weights.full())
    assert trainer.update.step == 3


def test_micro_batches_change_nothing_and_plain_steps_follow():
    options = {"slow_fast": SlowFast(fast_steps=2, iterations=1), "iterations": 3}
    make = partial(trained, **options)
    _, one, trainer = make(micro=3)
    _, two, _ = make(micro=16)
    same(one, two)
    assert trainer.update.step == 3
    trainer.iterate()
    assert trainer.update.step == 4
    assert arithmetic(trainer.options).total_steps == 3 + 2
