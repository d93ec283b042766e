"""Guard, Flow-DPPO and the objectives of the forward process: published numbers, gradients, where
they look, and what must not change a run.

Where a vector's inputs were not written down, they are found from its outputs: several published
numbers agree with one simple set of inputs.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import logsigmoid

from mmrl.advantages import flow_grpo
from mmrl.core import registry
from mmrl.core.distributions import Gaussian
from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter
from mmrl.core.registry import TIMES
from mmrl.core.types import Point
from mmrl.objectives import frozen
from mmrl.objectives.forward_process import comparisons, error, noised
from mmrl.objectives.surrogates import clip
from mmrl.objectives.timestep_samplers import early_steps, logit_normal, steps, uniform
from mmrl.train.minibatches import batches
from mmrl.zoo.objectives import (
    AWM,
    DGPO,
    NFT,
    DiffusionDPO,
    FlowDPPO,
    Guard,
    RewardWeightedRegression,
)
from mmrl.zoo.objectives.forward_process.awm import SCORES
from mmrl.zoo.objectives.grpo_guard import normalised
from mmrl.zoo.objectives.preference import pairs
from mmrl.zoo.objectives.trust_region import gated
from samplers.noise import Rng
from tests.fixtures import toys
from tests.objectives.velocities import Velocities, column, measured_loss, renoised, table
from tests.train.test_trainer import rows as rows_of

registry.load_built_in()

MAKES = {
    "dgpo": partial(DGPO, beta=5.0, kl=0.001),
    "nft": NFT,
    "awm": AWM,
    "diffusion_dpo": partial(DiffusionDPO, beta=10.0, num_noise_draws=4),
    "rwr": partial(RewardWeightedRegression, beta=0.3, num_noise_draws=2),
    "grpo_guard": partial(Guard, clip_range=1e-2),
    "flow_dppo": partial(FlowDPPO, threshold=1e-2),
}
ON_PATH = ("grpo_guard", "flow_dppo")  # the others need no noise on the path


def off_by(*rows, advantage=None):
    """A re-noised point, and the velocity that misses its target by these rows."""
    miss = table(*rows)
    groups = [i // 2 for i in range(len(rows))]
    point = renoised(column(*[0.0] * len(rows)) if advantage is None else advantage, 0.6, 0.5)
    return point.replace(group=torch.tensor(groups)), point.target + miss


# Published numbers


def test_guards_ratio_is_that_of_published_code():
    """GRPO-Guard (Wang et al. 2025), its published formula: log-ratios 0.0009 and -0.0019; mean
    squares of mu - mu_old 1e-4 and 2e-4."""
    std = torch.full((2, 1), 1.21243548 * 0.5, dtype=torch.float64)
    moved = table([0.01, 0.01], [0.02, 0.0])
    old = Gaussian(torch.zeros_like(moved), std)
    new = Gaussian(moved, std)
    bias = new.kl(old)
    assert bias.flatten().tolist() == pytest.approx([1.3605e-4, 2.7211e-4], abs=1e-8)
    published = column(-0.765 + 0.7659, -0.869 + 0.8671)
    # such an x' has this log-ratio
    scale = ((published + bias) * std**2 / moved.square().mean(1, keepdim=True)) * moved
    gap = new.log_prob(scale) - old.log_prob(scale)
    torch.testing.assert_close(gap, published, atol=1e-12, rtol=0)
    log_ratio = normalised(new, old, scale)
    torch.testing.assert_close(log_ratio, (published + bias) * std)
    assert log_ratio.exp().flatten().tolist() == pytest.approx([1.00062823, 0.9990136], abs=1e-7)
    loss = clip(log_ratio.exp(), column(1.0, -1.0), 2e-6, None).flatten().tolist()
    assert loss == pytest.approx([-(1 + 2e-6), 1 - 2e-6], abs=1e-12), "both are out of range"


def test_flow_dppo_drops_what_leaves_the_trust_region():
    """Flow-DPPO as _flowdppo_kl_adv_loss of UniRL returns it."""
    log_ratio = table([0.002, 0.003, -0.004], [-0.002, -0.003, 0.004])
    advantage = table([1.0, 1, 1], [-0.5, -0.5, 2])
    kl = table([1.39e-6, 5e-5, 2.2e-7]).expand(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    with Meter().listening() as meter:
        loss = gated(1e-5, log_ratio, torch.zeros_like(log_ratio), advantage, kl, mask)
    expected = table([-1.002002, 0, -0.99600798], [0.499001, 0, -2.00801611])
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)
    assert meter.mean("clip_fraction") == pytest.approx(1 / 3)
    back = gated(1e-5, -log_ratio, torch.zeros_like(log_ratio), advantage, kl, mask)
    assert (back[:, 1] != 0).all(), "a step back towards the old policy is never dropped"


def test_dgpos_weights_loss_and_gradient_are_those_of_published_code():
    """DGPO (Luo et al. 2025), compute_group_dgpo_loss: group scores -1.4625 and 0.065625, beta 100,
    groups of 2.

    The errors are chosen to have these scores, the first row's and the total loss's also to have
    the published values.
    """
    first = (-0.12, 0.12, -0.12, -0.24)  # d = 0.0252
    w = torch.tensor([-1.4625, 0.06562503], dtype=torch.float64).sigmoid()
    assert w.tolist() == pytest.approx([0.18808524, 0.5164004], abs=1e-7)
    last = (0.00021994 * 4 - float(w[0]) * (0.0252 - 0.02)) / float(w[1])  # A = 1, -1 in each group
    errors = [0.0252, 0.02, 0.01 + last, 0.01]
    # of the reference: 50 (0.0252 - ...) = -1.4625
    off = [0.0252 + 0.02925, 0.02, errors[2] - 0.06562503 / 50, 0.01]
    miss, ref = ([(d**0.5,) * 4 for d in each] for each in (errors, off))
    point, v = off_by(first, *miss[1:], advantage=column(1, -1, 1, -1))
    policy = Velocities(live=v.requires_grad_(), ref=point.target + table(*ref), old=v.detach())
    objective = DGPO(kl=0.0, beta=100.0)
    with torch.no_grad():
        coupled = objective.couple(point, objective.measure(policy, point))
    expected = w.repeat_interleave(2) * torch.tensor([1.0, -1, 1, -1])
    torch.testing.assert_close(coupled.coupling.advantage[:, 0], expected, atol=1e-7, rtol=0)
    loss = objective.loss(policy, coupled).mean()
    assert loss.item() == pytest.approx(0.00021994, abs=1e-9)
    loss.backward()
    published = [-0.00282128, 0.00282128, -0.00282128, -0.00564256]
    assert v.grad[0].tolist() == pytest.approx(published, abs=1e-8)


LIVE = [[0.1, 0.05, 0.02, 0], [0.1, 0.1, 0.05, 0]]  # velocity minus target of two rows
OLD = [[0.05, 0, -0.02, 0.03], [0, 0.02, 0.06, -0.04]]


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 0.23164312), (0.1, 1.24113639)])
def test_nfts_loss_is_that_of_published_code(beta, expected):
    """DiffusionNFT (Zheng et al. 2025), eq. 5, as its published code has it, at t = 0.6, r = 0.7
    and 0.4."""
    point, v = off_by(*LIVE, advantage=column(2.0, -1.0))
    policy = Velocities(live=v, old=point.target + table(*OLD), ref=v)
    loss = NFT(beta=beta).loss(policy, point)
    assert float(loss.mean()) == pytest.approx(expected, abs=2e-6)
    if beta == 1:
        best = NFT().loss(policy, point.replace(advantage=column(5.0, 9.0))) / 5  # r = 1
        worst = NFT().loss(policy, point.replace(advantage=column(-5.0, -9.0))) / 5  # r = 0
        assert best.flatten().tolist() == pytest.approx([0.04552938, 0.05399996], abs=2e-7)
        assert worst.flatten().tolist() == pytest.approx([0.03423528, 0.04819352], abs=2e-7)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_nfts_gradient_at_the_old_policy_is_advantage_times_denoising_error(beta):
    """There both errors are equal and the two pulls differ by 2 r - 1 = A / 5; beta cancels."""
    point, v = off_by(*LIVE, advantage=column(2.0, -1.0))
    policy = Velocities(live=v.requires_grad_(), old=v.detach(), ref=v.detach())
    NFT(beta=beta).loss(policy, point).sum().backward()
    weight = 0.6 * table(*LIVE).abs().mean(1, keepdim=True)
    torch.testing.assert_close(v.grad, point.advantage * 0.36 * 2 * table(*LIVE) / 4 / weight)


PUBLISHED_SCORES = {  # AWMTrainer.compute_weighted_log_prob of Flow-Factory, at t = 0.6
    "uniform": [-0.003225, -0.005625],
    "t": [-0.001935, -0.003375],
    "t2": [-0.001161, -0.002025],
    "huber": [-0.03406746, -0.044994],
    "ghuber": [-0.56434166, -0.64967763],
}


def test_awms_weightings_and_gradient_are_those_of_published_code():
    """AWM (Xue et al. 2025); on policy the gradient is that of the weighted denoising error."""
    point, v = off_by(*LIVE, advantage=column(0.5, -3.0))
    off = error(Velocities(live=v).dist(point), point)
    assert set(SCORES) == set(PUBLISHED_SCORES)
    for weighting, published in PUBLISHED_SCORES.items():
        scores = SCORES[weighting](off, point.time[:, None])
        assert scores.flatten().tolist() == pytest.approx(published, abs=2e-7), weighting
    policy = Velocities(live=v.requires_grad_(), old=v.detach(), ref=v.detach())
    loss, meter = measured_loss(AWM(weighting="t", kl=0.5), policy, point)
    loss.sum().backward()
    torch.testing.assert_close(v.grad, column(0.5, -1.0) * 0.6 * 2 * table(*LIVE) / 4)
    assert meter.mean("ratio") == 1 and meter.mean("clip_fraction") == 0 and meter.mean("kl") == 0


def test_diffusion_dpos_loss_and_gradient_are_those_of_published_code():
    """Diffusion-DPO (Wallace et al. 2024), eq. 14: beta 100, errors 0.31 and 0.42, of the reference
    0.30 and 0.40."""
    root = torch.tensor([0.31, 0.42, 0.3, 0.4], dtype=torch.float64).sqrt()
    point, v = off_by(*[[float(root[i])] * 4 for i in (0, 1)], advantage=column(0.7, -0.2))
    policy = Velocities(live=v.requires_grad_(), ref=point.target + root[2:, None])
    loss, meter = measured_loss(DiffusionDPO(), policy, point)
    assert meter.mean("dpo/loss") == pytest.approx(0.47407698, abs=1e-7)
    assert meter.mean("dpo/right") == 1
    loss.mean().backward()
    w = v.detach().clone().requires_grad_()
    gap = (w - point.target).square().mean(1) - root[2:].square()
    (-logsigmoid(-50 * (gap[0] - gap[1]))).backward()
    torch.testing.assert_close(v.grad, w.grad)


def test_reward_weights_have_mean_one_in_every_group():
    """exp(A / beta) normalised; a row seen at two times is one row."""
    point, _ = off_by(*[[0.1] * 4] * 5, advantage=column(1.0, -1, 0.5, 0.5, 2.0))
    twice = Point.cat([point, point])
    objective = RewardWeightedRegression(beta=2.0)
    weight = objective.couple(twice, objective.measure(None, twice)).coupling.slope
    e = torch.tensor([0.5, -0.5], dtype=torch.float64).exp()
    torch.testing.assert_close(weight[:5], column(*(2 * e / e.sum()).tolist(), 1, 1, 1))
    assert torch.equal(weight[:5], weight[5:])
    raw = RewardWeightedRegression(weights="advantage")
    assert raw.couple(twice, raw.measure(None, twice)) is twice, "the advantage itself weighs"


# Where they look


def sampled(eta=0.0, **options):
    policy = toys.make("flow", double=True, noise_level=eta, **options)
    for name in ("ref", "old"):
        policy.weights.keep(name)
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(3), 4, Rng.of("rollout"))
        for p in policy.net.parameters():
            p.add_(0.01)
    advantage = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    return policy, rollout.replace(advantage=advantage)


def test_times_are_those_of_the_grid_without_repetition():
    policy, rollout = sampled(steps=10)
    grid = policy.times.tolist()
    times = steps(Rng.of(0), rollout.row_id, 4, rollout.latents.time, share=0.9, skip=1)
    rows = [set(row) for row in times.tolist()]
    assert times.shape == (12, 4) and all(len(r) == 4 and r <= set(grid[1:9]) for r in rows)
    assert len({tuple(row) for row in times.tolist()}) > 1
    alike = early_steps(Rng.of(0), rollout.row_id, 4, rollout.latents.time)
    assert torch.equal(alike, alike[:1].expand_as(alike))
    assert set(alike[0].tolist()) <= set(grid[:6])
    every = steps(Rng.of(0), rollout.row_id, 99, rollout.latents.time)
    assert every.shape == (12, 9) and 0.0 not in every, "no more than there are"
    with pytest.raises(UserError, match="share 0.1 and skip 1 leave none of the sampler's 10"):
        steps(Rng.of(0), rollout.row_id, 1, rollout.latents.time, share=0.1, skip=1)


def test_other_times_have_the_distribution_asked_for():
    rows = torch.arange(20_000)
    flat = uniform(Rng.of(1), rows, 2, None, low=0.2, high=0.6)
    assert flat.min() > 0.2 and flat.max() < 0.6
    assert float(flat.mean()) == pytest.approx(0.4, abs=0.01)
    bell = logit_normal(Rng.of(1), rows, 1, None, mean=1.0, std=0.5).logit()
    assert float(bell.mean()) == pytest.approx(1, abs=0.02)
    assert float(bell.std()) == pytest.approx(0.5, abs=0.02)
    assert logit_normal(Rng.of(1), rows, 1, None, shift=3.0).mean() > 0.6
    some = uniform(Rng.of(1), rows[7:9], 2, None)
    assert torch.equal(some, uniform(Rng.of(1), rows, 2, None)[7:9])
    for wrong in (partial(uniform, low=0.5, high=0.5), partial(logit_normal, std=0.0)):
        with pytest.raises(UserError, match="time sampler"):
            wrong(Rng.of(1), rows, 1, None)


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_a_group_shares_times_and_noise(times):
    policy, rollout = sampled()
    points = list(noised(policy, rollout, Rng.of("points"), times, 3, shared=True))
    assert len(points) == 3 and all((point.num_decisions == 3).all() for point in points)
    noises = torch.stack([point.target + rollout.sample for point in points])
    for point, noise in zip(points, noises.view(3, 3, 4, -1)):
        torch.testing.assert_close(noise, noise[:, :1].expand_as(noise))
        assert torch.equal(point.time.view(3, 4), point.time.view(3, 4)[:, :1].expand(3, 4))
    assert (noises[0] - noises[1]).abs().min() > 0, "another draw at every time"
    whole = Point.cat(points)
    assert comparisons(whole).bincount().tolist() == [4] * 9
    shuffled = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    members = comparisons(whole[shuffled])
    assert all(len(set(whole.group[shuffled][members == i].tolist())) == 1 for i in range(9))


@pytest.mark.parametrize(
    ("make", "shares"), [(DGPO, True), (DiffusionDPO, True), (NFT, False), (AWM, False)]
)
def test_preferences_compare_at_one_noise_and_fits_at_many(make, shares):
    policy, rollout = sampled()
    for point in make(num_noise_draws=2).points(policy, rollout, Rng.of("points")):
        noise = (point.target + rollout.sample).view(3, 4, -1)
        assert torch.allclose(noise, noise[:, :1].expand_as(noise)) is shares


def test_pairs_are_the_best_and_the_worst_that_are_left():
    """No pair in a group of equals; an excluded row is in none."""
    _, rollout = sampled()
    advantage = column(0.1, 3, -1, 2, *[0.5] * 4, 5, -5, 1, 0)
    trainable = torch.tensor([True] * 8 + [False, True, True, True])
    chosen = pairs(rollout.replace(advantage=advantage, trainable=trainable))
    assert chosen.nonzero()[:, 0].tolist() == [1, 2, 9, 10]


@pytest.mark.parametrize("make", [DGPO, NFT, AWM, DiffusionDPO, Guard, FlowDPPO])
def test_token_models_are_refused_with_the_reason(make):
    for family in ("masked", "causal"):
        objective, policy = make(), toys.make(family)
        for name in ("old", "ref"):
            policy.weights.keep(name)
        with torch.no_grad():
            rollout = policy.rollout(toys.prompts(2), 2, Rng.of(0))
        rollout = rollout.replace(advantage=column(1, -1, 1, -1).float())
        with pytest.raises(UserError, match="flow and diffusion models"):
            for point in objective.points(policy, rollout, Rng.of(1)):
                objective.loss(policy, point)


# On the path


def test_guards_two_forms_agree_and_steps_are_balanced():
    """log rho = (log-ratio + KL) std; with balance the loss of a step is divided by its length."""
    policy, rollout = sampled(eta=0.7, steps=5)
    for point in policy.path(rollout):
        dist, old = policy.dist(point), frozen(policy, "old", point)
        gap = dist.log_prob(point.target) - old.log_prob(point.target)
        by_likelihood = (gap + dist.kl(old)) * dist.std.flatten(1)
        found = normalised(dist, old, point.target)
        torch.testing.assert_close(found, by_likelihood, atol=1e-12, rtol=1e-9)
        plain = Guard(clip_range=0.1, balance=False).loss(policy, point)
        balanced = Guard(clip_range=0.1, balance=True).loss(policy, point)
        torch.testing.assert_close(balanced, plain * 5)
        with_kl = Guard(clip_range=0.1, balance=False, kl=2.0).loss(policy, point)
        torch.testing.assert_close(with_kl - plain, 2 * dist.kl(frozen(policy, "ref", point)))


def test_flow_dppos_divergence_in_its_three_forms():
    policy, rollout = sampled(eta=0.7, steps=5)
    for k, point in enumerate(policy.path(rollout)):
        kl = {}
        for std in ("exact", "published", "one"):
            with Meter().listening() as meter:
                FlowDPPO(std=std).loss(policy, point)
            kl[std] = meter.mean("kl_old")
        exact = policy.dist(point).kl(frozen(policy, "old", point)).mean()
        assert kl["exact"] == pytest.approx(exact.item(), rel=1e-9)
        t = 1 - k / 5
        published = 0.49 * t / (1 - min(t, 0.99)) / 5
        assert kl["published"] == pytest.approx(kl["one"] / published, rel=1e-9)
        if k:  # at t = 1 the published std is 7, mmrl's 0.7
            assert kl["published"] == pytest.approx(kl["exact"], rel=1e-9)


# Training


def trainer_of(name, double=False, **options):
    policy = toys.make("flow", double, noise_level=0.7 if name in ON_PATH else 0.0)
    sizes = {"group_size": 8, "train_batch_size": 16, "micro_batch_size": 16} | options
    return toys.trainer(policy, MAKES[name](), advantage=flow_grpo, **sizes)


@pytest.mark.parametrize("name", ["dgpo", "nft", "rwr", "grpo_guard"])
def test_micro_batches_change_nothing_and_a_process_without_rows_can_keep_step(name):
    """Such a process passes one row through the network that trains nothing, and so takes part in
    every collective call."""
    runs = [trainer_of(name, double=True, micro_batch_size=micro) for micro in (16, 6)]
    whole, cut = ([one.iterate() for _ in range(2)] and one.policy.weights.full() for one in runs)
    for key, value in whole.items():
        torch.testing.assert_close(value, cut[key], atol=1e-9, rtol=0)
    trainer = runs[0]
    batch = trainer.collect()
    passes = trainer.update.passes
    idle = passes.idle(batch, Rng.of("idle"))
    if passes.coupled:
        passes.couple(batch, [], [idle])
    loss = trainer.objective.loss(trainer.policy, idle)
    assert len(loss) == 1 and loss.isfinite().all() and loss.requires_grad
    assert not idle.mask.any()


@pytest.mark.parametrize("name", ["grpo_guard", "flow_dppo", "awm", "dgpo"])
def test_the_first_step_is_on_policy(name):
    metrics = trainer_of(name, train_batch_size=32, precision="bf16").iterate()
    assert metrics["ratio/mean"] == 1 and metrics["grad_norm"] > 0
    for still in ("clip_fraction", "kl", "kl_old", "ratio/max_deviation"):
        assert metrics.get(still, 0) == 0


def test_old_weights_are_what_each_method_says():
    """NFT samples with them; AWM may stay near a moving average, and DGPO's are one."""
    trainer = toys.trainer("flow", NFT(decay=2))
    assert trainer.snapshots() == ("old", "ref")
    trainer.update.step = 1000
    before = trainer.policy.weights.full("old")
    trainer.iterate()
    live, old = (trainer.policy.weights.full(name) for name in ("live", "old"))
    for name, value in old.items():
        torch.testing.assert_close(value, 0.999 * before[name] + 0.001 * live[name])
    assert DGPO().couples(None) == "groups" and DGPO(behavior_policy="old").behavior_policy == "old"
    assert "ema" in AWM(ema_kl=1.0).snapshots and "ema" not in AWM().snapshots
    with pytest.raises(UserError, match="uses the moving average of the weights: set train.ema"):
        toys.trainer("flow", AWM(ema_kl=1.0))
    trainer = toys.trainer("flow", AWM(ema_kl=1.0), ema=0.3)
    assert [trainer.iterate() for _ in range(2)][1]["kl_ema"] > 0


