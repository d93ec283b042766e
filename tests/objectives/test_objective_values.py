"""Objectives at single points against numbers by hand: bounds, corners, defaults, what the log
counts."""

import math

import pytest
import torch

from mmrl.core.distributions import Categorical, Gaussian
from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter
from mmrl.core.types import Point, Provenance, Rewards
from mmrl.objectives import PolicyGradient
from mmrl.objectives.decisions import TokenWeights, subset
from mmrl.objectives.kl import KL, estimate
from mmrl.objectives.surrogates import gmpo, gspo, row_mean, sapo, vespo
from mmrl.objectives.terms.importance_sampling import Importance
from mmrl.objectives.terms.off_policy import off_policy
from mmrl.policies.capabilities import Capabilities
from mmrl.policies.pass_sizes import PassSizes
from mmrl.policies.tokens import TokenPolicy
from mmrl.zoo.objectives import (
    AWM,
    CRD,
    D3PO,
    DGPO,
    FPO,
    NFT,
    AdjointMatching,
    ClipCov,
    DiffusionDPO,
    Draft,
    FlowDPPO,
    Guard,
    KLCov,
    RewardWeightedRegression,
    SePPO,
)
from mmrl.zoo.objectives.covariance import Drawing, HeldBack
from mmrl.zoo.objectives.forward_process.awm import SCORES
from mmrl.zoo.objectives.grpo_guard import normalised
from mmrl.zoo.objectives.reward_gradient import DIVERGENCES
from mmrl.zoo.objectives.trust_region import gated
from samplers.kernels import flow_sde, memoryless, ode
from samplers.noise import Rng
from samplers.windows import all_but_last, all_steps
from tests.fixtures import toys
from tests.fixtures.records import make_point, make_rollout
from tests.fixtures.swapping import Swapping
from tests.objectives.velocities import Velocities, column, measured_loss, renoised, table

# Defaults of the papers, and options that mean nothing

AS_PUBLISHED = [
    (AWM, {"weighting": "ghuber", "clip_range": 1.0, "advantage_clip": 1.0, "num_noise_draws": 6}),
    (AWM, {"kl": 1e-4, "ema_kl": 0.0}),
    (DGPO, {"beta": 100.0, "clip_range": 1e-2, "advantage_clip": 5.0, "num_noise_draws": 4}),
    (DGPO, {"kl": 0.02, "snapshots": ("old", "ref")}),
    (FPO, {"clip_range": 0.05, "advantage_clip": 5.0, "num_noise_draws": 8}),
    (NFT, {"beta": 1.0, "advantage_clip": 5.0, "kl": 1e-4, "num_noise_draws": 9, "decay": 1}),
    (CRD, {"beta": 1.0, "advantage_clip": 5.0, "kl": 0.1, "num_noise_draws": 4}),
    (CRD, {"ref_guidance": 1.0, "centre": "group"}),
    (D3PO, {"beta": 0.1}),
    (DiffusionDPO, {"beta": 100.0, "num_noise_draws": 1}),
    (FlowDPPO, {"threshold": 1e-5, "advantage_clip": 5.0, "std": "exact"}),
    (Guard, {"clip_range": 2e-6, "balance": True}),
    (Importance, {"level": "token", "cap": 3.0, "floor": 0.0}),
    (ClipCov, {"share": 2e-4, "low": 1.0, "high": 5.0}),
    (KLCov, {"share": 2e-4, "weight": 1.0}),
]
DECAYS = [  # of the old weights at steps 0, 100 and 1000
    (CRD(), [0.25, 0.75, 0.999]),
    (DGPO(), [0.0, 0.1, 0.3]),
    (NFT(decay=0), [0, 0, 0]),
    (NFT(decay=1), [0, 0.1, 0.5]),
    (NFT(decay=2), [0, 0.1875, 0.999]),
]
SNAPSHOTS = [
    (DGPO(clip_range=None), ("ref",)),
    (DGPO(reference="old", kl=0.0, clip_range=None), ("old",)),
    (DGPO(clip_range=None, behavior_policy="old"), ("old", "ref")),
    (DGPO(reference="old"), ("old", "ref")),
]


def test_as_published():
    for objective, published in AS_PUBLISHED:
        built = objective()
        assert {name: getattr(built, name) for name in published} == published, objective
    for objective, decays in DECAYS:
        assert [objective.old_decay(step) for step in (0, 100, 1000)] == pytest.approx(decays)
    for objective, names in SNAPSHOTS:
        assert objective.snapshots == names


REFUSED = [
    *[(make, {"beta": 0.0}) for make in (CRD, DGPO, NFT, D3PO, SePPO, DiffusionDPO)],
    *[(make, {"advantage_clip": 0.0}) for make in (AWM, CRD, DGPO, FPO, NFT, FlowDPPO)],
    *[(make, {"clip_range": (0.1, 0.0)}) for make in (AWM, FPO)],
    *[(make, {"clip_range": 0.0}) for make in (AWM, FPO)],
    (AWM, {"clip_range": (0.5, -1.0)}),
    (RewardWeightedRegression, {"beta": 0.0}),
    (CRD, {"temperature": -1.0}),
    (DGPO, {"clip_range": -1.0}),
    (FlowDPPO, {"threshold": 0.0}),
]
OF_THE_POLICY_GRADIENT = [
    {"timestep_fraction": 1.5},
    {"timestep_fraction": 0.0},
    {"advantage_clip": 0.0},
    {"kl": -0.1},
    {"clip_range": (0.0, 0.1)},
    {"clip_range": (0.1, -1.0)},
]


