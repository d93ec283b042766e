"""Guard, Flow-DPPO and the objectives of the forward process: published numbers, gradients,
learning.

Where a vector's inputs were not written down, they are found from its outputs: several published
numbers agree with one simple set of inputs.
"""

from functools import partial

import pytest
import torch
from torch.nn.functional import logsigmoid, softplus

from mmrl import advantages
from mmrl.config.options import TrainOptions
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
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
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
from tests.fixtures.records import make_point

registry.load_built_in()

FORWARD = {
    "dgpo": partial(DGPO, beta=5.0, kl=0.001),
    "nft": NFT,
    "awm": AWM,
    "diffusion_dpo": partial(DiffusionDPO, beta=10.0, num_noise_draws=4),
    "rwr": partial(RewardWeightedRegression, beta=0.3, num_noise_draws=2),
}
ON_PATH = {
    "grpo_guard": partial(Guard, clip_range=1e-2),
    "flow_dppo": partial(FlowDPPO, threshold=1e-2),
}


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def off_by(*rows, t=0.6, target=0.5, **fields):
    """A re-noised point, and the velocity that misses its target by these rows."""
    miss = torch.tensor(rows, dtype=torch.float64)  # [B, 4]
    n = len(miss)
    target = torch.full_like(miss, target)
    point = make_point(
        group=torch.arange(n) // 2,
        row_id=torch.arange(n),
        state=torch.zeros_like(miss),
        target=target,
        mask=torch.ones(n, 1, dtype=torch.bool),
        num_decisions=torch.ones(n, dtype=torch.long),
        time=torch.full((n,), t, dtype=torch.float64),
        x0_per_output=torch.full((n,), t, dtype=torch.float64),
        **fields,
    )
    return point, target + miss


class Velocities:
    """A policy that is a table: the velocity under each snapshot, row by row."""

    def __init__(self, **known):
        self.known = known
        self.name = "live"
        self.weights = self

    def using(self, name):
        policy = self
        before = self.name

        class Swap:
            def __enter__(self):
                policy.name = name

            def __exit__(self, *_):
                policy.name = before

        return Swap()

    def dist(self, point):
        v = self.known[self.name][point.row_id]
        return Gaussian(v, torch.full((len(v), 1), 0.5**0.5, dtype=v.dtype))


# published numbers


def test_guards_ratio_is_that_of_published_code():
    """GRPO-Guard (Wang et al. 2025), its published formula: log-ratios 0.0009 and -0.0019; mean
    squares of mu - mu_old 1e-4 and 2e-4."""
    std = torch.full((2, 1), 1.21243548 * 0.5, dtype=torch.float64)
    moved = torch.tensor([[0.01, 0.01], [0.02, 0.0]], dtype=torch.float64)
    old = Gaussian(torch.zeros_like(moved), std)
    new = Gaussian(moved, std)
    bias = new.kl(old)
    assert bias.flatten().tolist() == pytest.approx([1.3605e-4, 2.7211e-4], abs=1e-8)
    published = column(-0.765 + 0.7659, -0.869 + 0.8671)
    # such an x' has this log-ratio
    scale = ((published + bias) * std**2 / moved.square().mean(1, keepdim=True)) * moved
    torch.testing.assert_close(
        new.log_prob(scale) - old.log_prob(scale), published, atol=1e-12, rtol=0
    )
    log_ratio = normalised(new, old, scale)
    torch.testing.assert_close(log_ratio, (published + bias) * std)
    assert log_ratio.exp().flatten().tolist() == pytest.approx([1.00062823, 0.9990136], abs=1e-7)
    loss = clip(log_ratio.exp(), column(1.0, -1.0), 2e-6, None)
    assert loss.flatten().tolist() == pytest.approx([-(1 + 2e-6), 1 - 2e-6], abs=1e-12), (
        "both ratios are out of range"
    )