def test_flat_groups_teach_dgpo_nothing_when_dropped():
    dropping = partial(flow_grpo, zero_variance_groups="drop")
    trainer = toys.trainer("flow", DGPO(), toys.equal_reward, dropping)
    assert trainer.iterate()["skipped_steps"] == 2


# Whole groups


def test_a_batch_size_that_cuts_groups_is_refused():
    says = r"train.train_batch_size 2.*multiple of train.group_size 4"
    with pytest.raises(UserError, match=says):
        toys.trainer("flow", DGPO(), train_batch_size=2)


@pytest.mark.parametrize("size", [8, 16, 24, 48])
def test_whole_groups_share_a_step_on_any_number_of_processes(size):
    deal = partial(batches, sizes=[8] * 6, steps=48 // size, rng=Rng.of(0), whole_groups=True)
    whole = [b.row_id.tolist() for b in deal(rows_of())]
    assert sorted(sum(whole, [])) == list(range(48)) and all(len(b) == size for b in whole)
    for step in whole:
        assert all(sum(r // 8 == group for r in step) in (0, 8) for group in range(6))
    halves = [[b.row_id.tolist() for b in deal(rows_of(first, 3))] for first in (0, 3)]
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
        assert torch.equal(hidden, hidden[:, :1].expand_as(hidden))
        assert len(hidden[:, 0].unique(dim=0)) > 1
        return
    noise = (point.target + rollout.sample).view(4, 8, -1)
    torch.testing.assert_close(noise, noise[:, :1].expand_as(noise))
    assert len(noise[:, 0].unique(dim=0)) == 4 and torch.equal(point.time, time.to(point.time))
    torch.testing.assert_close(point.state, rollout.sample + 0.5 * point.target)