def test_options_that_mean_nothing_are_refused():
    for objective, wrong in REFUSED:
        with pytest.raises(UserError, match=rf"must be positive: {next(iter(wrong))}"):
            objective(**wrong)
    for wrong in OF_THE_POLICY_GRADIENT:
        with pytest.raises(UserError, match=next(iter(wrong))):
            PolicyGradient(**wrong)
    with pytest.raises(UserError, match="clip_range must be greater than 0"):
        Guard(clip_range=0.0)
    for low in (3.0, 4.0):
        with pytest.raises(UserError, match=f"^importance_sampling: floor {low} must be less than"):
            Importance(floor=low)
    # the ends of what is allowed
    PolicyGradient(advantage_clip=0.5, clip_range=(0.01, 0.5), timestep_fraction=1.0, kl=0.0)
    assert CRD(temperature=0.0).temperature == 0.0


# Advantage-weighted matching


def test_a_perfect_prediction_scores_zero_with_a_finite_gradient():
    for weighting in SCORES:
        error = column(0.0).requires_grad_()
        score = SCORES[weighting](error, column(0.5))
        assert score.item() == 0
        score.sum().backward()
        assert error.grad.isfinite().all() and error.grad.item() < 0, weighting


def test_awm_counts_the_ratios_beyond_its_clip_on_either_side():
    """Errors 0.04 now; 0.09, 0.04, 0.0 before: log-ratios 0.025, 0, -0.02 at time 1/2."""
    live = torch.full((3, 4), 0.2, dtype=torch.float64)
    old = column(0.3, 0.2, 0.0).expand(3, 4)
    policy = Velocities(live=live, old=old, ref=live + 0.5, ema=live + 0.25)
    point = renoised(column(1.0, 1.0, 1.0))
    gaps = [0.025, 0.0, -0.02]
    ratio = [math.exp(gap) for gap in gaps]
    sides = ((0.5, 0.01), 1 / 3), ((0.01, 0.5), 1 / 3), ((0.01, 0.01), 2 / 3), (0.5, 0.0)
    for clip, fraction in sides:
        loss, meter = measured_loss(AWM(weighting="t", clip_range=clip, kl=0.0), policy, point)
        low, high = clip if isinstance(clip, tuple) else (clip, clip)
        expected = [-min(r, min(max(r, 1 - low), 1 + high)) for r in ratio]
        assert loss.flatten().tolist() == pytest.approx(expected, abs=1e-9)
        assert meter.mean("clip_fraction") == pytest.approx(fraction)
        assert meter.top("log_ratio") == pytest.approx(0.025)
        assert meter.mean("ratio") == pytest.approx(sum(ratio) / 3)
    for chosen, name, distance in (({"kl": 2.0}, "kl", 0.25), ({"ema_kl": 2.0}, "kl_ema", 0.0625)):
        near = AWM(weighting="t", clip_range=0.5, **({"kl": 0.0} | chosen))
        held, meter = measured_loss(near, policy, point)
        torch.testing.assert_close(held - loss, column(*[2 * distance] * 3))
        assert meter.mean(name) == pytest.approx(distance)


# Corrections of text


def answers(gap, advantage=None, mask=None):
    """Log-probs of the policy that are ``gap`` [B, L] above those of what sampled."""
    gap = table(*gap)
    name = torch.arange(len(gap))
    mask = torch.tensor(mask, dtype=torch.bool) if mask else torch.ones_like(gap).bool()
    return make_point(
        group=name * 0,
        row_id=name,
        state=gap,
        mask=mask,
        logprob=gap - 1,
        sampler_logprob=torch.full_like(gap, -1.0),
        advantage=advantage,
    )


@pytest.mark.parametrize("beyond", ["truncate", "mask"])
def test_importance_at_and_beyond_its_bounds(beyond):
    ratios = [0.25, 0.5, 1.0, 2.0, 8.0]
    point = answers([[math.log(ratio) for ratio in ratios]])
    weight = Importance(mode=beyond, floor=0.4, cap=3.0).weight(point)[0]
    inside = {"truncate": [0.4, 0.5, 1.0, 2.0, 3.0], "mask": [0.0, 0.5, 1.0, 2.0, 0.0]}[beyond]
    assert weight.tolist() == pytest.approx(inside, abs=1e-12)
    same = answers([[0.0]])
    for low, high in ((1.0, 2.0), (0.5, 1.0)):  # a ratio of 1 lies inside both
        assert Importance(mode=beyond, floor=low, cap=high).weight(same).item() == 1.0
    default = Importance(mode=beyond).weight(point)[0].tolist()
    assert default == pytest.approx([*ratios[:4], 3.0 if beyond == "truncate" else 0.0], abs=1e-12)


def test_importance_of_rows():
    """The product of a row, or its mean's, over what is trained on."""
    point = answers([[math.log(2.0), math.log(3.0), 5.0]], mask=[[1, 1, 0]])
    for level, expected in (("sequence", 6.0), ("geometric", math.sqrt(6.0))):
        sampling = Importance(level=level, cap=9.0)
        weight = sampling.weight(sampling.of_samples(point))
        assert weight[0, :2].tolist() == pytest.approx([expected] * 2)
    alone = Importance().weight(point.replace(provenance=Provenance()))
    assert torch.equal(alone, torch.ones(1, 3, dtype=torch.float64))


