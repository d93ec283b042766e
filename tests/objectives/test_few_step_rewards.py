"""Rewards beside few-step distillation: their gradient is that of the objective that follows them
alone, and a student goes where they lead without leaving its teacher."""

from functools import partial

import pytest
import torch

from mmrl import config
from mmrl.config.compatibility import unfit_for_data
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES, OBJECTIVES
from mmrl.core.types import SamplerState, Transition
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.objectives.consistency import Consistency
from mmrl.zoo.objectives.distribution_matching import DistributionMatching
from rewards.card import card
from samplers.noise import Rng
from samplers.windows import between_steps
from tests.experiment.test_resume import resumes
from tests.fixtures import toys
from tests.objectives.test_few_step import Exact, Points, points_of, rows, spread


@card(differentiable=True)
def to_the_right(media, prompts):
    return 0.5 * media[:, 0]


def trainer_of(objective, reward=to_the_right, steps=3, **options):
    policy = Points(steps=steps)
    sizes = {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 16}
    return Trainer(
        policy,
        rows(64),
        Scorer({"any": reward}),
        ADVANTAGES["dance_grpo"],
        objective,
        partial(adamw, lr=3e-3),
        TrainOptions(**sizes | {"iterations": 1, "max_grad_norm": 1.0, "seed": 3} | options),
    )


def teacher():
    return Exact(0.5)


def right(policy, steps):
    """How far to the right of their means a policy's samples lie."""
    policy.evaluation_times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(rows(64), 8, Rng.of("judge"))
    return (rollout.sample - rollout.cond["mean"][rollout.group])[:, 0].mean().item()


# distribution matching


def gradients(objective, **options):
    one = trainer_of(objective, **options)
    batch = one.collect()
    with torch.no_grad():
        for parameter in one.policy.net.parameters():
            parameter.add_(0.02)  # so that ratios are not 1
    return one.update.gradient(batch, batch.rollout)


@pytest.mark.parametrize("micro", [None, 3])
def test_its_gradient_is_the_sum_of_both(micro):
    alone = gradients(DistributionMatching(teacher=teacher))
    rewards = gradients(PolicyGradient(clip_range=0.3))
    mixed = DistributionMatching(teacher=teacher, reward_weight=0.7, clip_range=0.3)
    for both, matching, policy in zip(gradients(mixed, micro_batch_size=micro), alone, rewards):
        torch.testing.assert_close(both, matching + 0.7 * policy, rtol=1e-6, atol=1e-9)
        assert policy.abs().max() > 1e-3 and matching.abs().max() > 1e-3


def test_without_a_weight_nothing_is_changed():
    """To the bit: points, losses, gradients and what is kept."""
    plain = DistributionMatching(teacher=teacher)
    mixed = DistributionMatching(teacher=teacher, reward_weight=0.5)
    policy = Points(steps=3)
    (alone,) = points_of(policy, plain, rows(6))
    matched, *decisions = points_of(policy, mixed, rows(6))
    assert torch.equal(alone.state, matched.state) and type(matched.step) is SamplerState
    assert all(type(point.step) is Transition for point in decisions) and len(decisions) == 2
    assert torch.equal(plain.loss(policy, alone), mixed.loss(policy, matched))
    assert not plain.requires.compares and not plain.requires.visits
    assert mixed.requires.compares and mixed.requires.visits
    assert plain.state_dict() == {} and plain.snapshots == ("fake",) == mixed.snapshots


def test_a_student_goes_where_rewards_lead_and_stays_near_its_teacher():
    def trained(weight):
        chosen = {"reward_weight": weight} if weight else {}
        objective = DistributionMatching(teacher=teacher, fake_steps=3, fake_lr=1e-2, **chosen)
        one = trainer_of(objective, steps=2, prompts_per_iteration=16, train_batch_size=64)
        for _ in range(60):
            metrics = one.iterate()
        return one.policy, metrics

    (plain, _), (led, metrics) = trained(0.0), trained(1.0)
    assert {"fake/error", "dmd/direction", "ratio/mean", "clip_fraction"} <= set(metrics)
    (off, width), (away, kept) = spread(plain, 2), spread(led, 2)
    assert off < 0.2 and 0.3 < width < 0.75 and 0.3 < kept < 0.8, (off, width, kept)
    assert off + 0.2 < right(led, 2) and away < 1.0, (off, away)
    alone = trainer_of(PolicyGradient(), steps=2, prompts_per_iteration=16, train_batch_size=64)
    for _ in range(60):
        alone.iterate()
    assert spread(alone.policy, 2)[0] > 3.0  # nothing holds it


