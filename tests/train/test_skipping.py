"""Rows of advantage 0 are left out of passes; weights after a step stay what they were."""

from functools import partial

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.paths import find_config
from mmrl.core.registry import load_built_in
from mmrl.experiment.build import read
from mmrl.objectives import PolicyGradient
from mmrl.zoo.objectives import AWM, Guard
from tests.fixtures import toys
from tests.train.test_trainer import make_trainer

load_built_in()
CASES = {
    "tokens": ("causal", PolicyGradient, "token_mean"),
    "masked tokens": ("masked", PolicyGradient, "seq_mean_token_mean"),
    "guarded steps": ("flow", Guard, "seq_mean_token_sum_norm"),
    "matching": ("flow", partial(AWM, kl=0.0), "token_mean"),
}


def half_flat(media, prompts):
    """Rewards of which every second group's are all alike."""
    values = toys.reward(media, prompts).double()
    groups = torch.arange(len(values)) // 4
    return torch.where(groups % 2 == 0, values, torch.zeros_like(values))


def trained(family, objective, skip, iterations=2, reward=half_flat, **options):
    """The weights after a few iterations, rows that passed with a gradient, and the trainer."""
    trainer = make_trainer(
        family,
        policy=toys.make(family, double=True),
        objective=objective,
        reward=reward,
        prompts_per_iteration=4,
        group_size=4,
        train_batch_size=8,
        skip_zero_advantage=skip,
        lr=1e-2,
        **options,
    )
    trainer.scored = 0
    dist = trainer.policy.dist

    def counting(point):
        trainer.scored += len(point)
        return dist(point)

    trainer.policy.dist = counting
    for _ in range(iterations):
        trainer.iterate()
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_all_rows(case):
    family, objective, mode = CASES[case]
    whole, less = (
        trained(family, objective(), skip, loss_agg_mode=mode, micro_batch_size=micro)
        for skip, micro in ((False, 8), (True, 2))
    )
    for name, value in whole.policy.weights.full().items():
        torch.testing.assert_close(less.policy.weights.full()[name], value, atol=1e-9, rtol=1e-7)
    assert less.scored < whole.scored


def test_an_iteration_without_a_lesson_is_a_step_of_a_gradient_of_zeros():
    """Adam's moments go on: weights move by what they remember, with and without the rows."""

    def first_only(media, prompts):
        first_only.calls += 1
        values = toys.reward(media, prompts).double()
        return values if first_only.calls <= 1 else torch.zeros_like(values)

    after = []
    for skip in (False, True):
        first_only.calls = 0
        trainer = trained("causal", PolicyGradient(), skip, 3, first_only, micro_batch_size=4)
        after.append(trainer.policy.weights.full())
        assert trainer.update.step == 6
    for name, value in after[0].items():
        torch.testing.assert_close(after[1][name], value, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", ["policy_gradient", "grpo_guard", "masked", "awm", "nft"])
def test_what_moves_rows_of_advantage_0_is_refused(name):
    change = ["train.skip_zero_advantage=true", f"objective={name}"]
    configuration = "digits/mask_grpo" if name == "masked" else "digits/flow_grpo"
    if name in ("policy_gradient", "grpo_guard", "masked"):
        read_named(configuration, change)
        with pytest.raises(UserError, match="objective's kl also moves rows of advantage 0"):
            read_named(configuration, [*change, f"objective.{name}.kl=0.1"])
    elif name == "awm":
        with pytest.raises(UserError, match="objective's kl also moves"):
            read_named(configuration, change)
        read_named(configuration, [*change, "objective.awm.kl=0.0"])
    else:
        with pytest.raises(UserError, match="not proportional to the advantage"):
            read_named(configuration, change)


def read_named(name, changes):
    return read(find_config(name), changes)
