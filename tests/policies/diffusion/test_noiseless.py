"""Runs whose steps draw no noise are refused in one sentence if the objective trains on such steps;
evaluation, drawing and objectives of finished samples need none."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.policies.base import RolloutContext
from mmrl.zoo.objectives import DPO
from samplers.kernels import flow_ddim
from samplers.noise import Rng
from samplers.windows import random_window, window
from tests.fixtures import toys
from tests.policies.diffusion.test_any_pipeline import (
    PROMPTS,
    RNG,
    assert_on_policy,
    make,
    trainer_of,
)

load_built_in()
SIZE = {"height": 16, "width": 16}
DECISIONS = RolloutContext(reads="decisions")


def begun(strength=0.25, **options):
    """A pipeline that begins on the way of four steps, by DDIM, whose last step has no noise."""
    call = SIZE | {"strength": strength}
    return make("z_image-from", call, sde_type=flow_ddim, noise_level=1.0, **options)


def test_a_strength_that_leaves_ddim_one_step_is_refused_for_what_reads_decisions():
    policy = begun()
    assert policy.steps == 1
    with pytest.raises(UserError, match="policy options steps and noise_level: the objective n"):
        trainer_of(policy).iterate()
    for context in (RolloutContext(), RolloutContext(reads="sample")):
        with torch.no_grad():
            assert not policy.rollout(PROMPTS, 2, RNG, context).mask.any()
    with torch.no_grad(), policy.evaluating():
        assert policy.rollout(PROMPTS, 2, RNG, DECISIONS).sample.isfinite().all()
    assert_on_policy(begun(0.5))


def flow(**options):
    return toys.make("flow", steps=3, **options)


def none(steps, iteration, rng):
    return torch.zeros(steps, dtype=torch.bool)


def test_a_level_or_a_window_without_noise_is_refused():
    last = {"sde_type": flow_ddim, "noise_window": partial(window, start=-1)}
    for options in ({"noise_level": 0.0}, last, {"noise_window": none}):
        with pytest.raises(UserError, match="of which this policy has none: give it a stochastic"):
            flow(**options).rollout(toys.prompts(2), 2, RNG, DECISIONS)


def test_a_window_that_holds_a_step_with_noise_is_trained():
    """Also one that moves, by DDIM, whose last step has none."""
    policy = flow(sde_type=flow_ddim, noise_window=partial(random_window, size=2))
    for iteration in range(4):
        context = RolloutContext(iteration, reads="decisions")
        rollout = policy.rollout(toys.prompts(2), 2, Rng.of("x", iteration), context)
        assert rollout.mask.any(1).all()


def test_a_loss_of_groups_by_denoising_errors_reads_finished_samples():
    """Its class trains on decisions; built with draws of fresh noise it trains on none."""
    by_errors, by_path = DPO(num_noise_draws=2), DPO()
    assert by_errors.requires.states_read() == "sample"
    assert by_path.requires.states_read() == "decisions"
    policy = flow(noise_level=0.0)
    context = RolloutContext(reads=by_errors.requires.states_read())
    rollout = policy.rollout(toys.prompts(2), 2, RNG, context)
    assert rollout.latents.states.shape[1] == 0 and rollout.sample.isfinite().all()