def test_flow_dppo_drops_what_leaves_the_trust_region():
    """Flow-DPPO as _flowdppo_kl_adv_loss of UniRL returns it."""
    log_ratio = torch.tensor([[0.002, 0.003, -0.004], [-0.002, -0.003, 0.004]], dtype=torch.float64)
    advantage = torch.tensor([[1.0, 1, 1], [-0.5, -0.5, 2]], dtype=torch.float64)
    kl = torch.tensor([1.39e-6, 5e-5, 2.2e-7], dtype=torch.float64).expand(2, 3)
    meter = Meter()
    mask = torch.ones(2, 3, dtype=torch.bool)
    with meter.listening():
        loss = gated(1e-5, log_ratio, torch.zeros_like(log_ratio), advantage, kl, mask)
    expected = [[-1.002002, 0, -0.99600798], [0.499001, 0, -2.00801611]]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)
    assert meter.mean("clip_fraction") == pytest.approx(1 / 3)
    back = gated(1e-5, -log_ratio, torch.zeros_like(log_ratio), advantage, kl, mask)
    assert (back[:, 1] != 0).all(), "a step back towards the old policy is never dropped"


def dgpo_of(miss, ref, advantage, **options):
    point, v = off_by(*miss, advantage=advantage)
    leaf = v.requires_grad_()
    same = point.target + torch.tensor(ref, dtype=torch.float64)
    lagging = (
        {"ref": None, "old": same}
        if options.get("reference") == "old"
        else {"ref": same, "old": leaf.detach()}
    )
    policy = Velocities(live=leaf, **lagging)
    objective = DGPO(kl=0.0, **options)
    with torch.no_grad():
        measured = objective.measure(policy, point)
    coupled = objective.couple(point, measured)
    return objective, policy, point, coupled, leaf


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
    miss[0] = first
    objective, policy, point, coupled, leaf = dgpo_of(miss, ref, column(1, -1, 1, -1), beta=100.0)
    expected = w.repeat_interleave(2) * torch.tensor([1.0, -1, 1, -1])
    torch.testing.assert_close(coupled.coupling.advantage[:, 0], expected, atol=1e-7, rtol=0)
    loss = objective.loss(policy, coupled).mean()
    assert loss.item() == pytest.approx(0.00021994, abs=1e-9)
    loss.backward()
    published = [-0.00282128, 0.00282128, -0.00282128, -0.00564256]
    assert leaf.grad[0].tolist() == pytest.approx(published, abs=1e-8)


