"""Objectives that see whole groups, and snapshots that follow slowly."""

from functools import partial

import pytest
import torch

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.objectives import frozen
from mmrl.objectives.contracts import Couples, TracksOld
from mmrl.scoring import Scorer
from mmrl.train.minibatches import batches
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from samplers.noise import Rng
from tests.fixtures import toys
from tests.train.test_trainer import rows


class GroupWeighted(Couples, TracksOld):
    """Every row's denoising error, weighted by a number that depends on its whole group."""

    snapshots = ("ref",)

    def old_decay(self, step):
        return 0.0

    def points(self, policy, rollout, rng):
        return policy.renoise(rollout, rng, shared=True)

    def couples(self, policy):
        return "groups"

    def measure(self, policy, point):
        return frozen(policy, "ref", point).log_prob(point.target)

    def couple(self, point, measured):
        sums = torch.zeros(int(point.group.max()) + 1, 1, dtype=measured.dtype).index_add(
            0, point.group, measured
        )
        return point.replace(advantage=torch.sigmoid(sums[point.group]) * point.advantage)

    def loss(self, policy, point):
        return -point.advantage * policy.dist(point).log_prob(point.target)


def trainer_of(micro, **options):
    policy = toys.make("flow", double=True)
    sizes = {
        "prompts_per_iteration": 4,
        "group_size": 4,
        "train_batch_size": 8,
        "iterations": 3,
        "micro_batch_size": micro,
    } | options
    return Trainer(
        policy,
        toys.prompts(4),
        Scorer({"toy": toys.reward}),
        advantages.dance_grpo,
        GroupWeighted(),
        partial(adamw, lr=1e-3),
        TrainOptions(**sizes),
    )


def test_micro_batches_do_not_cut_a_group_apart():
    runs = []
    for micro in (8, 3, 1):
        trainer = trainer_of(micro)
        for _ in range(2):
            trainer.iterate()
        runs.append(trainer.policy.weights.full())
    for weights in runs[1:]:
        for name, value in runs[0].items():
            torch.testing.assert_close(value, weights[name], atol=1e-10, rtol=0)


def test_a_batch_size_that_cuts_groups_is_refused():
    with pytest.raises(
        UserError, match=r"train.train_batch_size 2.*multiple of train.group_size 4"
    ):
        trainer_of(None, train_batch_size=2)


@pytest.mark.parametrize("size", [8, 16, 24, 48])
def test_whole_groups_share_a_step_on_any_number_of_processes(size):
    deal = partial(batches, sizes=[8] * 6, steps=48 // size, rng=Rng.of(0), whole_groups=True)
    whole = [b.row_id.tolist() for b in deal(rows())]
    assert sorted(sum(whole, [])) == list(range(48)) and all(len(b) == size for b in whole)
    for step in whole:
        assert all(sum(r // 8 == group for r in step) in (0, 8) for group in range(6))
    halves = [[b.row_id.tolist() for b in deal(rows(first, 3))] for first in (0, 3)]
    for step, left, right in zip(whole, *halves):
        assert set(step) == set(left) | set(right)


@pytest.mark.parametrize("family", toys.POLICIES)
def test_shared_renoising_is_shared_inside_a_group_only(family):
    policy = toys.make(family)
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(4), 8, Rng.of(0))
    time = torch.full((32,), 0.5, dtype=torch.float64)
    (point,) = policy.renoise(rollout, Rng.of(1), time, shared=True)
    if family == "causal":
        return  # nothing is re-noised
    if family == "masked":
        hidden = (point.state == policy.mask_id).view(4, 8, -1)
        assert (
            torch.equal(hidden, hidden[:, :1].expand_as(hidden))
            and len(hidden[:, 0].unique(dim=0)) > 1
        )
        return
    noise = (point.target + rollout.sample).view(4, 8, -1)
    torch.testing.assert_close(noise, noise[:, :1].expand_as(noise))
    assert len(noise[:, 0].unique(dim=0)) == 4 and torch.equal(point.time, time.to(point.time))
    torch.testing.assert_close(point.state, rollout.sample + 0.5 * point.target)


def test_the_old_snapshot_follows_at_its_own_pace():
    trainer = trainer_of(None)
    trainer.objective.old_decay = lambda step: 0.75
    trainer.policy.weights.keep("old")
    before = trainer.policy.weights.full("old")
    trainer.iterate()
    live, old = (trainer.policy.weights.full(name) for name in ("live", "old"))
    for name, value in old.items():
        torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * live[name])
