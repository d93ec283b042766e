"""Weights that diverge are named where an iteration fails because of them."""

import pytest
import torch

from mmrl.core.errors import UserError
from tests.train.test_trainer import make_trainer


def largest_weight(trainer):
    parameters = trainer.policy.weights.parameters()
    return next(iter(parameters)), next(iter(parameters.values()))


@pytest.mark.parametrize(("family", "value"), [("flow", torch.nan), ("causal", 1e20)])
def test_the_weight_and_its_iteration_are_named(family, value):
    trainer = make_trainer(family)
    trainer.iterate()
    name, weight = largest_weight(trainer)
    with torch.no_grad():
        weight.flatten()[0] = value

    def fails(*_):
        raise RuntimeError("index 1 is out of bounds")

    trainer.collect = fails
    with pytest.raises(UserError, match=f"{name} is not finite or far too large since iteration 1"):
        trainer.iterate()


def test_what_fails_for_another_reason_says_so():
    trainer = make_trainer("causal")
    trainer.iterate()

    def fails(*_):
        raise RuntimeError("of the disk")

    trainer.collect = fails
    with pytest.raises(RuntimeError, match="of the disk"):
        trainer.iterate()


def test_a_weight_that_recovers_is_not_blamed():
    trainer = make_trainer("causal")
    watch = trainer.divergence
    watch.look(0)
    _, weight = largest_weight(trainer)
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    watch.look(3)
    assert "since iteration 3" in watch.cause()
    with torch.no_grad():
        weight.copy_(before)
    watch.look(4)
    assert watch.cause() is None