@pytest.mark.parametrize("reference", ["ref", "old"])
def test_dgpos_gradient_is_that_of_the_group_preference(reference):
    """grad mean_B(w A d) = grad of G / (beta B) sum_g softplus(S_g), with the start or the moving
    average in S_g."""
    generator = torch.Generator().manual_seed(0)
    miss, ref = (
        0.3 * torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    advantage = torch.randn(8, 1, generator=generator, dtype=torch.float64)
    options = {"beta": 7.0, "clip_range": None, "reference": reference}
    objective, policy, point, coupled, leaf = dgpo_of(
        miss.tolist(), ref.tolist(), advantage, **options
    )
    assert objective.snapshots == (reference,)
    objective.loss(policy, coupled).mean().backward()
    v = leaf.detach().clone().requires_grad_()
    gap = (v - point.target).square().mean(1) - ref.square().mean(1)
    score = (advantage[:, 0] * 7.0 * gap).view(4, 2).sum(1) / 2
    (2 / (7.0 * 8) * softplus(score).sum()).backward()
    torch.testing.assert_close(leaf.grad, v.grad)


def test_dgpo_stops_the_gradient_of_samples_that_moved_far():
    """Good samples whose error fell, bad ones whose error rose; the value of the loss stays."""
    miss = [(0.1,) * 4, (0.1,) * 4, (0.3,) * 4, (0.3,) * 4]
    point, v = off_by(*miss, advantage=column(1.0, -1, 1, -1))
    old = point.target + 0.2
    policy = Velocities(live=v.requires_grad_(), ref=old, old=old)
    objective = DGPO(beta=1.0, clip_range=1e-2, kl=0.0)
    with torch.no_grad():
        coupled = objective.couple(point, objective.measure(policy, point))
    loss = objective.loss(policy, coupled)
    torch.testing.assert_close(loss, coupled.coupling.advantage * column(0.01, 0.01, 0.09, 0.09))
    loss.sum().backward()
    assert v.grad.abs().sum(1).bool().tolist() == [False, True, True, False]


MISSES = {  # velocity minus target: of two rows under the live and the old weights
    "live": [[0.1, 0.05, 0.02, 0], [0.1, 0.1, 0.05, 0]],
    "old": [[0.05, 0, -0.02, 0.03], [0, 0.02, 0.06, -0.04]],
}


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 0.23164312), (0.1, 1.24113639)])
def test_nfts_loss_is_that_of_published_code(beta, expected):
    """DiffusionNFT (Zheng et al. 2025), eq. 5, as its published code has it, at t = 0.6, r = 0.7
    and 0.4."""
    point, v = off_by(*MISSES["live"], advantage=column(2.0, -1.0))
    policy = Velocities(
        live=v, old=point.target + torch.tensor(MISSES["old"], dtype=torch.float64), ref=v
    )
    loss = NFT(beta=beta).loss(policy, point)
    assert float(loss.mean()) == pytest.approx(expected, abs=2e-6)
    if beta == 1:
        best = NFT().loss(policy, point.replace(advantage=column(5.0, 9.0))) / 5  # r = 1
        worst = NFT().loss(policy, point.replace(advantage=column(-5.0, -9.0))) / 5  # r = 0
        assert best.flatten().tolist() == pytest.approx([0.04552938, 0.05399996], abs=2e-7)
        assert worst.flatten().tolist() == pytest.approx([0.03423528, 0.04819352], abs=2e-7)


def test_nfts_gradient_at_the_old_policy_is_advantage_times_denoising_error():
    """There both errors are equal and the two pulls differ by 2 r - 1 = A / 5; beta cancels."""
    miss = torch.tensor(MISSES["live"], dtype=torch.float64)
    for beta in (1.0, 0.1):
        point, v = off_by(*MISSES["live"], advantage=column(2.0, -1.0))
        policy = Velocities(live=v.requires_grad_(), old=v.detach(), ref=v.detach())
        NFT(beta=beta).loss(policy, point).sum().backward()
        weight = 0.6 * miss.abs().mean(1, keepdim=True)
        torch.testing.assert_close(v.grad, point.advantage * 0.36 * 2 * miss / 4 / weight)


def test_nfts_old_weights_follow_as_published():
    decays = {0: [0, 0, 0], 1: [0, 0.1, 0.5], 2: [0, 0.1875, 0.999]}
    for kind, expected in decays.items():
        objective = NFT(decay=kind)
        assert [objective.old_decay(step) for step in (0, 100, 1000)] == pytest.approx(expected)


def test_awms_weightings_are_those_of_published_code(subtests):
    """AWM (Xue et al. 2025), AWMTrainer.compute_weighted_log_prob of Flow-Factory, at t = 0.6."""
    for weighting, expected in [
        ("uniform", [-0.003225, -0.005625]),
        ("t", [-0.001935, -0.003375]),
        ("t2", [-0.001161, -0.002025]),
        ("huber", [-0.03406746, -0.044994]),
        ("ghuber", [-0.56434166, -0.64967763]),
    ]:
        with subtests.test(weighting=weighting, expected=expected):
            point, v = off_by(*MISSES["live"])
            scores = SCORES[weighting](
                error(Velocities(live=v).dist(point), point), point.time[:, None]
            )
            assert scores.flatten().tolist() == pytest.approx(expected, abs=2e-7)


