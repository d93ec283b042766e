import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from mmrl import advantages
from mmrl.advantages.group import group
from mmrl.config.options import TrainOptions
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter, observe
from mmrl.core.weights import Weights
from mmrl.objectives import PolicyGradient
from mmrl.objectives.contracts import TracksOld
from mmrl.scoring import Scorer
from mmrl.train import logprob_gate
from mmrl.train.minibatches import batches
from mmrl.train.optimizers import adamw, sgd
from mmrl.train.trainer import Trainer
from mmrl.train.update import ema_decay, lr_factor
from samplers.noise import Rng
from tests.fixtures import toys
from tests.fixtures.records import make_rollout


def make_trainer(
    family="flow",
    reward=toys.reward,
    lr=3e-3,
    clip=0.2,
    kl=0.0,
    advantage=None,
    policy=None,
    objective=None,
    optimizer=None,
    prompts=None,
    **options,
):
    sizes = {
        "prompts_per_iteration": 8,
        "group_size": 8,
        "train_batch_size": 32,
        "iterations": 60,
        "micro_batch_size": 16,
    } | options
    return Trainer(
        policy or toys.make(family),
        toys.prompts(16) if prompts is None else prompts,
        Scorer({"toy": reward}),
        advantage or advantages.flow_grpo,
        objective or PolicyGradient(clip_range=clip, kl=kl),
        optimizer or partial(adamw, lr=lr),
        TrainOptions(**sizes),
    )


@pytest.mark.parametrize("family", toys.POLICIES)
def test_the_first_step_is_on_policy(family):
    metrics = make_trainer(family, kl=0.1, train_batch_size=64, precision="bf16").iterate()
    assert metrics["ratio/max_deviation"] == 0.0
    assert metrics["clip_fraction"] == 0.0 and metrics["kl"] == 0.0 and metrics["grad_norm"] > 0


def test_the_gate_stops_a_run_whose_network_is_random():
    torch.manual_seed(0)  # of dropout, which may leave out both numbers of a sample twice
    policy = toys.make("flow")
    policy.net.append(nn.Dropout(0.5))
    policy.net.train()
    with pytest.raises(UserError, match="iteration 0: re-scored .*tolerance = 1e-06 .* dropout"):
        make_trainer(policy=policy).iterate()
    make_trainer(policy=policy, logprob_tolerance=None).iterate()


@pytest.mark.parametrize(
    ("family", "network", "precision", "factor"),
    [
        ("flow", "velocity", "fp32", 1.1),
        ("flow", "velocity", "bf16", 1.1),
        ("causal", "logits", "fp32", 1.1),
        ("causal", "logits", "bf16", 3.0),
    ],
)
def test_the_gate_stops_an_update_by_another_network_than_the_samplers(
    family, network, precision, factor
):
    """The ratio of the first step cannot show it: it is 1 there."""
    wrong = toys.off_by(toys.make(family), network, factor)
    with pytest.raises(UserError, match="re-scored log-probs differ"):
        make_trainer(family, policy=wrong, precision=precision).iterate()
    wrong = toys.off_by(toys.make(family), network, 1.1)
    trainer = make_trainer(family, policy=wrong, train_batch_size=64, logprob_tolerance=None)
    metrics = trainer.iterate()
    assert metrics["ratio/mean"] == 1.0 and metrics["ratio/max_deviation"] > 1e-3


def guided(scale, logprob_guidance):
    policy = toys.ToyGuided()
    policy.guidance_scale, policy.logprob_guidance = scale, logprob_guidance
    return policy


@pytest.mark.parametrize(
    ("policy", "clip", "precision", "allowed"),
    [
        # Gaussian decisions: a tenth of the clip, of which published ones go down to 2e-6
        (toys.make("flow"), 1e-3, "fp32", 1e-6),
        (toys.make("flow"), [2e-6, 1e-3], "bf16", 2e-7),
        (toys.make("flow", logprob_reduction="sum"), 0.2, "bf16", 2e-6),
        # z_u + s (z_c - z_u) has two rounding errors, s and 1 - s times as large
        (toys.make("causal"), 0.2, "bf16", 6e-2),
        (guided(1.0, "guided"), 0.2, "fp32", 1e-4),
        (guided(5.0, "guided"), 0.2, "bf16", 6e-2 * 41**0.5),
        (guided(5.0, "conditional"), 0.2, "bf16", 6e-2),
    ],
)
def test_the_gap_that_the_gate_allows(policy, clip, precision, allowed):
    options = make_trainer(precision=precision).options
    objective = PolicyGradient(clip_range=clip)
    assert logprob_gate.tolerance(options, policy, objective) == pytest.approx(allowed)
    options = replace(options, logprob_tolerance=0.5)
    assert logprob_gate.tolerance(options, policy, objective) == 0.5


