"""Evaluation in more steps than training takes."""

from functools import partial

import pytest
import torch

from mmrl.core.errors import UserError
from samplers.noise import Rng
from samplers.windows import random_window
from tests.fixtures import toys


def test_evaluation_takes_its_own_steps_and_training_keeps_its_own():
    """The samples are those of a policy that always takes that many steps."""
    fine = toys.make("flow", steps=12)
    coarse = toys.make("flow", steps=4, evaluation_steps=12)
    prompts = toys.prompts(3)
    samples = []
    for policy in (fine, coarse):
        with policy.evaluating(), torch.no_grad():
            rollout = policy.rollout(prompts, 2, Rng.of(3))
        assert rollout.latents.time.shape[1] == 13 and not rollout.mask.any()
        samples.append(rollout.sample)
    assert torch.equal(*samples)
    assert coarse.rollout(prompts, 2, Rng.of(3)).mask.shape[1] == 4


def test_windows_are_of_the_steps_of_training():
    moving = partial(random_window, size=2, stop=6)
    policy = toys.make("flow", steps=6, evaluation_steps=3, noise_window=moving)
    with policy.evaluating(), torch.no_grad():
        assert not policy.rollout(toys.prompts(2), 2, Rng.of(0)).mask.any()
    assert (policy.rollout(toys.prompts(2), 2, Rng.of(0)).mask.sum(1) == 2).all()
    with pytest.raises(UserError, match="evaluation_steps must be at least 1"):
        toys.make("flow", steps=4, evaluation_steps=0)