def test_awms_gradient_on_policy_is_the_weighted_denoising_error():
    point, v = off_by(*MISSES["live"], advantage=column(0.5, -3.0))
    policy = Velocities(live=v.requires_grad_(), old=v.detach(), ref=v.detach())
    meter = Meter()
    with meter.listening():
        AWM(weighting="t", kl=0.5).loss(policy, point).sum().backward()
    miss = torch.tensor(MISSES["live"], dtype=torch.float64)
    torch.testing.assert_close(v.grad, column(0.5, -1.0) * 0.6 * 2 * miss / 4)
    assert meter.mean("ratio") == 1 and meter.mean("clip_fraction") == 0 and meter.mean("kl") == 0


def test_awms_ratio_is_to_the_sampling_weights_and_clipped():
    """Errors 0.003225 now, 0.0625 before (t = 0.6, weighting t), reference elsewhere."""
    point, v = off_by(*[MISSES["live"][0]] * 2, advantage=column(1.0, -1.0))
    policy = Velocities(live=v, old=point.target + 0.25, ref=v + 0.5)
    ratio = torch.tensor(0.6 * (0.0625 - 0.003225), dtype=torch.float64).exp()
    wide, narrow = (
        AWM(weighting="t", clip_range=clip, kl=0.0).loss(policy, point)
        for clip in (1.0, (0.01, 0.02))
    )
    torch.testing.assert_close(wide, column(-ratio, ratio))
    torch.testing.assert_close(narrow, column(-1.02, ratio))
    with_kl = AWM(weighting="t", kl=2.0).loss(policy, point)
    torch.testing.assert_close(with_kl - wide, column(0.5, 0.5))


def test_awm_may_stay_near_the_moving_average():
    point, v = off_by(*[MISSES["live"][0]] * 2, advantage=column(1.0, -1.0))
    policy = Velocities(live=v, old=v, ref=v + 0.5, ema=v + 0.25)
    plain, near = (AWM(kl=0.0, ema_kl=weight).loss(policy, point) for weight in (0.0, 3.0))
    torch.testing.assert_close(near - plain, column(3 * 0.0625, 3 * 0.0625))
    assert "ema" in AWM(ema_kl=1.0).snapshots and "ema" not in AWM().snapshots
    with pytest.raises(UserError, match="uses the moving average of the weights: set train.ema"):
        trainer_of(partial(AWM, ema_kl=1.0), "flow")
    trainer = trainer_of(partial(AWM, ema_kl=1.0), "flow", ema=0.3)
    metrics = [trainer.iterate() for _ in range(2)]
    assert metrics[1]["kl_ema"] > 0 and metrics[1]["step"] == 4


def test_diffusion_dpos_loss_and_gradient_are_those_of_published_code():
    """Diffusion-DPO (Wallace et al. 2024), eq. 14: beta 100, errors 0.31 and 0.42, of the reference
    0.30 and 0.40."""
    root = torch.tensor([0.31, 0.42, 0.3, 0.4], dtype=torch.float64).sqrt()
    point, v = off_by(*[[float(root[i])] * 4 for i in (0, 1)], advantage=column(0.7, -0.2))
    ref = point.target + root[2:, None]
    policy = Velocities(live=v.requires_grad_(), ref=ref)
    objective = DiffusionDPO()
    meter = Meter()
    with meter.listening(), torch.no_grad():
        coupled = objective.couple(point, objective.measure(policy, point))
    assert (
        meter.mean("dpo/loss") == pytest.approx(0.47407698, abs=1e-7)
        and meter.mean("dpo/right") == 1
    )
    objective.loss(policy, coupled).mean().backward()
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


# where they look


def sampled(eta=0.0, **options):
    policy = toys.make("flow", double=True, noise_level=eta, **options)
    for name in ("ref", "old"):
        policy.weights.keep(name)
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(3), 4, Rng.of("rollout"))
    advantage = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    return policy, rollout.replace(advantage=advantage)