def test_unscored_samples_leave_training_and_flat_groups_teach_nothing():
    def reward(media, prompts):
        found = toys.reward(media, prompts).clone()
        # one sample without a reward, one group of equal rewards
        found[0], found[8:16] = math.nan, 0.5
        return found

    trainer = make_trainer(reward=reward)
    rollout = trainer.collect().rollout
    assert not rollout.mask[0].any() and rollout.mask[1:].all()
    assert rollout.advantage[8:16].abs().max() == 0 and rollout.advantage.isfinite().all()
    metrics = trainer.iterate()
    assert metrics["samples/excluded"] == metrics["groups/flat"] == 1
    assert metrics["groups/total"] == 8


def test_steps_without_a_lesson_or_with_an_infinite_gradient_are_skipped():
    flat = partial(group, zero_variance_groups="drop")
    metrics = make_trainer(reward=toys.equal_reward, advantage=flat).iterate()
    assert metrics["skipped_steps"] == 2 and metrics["step"] == 0
    trainer = make_trainer()
    loss = trainer.objective.loss
    trainer.objective.loss = lambda policy, point: loss(policy, point) * math.inf
    before = trainer.policy.weights.full()
    assert trainer.iterate()["skipped_steps"] == 2
    for name, value in trainer.policy.weights.full().items():
        assert torch.equal(value, before[name])


