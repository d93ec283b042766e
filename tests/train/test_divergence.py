"""Weights that diverge are named where an iteration fails because of them."""

import pytest
import torch

from mmrl.core.errors import UserError
from tests.train.test_trainer import make_trainer


def failing(family, error):
    """A trainer after an iteration, whose next one fails, and a weight of it."""

    def fails(*_):
        raise RuntimeError(error)

    trainer = make_trainer(family)
    trainer.iterate()
    trainer.collect = fails
    return trainer, *next(iter(trainer.policy.weights.parameters().items()))


@pytest.mark.parametrize(("family", "value"), [("flow", torch.nan), ("causal", 1e20)])
def test_the_weight_and_its_iteration_are_named(family, value):
    trainer, name, weight = failing(family, "index 1 is out of bounds")
    with torch.no_grad():
        weight.flatten()[0] = value
    with pytest.raises(UserError, match=f"{name} is not finite or far too large since iteration 1"):
        trainer.iterate()


def test_what_fails_for_another_reason_says_so_and_a_weight_that_recovers_is_not_blamed():
    trainer, _, weight = failing("causal", "of the disk")
    with pytest.raises(RuntimeError, match="of the disk"):
        trainer.iterate()
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        trainer.divergence.look(3)
        assert "since iteration 3" in trainer.divergence.cause()
        weight.copy_(before)
    trainer.divergence.look(4)
    assert trainer.divergence.cause() is None