def test_times_are_those_of_the_grid_without_repetition():
    policy, rollout = sampled(steps=10)
    grid = policy.times.tolist()
    times = steps(Rng.of(0), rollout.row_id, 4, rollout.latents.time, share=0.9, skip=1)
    assert times.shape == (12, 4) and all(
        len(set(row)) == 4 and set(row) <= set(grid[1:9]) for row in times.tolist()
    )
    assert len({tuple(row) for row in times.tolist()}) > 1
    alike = early_steps(Rng.of(0), rollout.row_id, 4, rollout.latents.time)
    assert torch.equal(alike, alike[:1].expand_as(alike)) and set(alike[0].tolist()) <= set(
        grid[:6]
    )
    every = steps(Rng.of(0), rollout.row_id, 99, rollout.latents.time)
    assert every.shape == (12, 9) and 0.0 not in every, "no more than there are"
    with pytest.raises(
        UserError, match="share 0.1 and skip 1 leave none of the sampler's 10 steps"
    ):
        steps(Rng.of(0), rollout.row_id, 1, rollout.latents.time, share=0.1, skip=1)


def test_other_times_have_the_distribution_asked_for():
    rows = torch.arange(20_000)
    flat = uniform(Rng.of(1), rows, 2, None, low=0.2, high=0.6)
    assert (
        flat.min() > 0.2 and flat.max() < 0.6 and float(flat.mean()) == pytest.approx(0.4, abs=0.01)
    )
    bell = logit_normal(Rng.of(1), rows, 1, None, mean=1.0, std=0.5).logit()
    assert float(bell.mean()) == pytest.approx(1, abs=0.02) and float(bell.std()) == pytest.approx(
        0.5, abs=0.02
    )
    assert logit_normal(Rng.of(1), rows, 1, None, shift=3.0).mean() > 0.6
    assert torch.equal(
        uniform(Rng.of(1), rows[7:9], 2, None), uniform(Rng.of(1), rows, 2, None)[7:9]
    )
    for wrong in (partial(uniform, low=0.5, high=0.5), partial(logit_normal, std=0.0)):
        with pytest.raises(UserError, match="time sampler"):
            wrong(Rng.of(1), rows, 1, None)


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_a_group_shares_times_and_noise(times):
    policy, rollout = sampled()
    points = list(noised(policy, rollout, Rng.of("points"), times, 3, shared=True))
    assert len(points) == 3 and all((point.num_decisions == 3).all() for point in points)
    for point in points:
        noise = (point.target + rollout.sample).view(3, 4, -1)
        torch.testing.assert_close(noise, noise[:, :1].expand_as(noise))
        assert torch.equal(point.time.view(3, 4), point.time.view(3, 4)[:, :1].expand(3, 4))
    noises = torch.stack([point.target + rollout.sample for point in points])
    assert (noises[0] - noises[1]).abs().min() > 0, "drawn anew at every time"
    whole = Point.cat(points)
    index = comparisons(whole)
    assert index.bincount().tolist() == [4] * 9
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


def test_the_reference_may_be_guided():
    policy, rollout = sampled()
    with torch.no_grad():
        for p in policy.net.parameters():
            p.add_(0.01)
    for point in DGPO().points(policy, rollout, Rng.of("points")):
        for scale in (1.0, 3.0):
            guided = DGPO(kl=2.0, ref_guidance=scale)
            plain = DGPO(kl=0.0)
            ref = frozen(policy, "ref", point.replace(guidance=scale))
            distance = (policy.dist(point).mean - ref.mean).square().mean(1, keepdim=True)
            torch.testing.assert_close(
                guided.loss(policy, point) - plain.loss(policy, point), 2 * distance
            )
            gap = error(policy.dist(point), point) - error(ref, point)
            torch.testing.assert_close(guided.measure(policy, point)[:, :1], gap)


def test_pairs_are_the_best_and_the_worst_that_are_left():
    _, rollout = sampled()
    advantage = column(0.1, 3, -1, 2, *[0.5] * 4, 5, -5, 1, 0)
    trainable = torch.tensor([True] * 8 + [False, True, True, True])
    chosen = pairs(rollout.replace(advantage=advantage, trainable=trainable))
    assert chosen.nonzero()[:, 0].tolist() == [1, 2, 9, 10], (
        "no pair in a group of equals; an excluded row is in none"
    )