def test_the_moving_average_is_flow_grpos():
    """EMAModuleWrapper of Flow-GRPO (Liu et al. 2025): decay 0.9 every 8 steps, the parameter equal
    to the step."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    weights = Weights(module)
    found = []
    weights.keep("ema")
    for step in range(32):
        nn.init.constant_(module.weight, step)
        if (step + 1) % 8 == 0:
            weights.track("ema", ema_decay(step, 0.9))
            found.append((step, ema_decay(step, 0.9), float(weights.full("ema")["weight"])))
    expected = [
        (7, 0.470588, 3.705883),
        (15, 0.64, 7.771765),
        (23, 0.727273, 11.92492),
        (31, 0.780488, 16.112133),
    ]
    assert found == [pytest.approx(line, abs=2e-5) for line in expected]


def test_the_moving_average_follows_the_steps_that_were_taken():
    """The average again from the weights after each optimizer step: decay min(limit, (1 + n) / (10
    + n)) at step n."""
    trainer = make_trainer(ema=0.25, ema_update_interval=2, policy=toys.make("flow", double=True))
    average = trainer.policy.weights.full()
    history = []
    step = trainer.update.optimizer.step

    def noted():
        step()
        history.append(trainer.policy.weights.full())

    trainer.update.optimizer.step = noted
    for _ in range(3):
        trainer.iterate()
    assert len(history) == 6
    for n, weights in enumerate(history):
        if n % 2:
            decay = min(0.25, (1 + n) / (10 + n))  # 1/10, 2/11, 3/12, then the limit
            average = {
                name: decay * old + (1 - decay) * weights[name] for name, old in average.items()
            }
    for name, value in trainer.policy.weights.full("ema").items():
        torch.testing.assert_close(value, average[name], atol=1e-12, rtol=0)


def by_hand(trainer, reduction, constant):
    """Loss, gradient norm and weights after one step of gradient descent on all rows of an
    iteration."""
    rollout = trainer.collect().rollout
    policy = trainer.policy
    lr = trainer.update.lrs[0]
    most = trainer.options.max_grad_norm
    decisions = rollout.mask.sum()
    rows = len(rollout)
    total = {
        "token_mean": decisions,
        "seq_mean_token_mean": rollout.mask.any(1).sum(),
        "seq_mean_token_mean_all": rows,
        "seq_mean_token_sum_norm": rows,
        "token_sum": 1,
    }
    loss = 0.0
    for point in policy.path(rollout):
        logp = policy.dist(point).log_prob(point.target)
        share = 1.0 if reduction == "token_mean" else 1 / (constant or rollout.mask.shape[1])
        if reduction in ("seq_mean_token_mean", "seq_mean_token_mean_all"):
            share = 1 / point.num_decisions[:, None]
        surrogate = -point.advantage.clamp(-5, 5) * (logp - logp.detach()).exp()
        loss = loss + torch.where(point.mask, surrogate * share, 0.0).sum() / total[reduction]
    weights = policy.weights.parameters()
    gradients = torch.autograd.grad(loss, list(weights.values()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    scale = lr * min(1.0, most / (float(norm) + 1e-6))
    moved = {
        name: (w - scale * g).detach()
        for (name, w), g in zip(weights.items(), gradients, strict=True)
    }
    return float(loss.detach()), float(norm), int(decisions), moved


def shifted(rewards, rollout):
    """An advantage whose mean is not 0, so that the loss is not either."""
    return advantages.dr_grpo(rewards, rollout) + 0.25


@pytest.mark.parametrize(
    ("reduction", "constant"),
    [
        ("token_mean", None),
        ("seq_mean_token_mean", None),
        ("seq_mean_token_mean_all", None),
        ("seq_mean_token_sum_norm", None),
        ("seq_mean_token_sum_norm", 3),
        ("token_sum", None),
    ],
)
def test_an_iteration_is_one_step_down_the_mean_loss(reduction, constant):
    """By hand from what was sampled: the loss, its gradient, clipped, and the learning rate."""
    expected, trained = (
        make_trainer(
            policy=toys.make("causal", double=True),
            advantage=shifted,
            optimizer=partial(sgd, lr=0.5),
            train_batch_size=64,
            micro_batch_size=5,
            loss_agg_mode=reduction,
            loss_denominator=constant,
            max_grad_norm=0.01,
        )
        for _ in range(2)
    )
    loss, norm, decisions, weights = by_hand(expected, reduction, constant)
    metrics = trained.iterate()
    assert metrics["loss"] == pytest.approx(loss, rel=2e-7)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=2e-7)
    assert metrics["decisions"] == decisions and metrics["lr"] == 0.5
    assert metrics["step"] == 1 and metrics["skipped_steps"] == 0
    assert metrics["forwards"] == trained.policy.report.forwards and trained.iteration == 1
    assert all(metrics[f"time/{name}"] > 0 for name in ("rollout", "reward", "update"))
    for name, value in trained.policy.weights.full().items():
        torch.testing.assert_close(value, weights[name], atol=1e-9, rtol=1e-6)


def test_the_learning_rate_follows_its_schedule_step_by_step():
    trainer = make_trainer(lr=0.01, warmup_steps=3, lr_schedule="linear", iterations=4)
    rates = [trainer.iterate()["lr"] for _ in range(4)]
    assert rates == pytest.approx([0.005, 0.01, 0.006, 0.002]) and trainer.update.step == 8
    for schedule, half, end in (("constant", 1, 1), ("linear", 0.5, 0), ("cosine", 0.5, 0)):
        factors = [lr_factor(schedule, step, 4, 40) for step in (0, 3, 4, 22, 40)]
        assert factors == pytest.approx([0.2, 0.8, 1, half, end])


def test_lagging_weights_follow_after_the_iteration():
    class Lagging(PolicyGradient, TracksOld):
        def old_decay(self, step):
            return step / 8

    trainer = make_trainer(policy=toys.make("flow", double=True), objective=Lagging())
    trainer.policy.weights.keep("old")
    before = trainer.policy.weights.full("old")
    trainer.iterate()  # two steps
    old, live = (trainer.policy.weights.full(name) for name in ("old", "live"))
    for name in old:
        torch.testing.assert_close(
            old[name], 0.25 * before[name] + 0.75 * live[name], atol=1e-12, rtol=0
        )


def test_an_objective_adapts_after_every_iteration_and_data_are_watched_before():
    trainer = make_trainer()
    seen = []
    objective = trainer.objective
    objective.state_dict = dict
    objective.load_state_dict = dict
    objective.adapt = lambda iteration, metrics: seen.append(
        (iteration, metrics["step"], metrics["reward/mean"])
    )

    def monitor(sampled):
        seen.append((len(sampled.media), sampled.rollout.advantage.shape, sorted(sampled.shaped)))
        return {}

    trainer.monitors.append(monitor)
    means = [trainer.iterate()["reward/mean"] for _ in range(2)]
    shown = (64, (64, 1), ["toy"])
    assert seen == [shown, (0, 2, means[0]), shown, (1, 4, means[1])]


@pytest.mark.parametrize(
    ("adjacent", "batch_size", "whole"), [(True, 16, True), (True, 4, False), (False, 16, False)]
)
def test_policies_that_share_prefixes_get_whole_groups_where_they_fit(adjacent, batch_size, whole):
    policy = toys.make("causal")
    policy.keep_groups_together = adjacent
    trainer = make_trainer(policy=policy, train_batch_size=batch_size, micro_batch_size=None)
    counts = []
    points = trainer.objective.points
    trainer.objective.points = lambda policy, rollout, rng: (
        counts.extend(rollout.group.bincount(minlength=8).tolist()) or points(policy, rollout, rng)
    )
    trainer.iterate()
    assert (set(counts) == {0, 8}) == whole and sum(counts) % 64 == 0


def test_answers_grow_longer_when_it_is_time():
    policy = toys.ToyLimited()
    trainer = make_trainer(policy=policy, max_new_tokens_schedule=((1, 5), (3, 7)))
    for _ in range(5):
        trainer.iterate()
    assert policy.limits == [5, 5, 7, 7]
    with pytest.raises(UserError, match="max_new_tokens_schedule: ToyFlow writes no answers"):
        make_trainer(max_new_tokens_schedule=((1, 5),))


def test_a_row_stays_when_one_of_its_decisions_does():
    """NaN takes single decisions out of training; a row without any leaves it altogether."""

    def partly(rewards, rollout):
        advantage = torch.ones(rollout.mask.shape)
        advantage[0], advantage[1, 2:], advantage[2, 0] = math.nan, math.nan, math.nan
        return advantage

    trainer = make_trainer(advantage=partly)
    rollout = trainer.collect().rollout
    assert rollout.trainable.tolist() == [False] + [True] * 63
    mask = torch.ones(64, rollout.mask.shape[1], dtype=torch.bool)
    mask[0], mask[1, 2:], mask[2, 0] = False, False, False
    stochastic = rollout.mask[3]
    assert torch.equal(rollout.mask, mask & stochastic) and torch.equal(
        rollout.advantage, mask.float()
    )


def rows(first=0, prompts=6, copies=8):
    row = torch.arange(first * copies, (first + prompts) * copies)
    empty = torch.zeros(len(row), 1)
    return make_rollout(
        group=(row // copies) - first, row_id=row, sample=empty, logprob=empty, mask=empty > 0
    )


@pytest.mark.parametrize("size", [1, 6, 12, 24, 48])
def test_batches_partition_the_rows_alike_on_any_number_of_processes(size):
    rng = Rng.of("shuffle")
    whole = [b.row_id.tolist() for b in batches(rows(), [8] * 6, 48 // size, rng)]
    assert sorted(sum(whole, [])) == list(range(48)) and all(len(b) == size for b in whole)
    halves = [
        [b.row_id.tolist() for b in batches(rows(first, 3), [8] * 6, 48 // size, rng)]
        for first in (0, 3)
    ]
    for one, left, right in zip(whole, *halves, strict=True):
        assert set(one) == set(left) | set(right)
        if size % 6 == 0:
            assert len(left) == len(right), "every step has as many rows of every group"


def test_the_meter_hears_only_what_is_masked_in():
    meter = Meter()
    observe("x", torch.full((1, 1), 9.0))
    with meter.listening():
        observe(
            "x",
            torch.tensor([[1.0, -5.0], [3.0, 100.0]]),
            torch.tensor([[True, True], [True, False]]),
        )
        observe("x", torch.tensor([[1.0]]))
    assert meter.mean("x") == 0.0 and meter.top("x") == 5.0 and math.isnan(meter.mean("y"))
    assert distributed.world() == (0, 1)


@pytest.mark.parametrize("family", ["flow", "causal"])
def test_every_decision_is_scored_again_in_its_own_place(family):
    """A sampler that records something else is mended, or stopped by the gate; what is not trained
    on keeps its own."""
    wrong = toys.misremembers(toys.make(family), 0.25)
    trainer = make_trainer(
        family, policy=wrong, recompute_old_logprob=True, logprob_tolerance=1.0, train_batch_size=64
    )
    batch = trainer.collect()
    rollout = batch.rollout
    mask = rollout.mask.clone()
    mask[:3] = False
    batch = replace(batch, rollout=rollout.replace(mask=mask))
    rescored = trainer.update.recompute_old_logprob(batch, Meter())
    found = rescored.rollout.logprob - rollout.logprob
    torch.testing.assert_close(found, torch.where(mask, 0.25, 0.0), atol=1e-5, rtol=0)
    metrics = trainer.iterate()
    assert metrics["ratio/max_deviation"] == pytest.approx(math.expm1(0.25), abs=1e-4)
    assert metrics["time/old_log_prob"]
    trainer.update.options = replace(trainer.options, logprob_tolerance="auto")
    with pytest.raises(UserError, match="re-scored log-probs differ"):
        trainer.iterate()