def test_off_policy_answers_are_dropped_only_where_they_are_bad_and_far():
    """Mean log(p_sampler / p): 0.3, 0.3, 0.3, 0.1, and exactly the threshold."""
    logp = table([-1.5, -1.1], [-1.5, -1.1], [-1.5, -1.1], [-1.1, -1.1], [-1.25, -1.25])
    point = answers([[0.0, 0.0]] * 5, advantage=column(-1.0, 1.0, 0.0, -1.0, -1.0))
    meter = Meter()
    with meter.listening():
        weight = off_policy(logp, point, 0.25)
    assert weight.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    assert meter.mean("off_policy") == pytest.approx(0.2)
    sampled = point.provenance.sampler_logprob
    recorded = point.replace(provenance=Provenance(), logprob=sampled)
    assert torch.equal(off_policy(logp, recorded, 0.25), weight)


# Centred reward distillation

VELOCITY = [[0.1, -0.3, 0.2, 0.0], [0.5, 0.1, 0.0, -0.2], [-0.4, 0.4, 0.1, 0.1], [0.0] * 4]
BEFORE = [[0.2, -0.1, 0.2, 0.1], [0.4, 0.2, 0.1, -0.2], [-0.4, 0.3, 0.3, 0.1], [0.1, 0.2, 0.3, 0.4]]
START = [[0.3, 0.0, 0.1, -0.1], [0.4, 0.0, 0.2, 0.1], [-0.2, 0.2, 0.3, 0.1], [0.2, 0.1, 0.0, -0.1]]
ADVANTAGE = [1.5, -7.0, 0.5, 2.0]
PAIRED = [0, 0, 1, 1]


def tables(**changes):
    known = {"live": table(*VELOCITY), "old": table(*BEFORE), "ref": table(*START)}
    return Velocities(**(known | changes))


def bounded(advantage, most=5.0):
    return [max(-most, min(a, most)) for a in advantage]


def scaled_error(v):
    return sum(x * x for x in v) / 4 / max(sum(abs(x) for x in v) / 4, 1e-5)


OPTIMALITY = [0.5 + a / 10 for a in bounded(ADVANTAGE)]
IMPLICIT = [scaled_error(old) - scaled_error(v) for v, old in zip(VELOCITY, BEFORE)]


@pytest.mark.parametrize("form", ["mse", "bce"])
@pytest.mark.parametrize("temperature", [None, 0.0, 0.25])
@pytest.mark.parametrize("centre", ["group", "batch"])
def test_crd_row_by_row(form, temperature, centre):
    """The implicit reward and the wanted one, both less their mean under each of the weights."""
    beta = 2.0
    slopes = {None: [0.0], 0.0: [1.0, 0.0], 0.25: [4.0, -4.0]}[temperature]

    def fit(i, slope):
        rows = [j for j in range(4) if centre == "batch" or PAIRED[j] == PAIRED[i]]
        p = [math.exp(slope * OPTIMALITY[j]) for j in rows]
        p = [x / sum(p) for x in p]
        goal = OPTIMALITY[i] - sum(x * OPTIMALITY[j] for x, j in zip(p, rows, strict=True))
        reward = beta * (IMPLICIT[i] - sum(x * IMPLICIT[j] for x, j in zip(p, rows, strict=True)))
        if form == "mse":
            return (reward - goal) ** 2
        share = 1 / (1 + math.exp(-goal))
        return math.log1p(math.exp(-reward)) + (1 - share) * reward

    objective = CRD(beta=beta, form=form, temperature=temperature, centre=centre, kl=0.0)
    point = renoised(column(*ADVANTAGE), group=PAIRED)
    loss, _ = measured_loss(objective, tables(), point)
    expected = [5 / beta * sum(fit(i, slope) for slope in slopes) / len(slopes) for i in range(4)]
    assert loss.flatten().tolist() == pytest.approx(expected, rel=1e-9)


def test_crd_before_its_rows_are_coupled_and_near_the_reference():
    """The centres are 1/2 and 0 then; kl adds the mean square distance to the reference. The mean
    absolute error is at least 1e-5."""
    policy = tables(ref=table(*VELOCITY) + 0.5)
    point = renoised(column(*ADVANTAGE))
    plain = CRD(beta=2.0, kl=0.0).loss(policy, point)
    expected = [2.5 * (2 * r - (a - 0.5)) ** 2 for r, a in zip(IMPLICIT, OPTIMALITY)]
    assert plain.flatten().tolist() == pytest.approx(expected, rel=1e-9)
    with Meter().listening() as meter:
        near = CRD(beta=2.0, kl=3.0).loss(policy, point)
    torch.testing.assert_close(near - plain, column(*[0.75] * 4))
    assert meter.mean("kl") == pytest.approx(0.25)
    zero = torch.zeros(2, 4, dtype=torch.float64)
    policy, point = Velocities(live=zero + 0.5, old=zero), renoised(column(1.0, -1.0))
    for centre in ("group", "batch"):  # (0 - 1/10)^2: both rows improved alike
        loss, _ = measured_loss(CRD(kl=0.0, centre=centre), policy, point)
        assert loss.flatten().tolist() == pytest.approx([5 * 0.01, 5 * 0.01])