def test_token_models_are_refused_with_the_reason(subtests):
    for family in ["masked", "causal"]:
        for make in [DGPO, NFT, AWM, DiffusionDPO, Guard, FlowDPPO]:
            with subtests.test(family=family, make=make):
                objective = make()
                policy = toys.make(family)
                for name in ("old", "ref"):
                    policy.weights.keep(name)
                with torch.no_grad():
                    rollout = policy.rollout(toys.prompts(2), 2, Rng.of(0)).replace(
                        advantage=column(1, -1, 1, -1).float()
                    )
                with pytest.raises(UserError, match="flow and diffusion models"):
                    for point in objective.points(policy, rollout, Rng.of(1)):
                        objective.loss(policy, point)


@pytest.mark.parametrize("make", [DGPO, NFT, DiffusionDPO, RewardWeightedRegression])
def test_a_beta_that_is_not_positive_is_refused(make):
    with pytest.raises(UserError, match=r"objective\.\w+: must be positive: beta 0"):
        make(beta=0)
    with pytest.raises(UserError, match="clip_range must be greater than 0"):
        Guard(clip_range=0.0)
    with pytest.raises(UserError, match=r"objective\.awm: must be positive: clip_range -1"):
        AWM(clip_range=(0.5, -1.0))


# on the path


def test_guards_two_forms_agree_and_steps_are_balanced():
    """log rho = (log-ratio + KL) std; with balance the loss of a step is divided by its length."""
    policy, rollout = sampled(eta=0.7, steps=5)
    with torch.no_grad():
        for p in policy.net.parameters():
            p.add_(0.01)
    for point in policy.path(rollout):
        dist = policy.dist(point)
        old = frozen(policy, "old", point)
        by_likelihood = (
            dist.log_prob(point.target) - old.log_prob(point.target) + dist.kl(old)
        ) * dist.std.flatten(1)
        torch.testing.assert_close(
            normalised(dist, old, point.target), by_likelihood, atol=1e-12, rtol=1e-9
        )
        plain, balanced = (
            Guard(clip_range=0.1, balance=b).loss(policy, point) for b in (False, True)
        )
        torch.testing.assert_close(balanced, plain * 5)
        with_kl = Guard(clip_range=0.1, balance=False, kl=2.0).loss(policy, point)
        torch.testing.assert_close(with_kl - plain, 2 * dist.kl(frozen(policy, "ref", point)))


def test_flow_dppos_divergence_in_its_three_forms():
    policy, rollout = sampled(eta=0.7, steps=5)
    with torch.no_grad():
        for p in policy.net.parameters():
            p.add_(0.01)
    for k, point in enumerate(policy.path(rollout)):
        kl = {}
        for std in ("exact", "published", "one"):
            meter = Meter()
            with meter.listening():
                FlowDPPO(std=std).loss(policy, point)
            kl[std] = meter.mean("kl_old")
        exact = policy.dist(point).kl(frozen(policy, "old", point)).mean()
        assert kl["exact"] == pytest.approx(exact.item(), rel=1e-9)
        t = 1 - k / 5
        published = 0.49 * t / (1 - min(t, 0.99)) / 5
        assert kl["published"] == pytest.approx(kl["one"] / published, rel=1e-9)
        if k:  # at t = 1 the published std is 7, mmrl's 0.7
            assert kl["published"] == pytest.approx(kl["exact"], rel=1e-9)


# learning


def trainer_of(make, family, lr=3e-3, noise_level=0.0, policy=None, **options):
    sizes = {
        "prompts_per_iteration": 8,
        "group_size": 16,
        "train_batch_size": 64,
        "iterations": 40,
        "micro_batch_size": 64,
    } | options
    return Trainer(
        policy or toys.make(family, noise_level=noise_level),
        toys.prompts(16),
        Scorer({"toy": toys.reward}),
        advantages.flow_grpo,
        make(),
        partial(adamw, lr=lr),
        TrainOptions(**sizes),
    )