def test_decisions_and_states_without_a_score_are_left_out():
    """And processes with fewer passes of one kind fill them up by that kind."""

    def some(media, prompts):
        return torch.where(media[:, 1] < 0, torch.nan, to_the_right(media, prompts))

    objective = DistributionMatching(teacher=teacher, reward_weight=0.5)
    one = trainer_of(objective, some, max_reward_failure_rate=1.0, micro_batch_size=4)
    one.scorer.max_failures = 1.0
    batch = one.collect()
    alive = batch.rollout.alive()
    assert 0 < alive.sum() < len(alive)
    points = one.update.passes.points(batch.rollout, Rng.of("u"), False)
    count, cut = one.update.passes.cut(batch, points, 4, Rng.of("u"))
    kinds = [type(point.step) for point in cut]
    states = -(-int(alive.sum()) // 4)
    assert kinds == [SamplerState] * states + [Transition] * (count - states)


@pytest.mark.parametrize("make", ["dmd", "consistency"])
def test_a_run_resumes_to_the_bit(make, tmp_path):
    def fresh():
        chosen = {"reward_weight": 0.5} | ({"kl": 0.1} if make == "dmd" else {"num_noise_draws": 2})
        objective = config.build({make: chosen}, OBJECTIVES)
        sizes = {"group_size": 1, "train_batch_size": 4} if make == "consistency" else {}
        return trainer_of(objective, micro_batch_size=3, ema=0.9, precision="bf16", **sizes)

    resumes(fresh, tmp_path)


# consistency


def test_consistency_beside_rewards_by_a_loop():
    """The loss and its gradient: the distance, less beta times the reward of the jump."""
    policy = Points()
    plain = Consistency(teacher=teacher, teacher_steps=10)
    mixed = Consistency(teacher=teacher, teacher_steps=10, reward_weight=0.4)
    mixed.attach(toys.smooth_reward)
    assert mixed.requires.differentiates and not plain.requires.differentiates
    (point,) = points_of(policy, plain, rows(6))
    (same,) = points_of(policy, mixed, rows(6))
    slopes = []
    for objective, at in ((plain, point), (mixed, same)):
        loss = objective.loss(policy, at)
        policy.net.zero_grad()
        loss.sum().backward()
        slopes.append((loss.detach(), [p.grad.clone() for p in policy.net.parameters()]))
    cond = torch.cat([point.time[:, None], policy.encode(rows(6))["mean"][point.group]], 1)
    jump = point.state - point.time[:, None] * policy.net(torch.cat([point.state, cond], 1))
    earned = -(jump - 1).square().mean(1)
    policy.net.zero_grad()
    (-0.4 * earned.sum()).backward()
    (alone, by_distance), (both, together) = slopes
    torch.testing.assert_close(both[:, 0], alone[:, 0] - 0.4 * earned.detach())
    for whole, part, parameter in zip(together, by_distance, policy.net.parameters()):
        torch.testing.assert_close(whole, part + parameter.grad)
        assert parameter.grad.abs().max() > 1e-3


def test_consistency_without_a_weight_is_what_it_was():
    policy = Points()
    plain = Consistency(teacher=teacher)
    (point,) = points_of(policy, plain, rows(6))
    zero = Consistency(teacher=teacher, reward_weight=0.0)
    zero.setup(policy)
    assert torch.equal(plain.loss(policy, point), zero.loss(policy, point))


def test_a_consistency_student_goes_where_rewards_lead():
    def trained(weight):
        objective = Consistency(
            teacher=teacher, teacher_steps=16, target_decay=0.0, reward_weight=weight
        )
        objective.num_noise_draws = 4
        one = trainer_of(
            objective, steps=1, group_size=1, prompts_per_iteration=32, train_batch_size=32
        )
        for _ in range(60):
            metrics = one.iterate()
        return one.policy, metrics

    (plain, _), (led, metrics) = trained(0.0), trained(0.6)
    (off, width), (away, kept) = spread(plain), spread(led)
    assert off < 0.25 and 0.35 < width < 0.65 and 0.35 < kept < 0.7, (off, width, kept)
    assert right(plain, 1) + 0.15 < right(led, 1) and away < 0.6, (off, away)
    assert "reward/differentiated" in metrics


# what does not fit


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dmd": {"clip_range": 0.1}}, "objective.dmd.clip_range: .* set reward_weight"),
        ({"dmd": {"reward_weight": 1.0, "surrogate": "gspo"}}, "dmd.surrogate: .* choose the"),
    ],
)
def test_options_that_do_nothing_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        config.build(options, OBJECTIVES)


def test_a_sampler_without_noise_is_refused():
    objective = DistributionMatching(teacher=teacher, reward_weight=1.0)
    one = trainer_of(objective, steps=1)
    with pytest.raises(UserError, match="none of the sampler's steps draws noise"):
        one.iterate()
    policy = Points(steps=1, noise_window=between_steps)
    assert len(points_of(policy, DistributionMatching(teacher=teacher), rows(4))) == 1


def test_means_over_rows_are_refused():
    train = TrainOptions(
        prompts_per_iteration=4,
        group_size=4,
        train_batch_size=16,
        iterations=1,
        loss_agg_mode="seq_mean_token_mean",
    )
    mixed = DistributionMatching(teacher=teacher, reward_weight=1.0)
    (why,) = unfit_for_data(train, mixed, Points)
    assert why.startswith("train.loss_agg_mode: seq_mean_token_mean, but the objective sums two")
    assert not list(unfit_for_data(train, DistributionMatching(teacher=teacher), Points))


WHOLE = """
policy: {sd3: {path: "world:digits/sd3-test", size: 32, steps: 2, scheduler: lcm}}
data: {digits: {kind: single, pictures: 2}}
reward: {%s: 1.0}
objective: {consistency: {reward_weight: %s}}
optimizer: {adamw: {lr: 1e-3}}
train: {prompts_per_iteration: 4, group_size: 1, train_batch_size: 4, iterations: 1}
"""


def test_rewards_without_a_gradient_are_refused_before_anything_is_loaded(tmp_path):
    from mmrl.experiment.build import read

    (tmp_path / "run.yaml").write_text(WHOLE % ("jpeg_compressibility", 0.1))
    with pytest.raises(UserError, match="reward 'jpeg_compressibility' cannot be used"):
        read(tmp_path / "run.yaml", [])
    for reward, weight in (("jpeg_compressibility", 0.0), ("digits", 0.1)):
        (tmp_path / "run.yaml").write_text(WHOLE % (reward, weight))
        read(tmp_path / "run.yaml", [])