def test_crds_gradient_leaves_the_scale_of_the_error_alone():
    """d loss / d v = -(2 clip / beta) beta (beta r_c - a_c) dq / dv with dq / dv = v / 2 over the
    fixed mean |v|."""
    live = table(*VELOCITY).requires_grad_()
    point = renoised(column(*ADVANTAGE))
    loss, _ = measured_loss(CRD(beta=2.0, kl=0.0), tables(live=live), point)
    (gradient,) = torch.autograd.grad(loss.sum(), live)
    for i, v in enumerate(VELOCITY[:3]):
        gap = 2 * (IMPLICIT[i] - sum(IMPLICIT) / 4) - (OPTIMALITY[i] - sum(OPTIMALITY) / 4)
        scale = sum(map(abs, v)) / 4
        expected = [-2.5 * 2 * gap * 2 * x / 2 / scale for x in v]
        assert gradient[i].tolist() == pytest.approx(expected, rel=1e-6)


def test_crd_counts_rows_with_any_decision_to_train_on():
    """A row without one, which an idle process has, is not in the mean."""
    objective, policy, point = CRD(kl=0.0), tables(), renoised(column(*ADVANTAGE))
    alone = objective.couple(point[:3], objective.measure(policy, point[:3])).coupling
    idle = point.replace(mask=torch.tensor([True, True, True, False])[:, None])
    whole = objective.couple(idle, objective.measure(policy, idle)).coupling
    torch.testing.assert_close(whole.optimality[:3], alone.optimality)
    torch.testing.assert_close(whole.implicit_mean[:3], alone.implicit_mean)


# Direct group preference optimisation


@pytest.mark.parametrize("reference", ["ref", "old"])
@pytest.mark.parametrize("clip", [None, 0.02])
@pytest.mark.parametrize("kl", [0.0, 2.0])
def test_dgpo_row_by_row(reference, clip, kl):
    """sigmoid(S) A d with S = beta mean(A (d - d_ref)), without a gradient where a sample has moved
    far."""
    beta = 3.0
    known = {"live": VELOCITY, "old": BEFORE, "ref": START}
    error = {name: [sum(x * x for x in v) / 4 for v in rows] for name, rows in known.items()}
    live, old = error["live"], error["old"]
    advantage = bounded(ADVANTAGE)
    each = [advantage[i] * beta * (live[i] - error[reference][i]) for i in range(4)]
    score = [sum(each[j] for j in range(4) if PAIRED[j] == PAIRED[i]) / 2 for i in range(4)]
    weight = [1 / (1 + math.exp(-s)) for s in score]
    ratio = [math.exp(b - d) for b, d in zip(old, live)]
    far = [
        clip is not None and (r > 1 + clip if a > 0 else r < 1 - clip)
        for r, a in zip(ratio, advantage)
    ]
    apart = [sum((x - y) ** 2 for x, y in zip(v, s)) / 4 for v, s in zip(VELOCITY, START)]
    leaf = table(*VELOCITY).requires_grad_()
    objective = DGPO(beta=beta, clip_range=clip, kl=kl, reference=reference)
    point = renoised(column(*ADVANTAGE), group=PAIRED)
    loss, meter = measured_loss(objective, tables(live=leaf), point)
    expected = [weight[i] * advantage[i] * live[i] + kl * apart[i] for i in range(4)]
    assert loss.flatten().tolist() == pytest.approx(expected, rel=1e-9)
    assert meter.mean("dgpo/weight") == pytest.approx(sum(weight) / 4)
    if clip:
        assert meter.mean("clip_fraction") == pytest.approx(sum(far) / 4) and 0 < sum(far) < 4
        assert meter.mean("ratio") == pytest.approx(sum(ratio) / 4)
    if kl:
        assert meter.mean("kl") == pytest.approx(sum(apart) / 4)
    loss.sum().backward()
    for i in range(4):
        slope = 0.0 if far[i] else weight[i] * advantage[i]
        gradient = [slope * x / 2 + kl * (x - s) / 2 for x, s in zip(VELOCITY[i], START[i])]
        assert leaf.grad[i].tolist() == pytest.approx(gradient, abs=1e-12)


# Differentiable rewards


def walked(**options):
    """A toy's rollout and points of time, its reference being other weights."""
    policy = toys.make("flow", double=True, steps=3, **options)
    with torch.no_grad():
        for p in policy.net.parameters():
            p.add_(0.05)
        policy.weights.keep("ref")
        for p in policy.net.parameters():
            p.sub_(0.05)
        policy.weights.keep("old")
        rollout = policy.rollout(toys.prompts(2), 2, Rng.of("walk"))
    return policy, rollout.replace(advantage=column(1.0, -1.0, 0.5, -0.5))


def at_step(rollout, k, state=None):
    return make_point(
        group=rollout.group,
        cond=rollout.cond,
        row_id=rollout.row_id,
        state=rollout.latents.states[:, k] if state is None else state,
        time=rollout.latents.time[:, k],
        next_time=rollout.latents.time[:, k + 1],
        noise_level=rollout.latents.noise_level[:, k],
        mask=rollout.mask[:, :1],
    )


def transitions(policy, rollout, name):
    """(mean, std) of every step of the path under these weights."""
    with policy.weights.using(name), torch.no_grad():
        dists = [policy.dist(at_step(rollout, k)) for k in range(3)]
    return [(dist.mean, dist.std) for dist in dists]