def test_training_raises_the_reward(subtests):
    """From deterministic samples, which have no decisions on their path."""
    for name, make in FORWARD.items():
        with subtests.test(name=name):
            trainer = trainer_of(make, "flow", lr=8e-3)
            assert not trainer.collect().rollout.mask.any()
            rewards = [trainer.iterate()["reward/mean"] for _ in range(20)]
            start = sum(rewards[:3]) / 3
            end = sum(rewards[-3:]) / 3
            assert end > start + 0.25 * abs(start), (start, end)


def test_micro_batches_change_nothing(subtests):
    for name in [*FORWARD, *ON_PATH]:
        with subtests.test(name=name):
            runs = []
            for micro in (64, 24):
                policy = toys.make("flow", double=True, noise_level=0.0 if name in FORWARD else 0.7)
                trainer = trainer_of(
                    (FORWARD | ON_PATH)[name], "flow", policy=policy, micro_batch_size=micro
                )
                for _ in range(2):
                    trainer.iterate()
                runs.append(trainer.policy.weights.full())
            for weights in runs[1:]:
                for key, value in runs[0].items():
                    torch.testing.assert_close(value, weights[key], atol=1e-9, rtol=0)


def test_a_process_without_rows_can_keep_step(subtests):
    """It passes one row through the network that trains nothing, and so takes part in every
    collective call."""
    for name in [*FORWARD, *ON_PATH]:
        with subtests.test(name=name):
            trainer = trainer_of(
                (FORWARD | ON_PATH)[name], "flow", noise_level=0.0 if name in FORWARD else 0.7
            )
            batch = trainer.collect()
            passes = trainer.update.passes
            idle = passes.idle(batch, Rng.of("idle"))
            if passes.coupled:
                passes.couple(batch, [], [idle])
            loss = trainer.objective.loss(trainer.policy, idle)
            assert (
                len(loss) == 1
                and loss.isfinite().all()
                and loss.requires_grad
                and not idle.mask.any()
            )


def test_the_first_step_is_on_policy(subtests):
    for name in ["grpo_guard", "flow_dppo", "awm", "dgpo"]:
        for precision in ["fp32", "bf16"]:
            with subtests.test(name=name, precision=precision):
                make = (FORWARD | ON_PATH)[name]
                eta = 0.0 if name in FORWARD else 0.7
                metrics = trainer_of(
                    make, "flow", noise_level=eta, train_batch_size=128, precision=precision
                ).iterate()
                assert (
                    metrics["ratio/mean"] == 1
                    and metrics["clip_fraction"] == 0
                    and metrics["grad_norm"] > 0
                )
                assert (
                    metrics.get("kl", 0) == 0
                    and metrics.get("kl_old", 0) == 0
                    and metrics.get("ratio/max_deviation", 0) == 0
                )


def test_old_weights_are_what_each_method_says():
    """NFT samples with them; DGPO's are a moving average that starts as a copy."""
    trainer = trainer_of(partial(NFT, decay=2), "flow")
    assert trainer.snapshots() == ("old", "ref")
    trainer.update.step = 1000
    before = trainer.policy.weights.full("old")
    trainer.iterate()
    live, old = (trainer.policy.weights.full(name) for name in ("live", "old"))
    for name, value in old.items():
        torch.testing.assert_close(value, 0.999 * before[name] + 0.001 * live[name])
    assert [DGPO().old_decay(step) for step in (0, 100, 1000)] == pytest.approx([0, 0.1, 0.3])
    assert DGPO().couples(None) == "groups" and DGPO(behavior_policy="old").behavior_policy == "old"


def test_flat_groups_teach_dgpo_nothing_when_dropped():
    trainer = trainer_of(DGPO, "flow")
    trainer.scorer = Scorer({"toy": lambda media, prompts: torch.ones(len(media))})
    trainer.advantage = partial(advantages.flow_grpo, zero_variance_groups="drop")
    assert trainer.iterate()["skipped_steps"] == 2