@pytest.mark.parametrize("kernel", [flow_sde, ode])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_draft_pays_for_the_mean_divergence_of_its_steps(kernel, divergence):
    """Per dimension; a step without noise counts as if the clean prediction had variance 1/2."""
    policy, rollout = walked(sde_type=kernel)
    losses = []
    for kl in (0.0, 2.0):
        objective = Draft(last=2, kl=kl, divergence=divergence)
        objective.attach(toys.smooth_reward)
        (point,) = objective.points(policy, rollout, Rng.of(0))
        losses.append(objective.loss(policy, point)[:, 0])
    torch.testing.assert_close(losses[0], -toys.smooth_reward(rollout.sample, None))
    paid = torch.zeros(4, dtype=torch.float64)
    live, base = (transitions(policy, rollout, name) for name in ("live", "ref"))
    for k in (1, 2):
        length = rollout.latents.time[:, k] - rollout.latents.time[:, k + 1]
        std = live[k][1][:, 0]
        scale = torch.where(std > 0, std, length * math.sqrt(0.5))
        apart = ((live[k][0] - base[k][0]) / scale[:, None]).square().mean(1)
        paid += DIVERGENCES[divergence](apart) / 2
    torch.testing.assert_close(losses[1] - losses[0], 2 * paid, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("window", [all_steps, all_but_last])
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_adjoint_matchings_loss_step_by_step(strength, window):
    """1/2 |(mean - base) / std + std a|^2 per dimension; a carried back by Jacobians of the base's
    means."""
    policy, rollout = walked(sde_type=memoryless, noise_level=1.0, noise_window=window)
    objective = AdjointMatching(**({} if strength == 1 else {"strength": strength}))
    objective.attach(toys.smooth_reward)
    (point,) = objective.points(policy, rollout, Rng.of(0))
    computed, meter = measured_loss(objective, policy, point)
    end = rollout.sample.clone().requires_grad_()
    earned = toys.smooth_reward(end, None)
    assert meter.mean("reward/differentiated") == pytest.approx(earned.mean().item())
    (adjoint,) = torch.autograd.grad(-strength * earned.sum(), end)
    live, base = (transitions(policy, rollout, name) for name in ("live", "ref"))
    expected = torch.zeros(4, dtype=torch.float64)
    for k in (2, 1, 0):
        (mean, std), (start, _) = live[k], base[k]
        if (std > 0).all():
            expected += 0.5 * ((mean - start) / std + std * adjoint).square().mean(1)

        def base_mean(x, k=k):
            return policy.dist(at_step(rollout, k, x)).mean

        with policy.weights.using("ref"):
            # [B, 2, B, 2]
            jacobian = torch.autograd.functional.jacobian(base_mean, rollout.latents.states[:, k])
        adjoint = torch.einsum("bibj,bi->bj", jacobian, adjoint)
    torch.testing.assert_close(computed[:, 0], expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("make", [Draft, AdjointMatching])
def test_without_a_differentiable_reward_nothing_can_be_followed(make):
    policy, rollout = walked(sde_type=memoryless, noise_level=1.0)
    built = make()
    (point,) = built.points(policy, rollout, Rng.of(0))
    with pytest.raises(UserError, match="needs a differentiable reward"):
        built.loss(policy, point)
    built.attach(lambda sample, prompts: torch.zeros(len(sample)))
    with pytest.raises(UserError, match="gives no gradient"):
        built.loss(policy, point)
    tokens = toys.make("causal", double=True)
    with torch.no_grad():
        rollout = tokens.rollout(toys.prompts(2), 2, Rng.of("walk"))
    with pytest.raises(UserError, match="follows the sampler's steps"):
        make().points(tokens, rollout, Rng.of(0))


def test_divergences_of_equal_and_of_far_means():
    for name in DIVERGENCES:
        distance = column(0.0).requires_grad_()
        value = DIVERGENCES[name](distance)
        value.sum().backward()
        assert value.item() == pytest.approx(0.0, abs=1e-6) and distance.grad.isfinite().all()
    assert DIVERGENCES["chi2"](column(1e4)).isfinite().all()
    assert DIVERGENCES["hellinger"](column(1e4)).item() == 1.0


# Steps of a path


def test_flow_dppo_of_an_unchanged_ratio_is_never_dropped():
    zero = column(0.0, 0.0)
    far = column(1.0, 1.0)
    mask = torch.ones(2, 1, dtype=torch.bool)
    assert gated(0.5, zero, zero, column(1.0, -1.0), far, mask).flatten().tolist() == [-1.0, 1.0]
    edge = gated(1.0, column(0.1, -0.1), zero, column(1.0, -1.0), far, mask)
    assert edge.flatten().tolist() == [0.0, 0.0], "the threshold itself is reached"


@pytest.mark.parametrize("make", [FlowDPPO, D3PO, PolicyGradient])
def test_log_ratios_are_seen_by_the_gate(make):
    policy, rollout = walked()
    point = next(iter(make().points(policy, rollout, Rng.of(0))))
    with Meter().listening() as meter:
        make().loss(policy, point.replace(logprob=point.logprob - 0.25))
    assert meter.top("log_ratio") == pytest.approx(0.25)
    if make is FlowDPPO:
        assert meter.mean("ratio") == pytest.approx(math.exp(0.25)) and meter.mean("kl_old") == 0.0


@pytest.mark.parametrize("shift", [0.25, -0.25])
def test_ratios_beyond_the_clip_are_counted_on_both_sides(shift):
    policy, rollout = walked()
    point = next(iter(PolicyGradient().points(policy, rollout, Rng.of(0))))
    point = point.replace(logprob=point.logprob - shift, advantage=column(*[1.0] * 4))
    sides = (0.2, 1.0), ((0.2, 9.0), float(shift < 0)), ((0.9, 0.2), float(shift > 0))
    for clip, fraction in sides:
        with Meter().listening() as meter:
            PolicyGradient(clip_range=clip).loss(policy, point)
        assert meter.mean("clip_fraction") == fraction


def test_guards_ratio_of_a_step_without_noise_is_one():
    zero = torch.zeros(2, 3)
    old = Gaussian(zero, torch.zeros(2, 1))
    assert normalised(Gaussian(zero + 0.5, torch.zeros(2, 1)), old, zero).abs().max() == 0
    with pytest.raises(UserError, match="compares means"):
        normalised(old, Categorical(torch.zeros(2, 2, 3)), zero)


@pytest.mark.parametrize("parts", [10, 100])
def test_a_share_of_the_decisions_is_rounded_down_exactly(parts):
    """int(n k / parts) in whole numbers, at least one; 0.3 * 10 must not become 2, nor 0.84 * 75 in
    float32 62."""
    for n in (*range(1, 21), 75, 100, 150, 300):
        for k in range(1, parts + 1):
            chosen = subset(torch.ones(1, n, dtype=torch.bool), k / parts, None, torch.zeros(1))
            count = max(1, n * k // parts)
            assert chosen[0].tolist() == [True] * count + [False] * (n - count), (n, k)


# Preferences and fits


def test_d3po_tells_the_log_how_it_prefers():
    policy, rollout = walked()
    objective = D3PO()
    point = next(iter(objective.points(policy, rollout, Rng.of(0))))
    with Meter().listening() as meter:
        objective.couple(point, column(0.2, -0.1, -0.3, 0.1))
    losses = [math.log1p(math.exp(-0.1 * margin)) for margin in (0.3, -0.4)]
    assert meter.mean("dpo/right") == 0.5
    assert meter.mean("dpo/loss") == pytest.approx(sum(losses) / 2)


def test_nft_tells_the_log_how_far_it_went():
    live = table(*VELOCITY)
    policy = Velocities(live=live, old=live, ref=live + 0.5)
    _, meter = measured_loss(NFT(kl=1.0), policy, renoised(column(*ADVANTAGE)))
    assert meter.mean("kl") == pytest.approx(0.25) and meter.mean("nft/moved") == 0.0


def test_a_preference_is_right_where_the_better_sample_fits_better():
    live = table([0.1] * 4, [0.3] * 4, [0.4] * 4, [0.2] * 4)
    policy = Velocities(live=live, ref=torch.full((4, 4), 0.25, dtype=torch.float64))
    point = renoised(column(1.0, -1.0, 1.0, -1.0), group=PAIRED)
    objective = DiffusionDPO(beta=1.0)
    with Meter().listening() as meter:
        ready = objective.couple(point, objective.measure(policy, point))
    margins = [0.01 - 0.09, 0.16 - 0.04]  # the better one's error less the worse one's
    losses = [math.log1p(math.exp(m / 2)) for m in margins]
    assert meter.mean("dpo/right") == 0.5
    assert meter.mean("dpo/loss") == pytest.approx(sum(losses) / 2)
    first, second = (1 / (1 + math.exp(-m / 2)) for m in margins)
    slope = ready.coupling.slope.flatten().tolist()
    assert slope == pytest.approx([first, -first, second, -second])


def test_fpo_clips_ratio_and_advantage_row_by_row():
    """The mean over a row's draws has one ratio; beyond the clip there is no gradient left."""
    advantage = [7.0, -7.0, 1.0, -1.0]
    point = renoised(column(*advantage))
    measured = column(0.2, 0.2, 0.0, -0.2, 0.1, 0.1, 0.02, 0.0)
    with Meter().listening() as meter:
        ready = FPO(clip_range=(0.05, 0.12)).couple(Point.cat([point, point]), measured)
    mean = [0.15, 0.15, 0.01, -0.1]
    far = [True, False, False, True]
    kept = [a * math.exp(m) for a, m in zip(bounded(advantage), mean)]
    expected = [0.0 if out else x for x, out in zip(kept, far)]
    assert ready.coupling.slope[:, 0].tolist() == pytest.approx(expected * 2)
    assert meter.mean("clip_fraction") == 0.5 and meter.top("log_ratio") == pytest.approx(0.15)


# Surrogates and KLs


def test_surrogates_at_single_tokens():
    """Their defaults, by the loss; GMPO leaves the other side free; SAPO's and VESPO's temperatures
    are by the sign of A."""
    old = torch.zeros(1, 1, dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    half = math.log(1.5)
    low, high = {"clip_low": 0.1, "clip_high": None}, {"clip_low": 0.1, "clip_high": 0.2}
    rows = [  # surrogate, log-ratio, advantage, options, loss
        (gspo, 1.0, 1.0, {}, -(1 + 4e-4)),
        (gspo, -1.0, -1.0, {}, 1 - 3e-4),
        (gmpo, 2.0, 1.0, {}, -math.exp(0.4)),
        (gmpo, -2.0, -1.0, {}, math.exp(-0.4)),
        (gmpo, 1.0, 0.5, low, -0.5 * math.exp(0.1)),
        (gmpo, 1.0, 0.5, high, -0.5 * math.exp(0.2)),
        (gmpo, 1.0, -0.5, {}, 0.5 * math.e),
    ]
    for a, tau, (k, rate) in ((1.0, 1.0, (2.0, 3.0)), (-1.0, 1.05, (3.0, 2.0))):
        rows.append((sapo, half, a, {}, -a * 4 / tau / (1 + math.exp(-tau * 0.5))))
        weight = math.exp(rate) * 1.5**k * math.exp(-rate * 1.5)
        rows.append((vespo, half, a, {}, -weight * a * half))
    for surrogate, gap, advantage, options, loss in rows:
        found = surrogate(column(gap), old, column(advantage), mask, **options)
        assert found.item() == pytest.approx(loss), (surrogate, gap)
    empty = row_mean(torch.ones(2, 3), torch.tensor([[False] * 3, [True, True, False]]))
    assert empty.tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("gap", [1000.0, 15.0, -15.0, -1000.0])
def test_a_bounded_kl_of_far_log_probs_has_a_finite_gradient(gap):
    logp = column(0.0).requires_grad_()
    kl = estimate(logp, column(gap), "k3", bounded=True)
    assert kl.item() == 10.0
    kl.sum().backward()
    assert logp.grad.item() == 0.0
    for bounded, far, value in ((True, 0.5, math.exp(0.5) - 1.5), (False, 3.0, math.exp(3.0) - 4)):
        near = estimate(column(0.0), column(far), "k3", bounded)
        assert near.item() == pytest.approx(value)


# Tokens that are held back

COVARIANCE = [-2.0, 0.5, 2.0, 6.0, 3.0, 1.0, 5.0, 4.0]


def held(objective, point):
    chosen = objective.chosen(torch.tensor(COVARIANCE), torch.tensor([COVARIANCE]), point)
    return chosen[0].nonzero()[:, 0].tolist()


def test_tokens_inside_a_window_or_of_the_highest_covariance_are_held():
    known = [0.1, 0.2, 0.7, 0.3, 0.4, 0.05, 0.06, 0.9]
    point = answers([[0.0] * 8]).replace(coupling=Drawing(draw=torch.tensor([known])))
    # 2, 4 and 7 are between 1 and 5; those with the least number are drawn
    for share, drawn in ((1.0, [2, 4, 7]), (0.25, [2, 4]), (1e-4, [4])):
        assert held(ClipCov(share=share), point) == drawn
    assert held(ClipCov(low=10.0, high=11.0), point) == []
    masked = point.replace(mask=point.mask & (torch.arange(8) != 4))
    assert held(ClipCov(share=1.0), masked) == [2, 7]
    for share, chosen in ((1e-4, [3]), (0.25, [3, 6]), (0.5, [3, 4, 6, 7]), (1.0, [*range(8)])):
        assert held(KLCov(share=share), point) == chosen


# The objective of text


class Spoken(Swapping):
    """A policy that is a table of logits [B, L, V] under each name of weights; token 0 was written
    everywhere."""

    capabilities = Capabilities("categorical")

    def __init__(self, **logits):
        self.logits = logits
        self.pass_sizes = PassSizes(torch.nn.Linear(1, 1), [])

    def dist(self, point):
        return Categorical(self.logits[self.name][point.row_id])

    path = TokenPolicy.path


def spoken(width=None):
    """Four rows of up to three tokens of a vocabulary of five, recorded under the old weights."""
    names = ("live", "ref", "old")
    tables = {n: Rng.of(n).normal(torch.arange(4), (3, 5), dtype=torch.float64) for n in names}
    policy = Spoken(**tables)
    policy.pass_sizes.rows = width
    row = torch.arange(4)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    rollout = make_rollout(
        group=row // 2,
        row_id=row,
        sample=torch.zeros(4, 3, dtype=torch.long),
        mask=mask,
        logprob=tables["old"].log_softmax(-1)[..., 0],
        advantage=column(1.0, -1.0, 0.0, 2.0),
        prompts=[{}, {}],
    )
    (point,) = PolicyGradient().points(policy, rollout, Rng.of(0))
    return policy, rollout, point, {name: x.log_softmax(-1) for name, x in tables.items()}


HELD = table([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0])


def test_entropy_and_kl_of_text_by_hand():
    policy, rollout, point, logs = spoken()
    logp, ref = logs["live"], logs["ref"]
    mask = rollout.mask
    plain = PolicyGradient().loss(policy, point)
    entropy = torch.where(mask, -(logp.exp() * logp).sum(-1), 0.0)
    u = (ref - logp)[..., 0]
    k3 = torch.where(mask, u.exp() - u - 1, 0.0)
    exact = torch.where(mask, (logp.exp() * (logp - ref)).sum(-1), 0.0)
    ratio = (logp[..., 0] - rollout.logprob).exp()
    advantage = rollout.advantage
    expected = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    torch.testing.assert_close(plain[mask], expected[mask])
    for options, extra, kl in (
        ({"entropy": 0.5}, -0.5 * entropy, None),
        ({"kl": 0.3}, 0.3 * k3, k3),
        ({"kl": KL(weight=0.3, form="exact")}, 0.3 * exact, exact),
        ({"kl": KL(weight=0.3, corrected=True)}, 0.3 * ratio * k3, k3),
    ):
        objective = PolicyGradient(**options)
        with Meter().listening() as meter:
            loss = objective.loss(policy, point)
        torch.testing.assert_close((loss - plain)[mask], extra[mask])
        assert meter.mean("entropy") == pytest.approx(float(entropy[mask].mean()))
        if kl is not None:
            assert meter.mean("kl") == pytest.approx(float(kl[mask].mean()))
            assert objective.snapshots == ("ref",)


def test_clipped_tokens_are_counted_by_the_side_they_leave():
    policy, _, point, logs = spoken()
    ratio = table([1.5, 0.5, 1.0], [1.5, 0.5, 9.0], [1.5, 9.0, 9.0], [1.5, 1.1, 0.5])
    logp = logs["live"][..., 0]
    point = point.replace(logprob=logp - ratio.log(), advantage=column(0.5, -1.0, 0.0, 2.0))
    with Meter().listening() as meter:
        PolicyGradient().loss(policy, point)
    # 1.5 where A > 0, twice of nine tokens
    counts = {"clip/high": 2 / 9, "clip/low": 1 / 9, "clip_fraction": 3 / 9}
    assert {name: meter.mean(name) for name in counts} == pytest.approx(counts)
    assert meter.mean("ratio") == pytest.approx(float(ratio[point.mask].mean()))


@pytest.mark.parametrize("width", [None, 1, 3])
def test_a_kl_in_the_reward_is_that_of_the_sampled_sequence(width):
    policy, rollout, _, logs = spoken(width)
    rewards = Rewards({"right": torch.ones(4, dtype=torch.float64)}, {"right": 2.0})
    shaped = PolicyGradient(kl=KL(weight=0.3, where="reward")).shaped(policy, rollout, rewards)
    gap = rollout.logprob - logs["ref"][..., 0]
    torch.testing.assert_close(shaped["kl"], torch.where(rollout.mask, gap, 0.0).sum(1))
    assert shaped.weights == {"right": 2.0, "kl": -0.3}
    assert torch.equal(shaped["right"], rewards["right"])
    for objective in (PolicyGradient(kl=0.3), PolicyGradient(kl=KL(where="reward"))):
        assert objective.shaped(policy, rollout, rewards) is rewards


@pytest.mark.parametrize("top", [0.2, 0.5, 0.6])
def test_tokens_of_high_entropy_lie_above_the_quantile(top):
    policy, _, point, _ = spoken()
    objective, mask = PolicyGradient(top_entropy=top), point.mask
    measured = objective.measure(policy, point)
    known = objective.couple(point, measured).coupling.weight
    edge = torch.quantile(measured[mask], 1 - top)
    assert torch.equal(known[mask] == 1, measured[mask] >= edge)
    plain = PolicyGradient().loss(policy, point)
    loss = objective.loss(policy, point.replace(coupling=TokenWeights(weight=known)))
    torch.testing.assert_close(loss[mask], (plain * known)[mask])
    assert objective.couples(policy) == "groups" and not PolicyGradient().couples(policy)
    assert objective.couple(point.replace(mask=mask & False), measured).coupling is None


def test_held_tokens_leave_the_policy_loss_or_pay_for_their_log_ratio():
    """Clip-Cov takes them out; KL-Cov has no clip, and adds |log ratio|."""
    policy, _, point, logs = spoken()
    mask = point.mask
    plain = PolicyGradient().loss(policy, point)
    gap = logs["live"][..., 0] - point.logprob
    bare = -point.advantage * gap.exp()
    holding = point.replace(coupling=HeldBack(held=HELD))
    for objective, at, expected in (
        (ClipCov(), holding, plain * (1 - HELD)),
        (ClipCov(), point, plain),
        (KLCov(weight=0.25), holding, bare + 0.25 * HELD * gap.abs()),
        (KLCov(), point, bare),
    ):
        torch.testing.assert_close(objective.loss(policy, at)[mask], expected[mask])


def test_covariances_are_about_the_means_of_all_tokens():
    """The highest of (log p - mean) (A - mean) over nine tokens is held back, and counted."""
    policy, _, point, logs = spoken()
    objective, mask = KLCov(share=0.25), point.mask
    logp, advantage = logs["live"][..., 0], point.advantage.expand(4, 3)
    covariance = (logp - logp[mask].mean()) * (advantage - advantage[mask].mean())
    with Meter().listening() as meter:
        known = objective.couple(point, objective.measure(policy, point)).coupling.held
    edge = covariance[mask].sort(descending=True).values[1]
    assert torch.equal(known == 1, mask & (covariance >= edge)) and int(known.sum()) == 2
    assert meter.mean("held_back") == pytest.approx(2 / 9)


def test_what_text_lacks_is_refused():
    policy, _, point, _ = spoken()
    with pytest.raises(UserError, match="flow and diffusion models"):
        D3PO().loss(policy, point)
    with pytest.raises(UserError, match="timestep_weighting noise is for flow"):
        PolicyGradient(timestep_weighting="noise").loss(policy, point)


class Parts:
    """A policy whose one row of two is scored in two passes, though it says in one."""

    capabilities = Capabilities("categorical")

    def path(self, rollout):
        point = answers([[0.0, 0.0], [0.0, 0.0]], advantage=column(1.0, 1.0))
        yield point.replace(num_decisions=torch.tensor([2, 3]))


def test_whole_answers_are_wanted_of_every_row():
    """By surrogates of whole samples; those of tokens take rows in parts."""
    name, zero = torch.arange(2), torch.zeros(2, 2)
    unread = make_rollout(group=name, row_id=name, sample=zero, logprob=zero, mask=zero == 0)
    with pytest.raises(UserError, match="whole samples"):
        list(PolicyGradient(surrogate=gspo).points(Parts(), unread, Rng.of(0)))
    assert len(list(PolicyGradient().points(Parts(), unread, Rng.of(0)))) == 1
