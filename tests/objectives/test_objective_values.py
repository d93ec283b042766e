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
from mmrl.objectives.terms.entropy import Entropy, EntropyBonus
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
    GVPO,
    NFT,
    REAL,
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
from mmrl.zoo.objectives.group_loss import Groups, Samples
from mmrl.zoo.objectives.grpo_guard import normalised
from mmrl.zoo.objectives.reward_gradient import DIVERGENCES
from mmrl.zoo.objectives.trust_region import gated
from samplers.kernels import flow_sde, memoryless, ode
from samplers.noise import Rng
from samplers.windows import all_but_last, all_steps
from tests.fixtures import toys
from tests.fixtures.records import make_point, make_rollout
from tests.fixtures.swapping import Swapping


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


class Velocities(Swapping):
    """A policy that is a table: the velocity of every row under each name of weights."""

    def __init__(self, **known):
        self.known = known

    def dist(self, point):
        v = self.known[self.name][point.row_id]
        return Gaussian(v, torch.full((len(v), 1), 0.5, dtype=v.dtype))


def renoised(advantage, t=0.5):
    """Rows at one time whose target is 0, so that an error is the mean square of the velocity."""
    rows = len(advantage)
    name = torch.arange(rows)
    return make_point(
        group=name * 0,
        row_id=name,
        state=torch.zeros(rows, 4, dtype=torch.float64),
        target=torch.zeros(rows, 4, dtype=torch.float64),
        mask=torch.ones(rows, 1, dtype=torch.bool),
        num_decisions=torch.ones(rows, dtype=torch.long),
        time=torch.full((rows,), t, dtype=torch.float64),
        x0_per_output=torch.full((rows,), t, dtype=torch.float64),
        advantage=advantage,
    )


# Advantage-weighted matching


def test_a_perfect_prediction_scores_zero_with_a_finite_gradient(subtests):
    for weighting in SCORES:
        with subtests.test(weighting=weighting):
            error = column(0.0).requires_grad_()
            score = SCORES[weighting](error, column(0.5))
            assert score.item() == 0
            score.sum().backward()
            assert error.grad.isfinite().all() and error.grad.item() < 0


def test_awm_counts_the_ratios_beyond_its_clip_on_either_side():
    """Errors 0.04 now; 0.09, 0.04, 0.0 before: log-ratios 0.025, 0, -0.02 at time 1/2."""
    advantage = column(1.0, 1.0, 1.0)
    live = torch.full((3, 4), 0.2, dtype=torch.float64)
    old = column(0.3, 0.2, 0.0).expand(3, 4)
    policy = Velocities(live=live, old=old, ref=live)
    for clip, fraction in (
        ((0.5, 0.01), 1 / 3),
        ((0.01, 0.5), 1 / 3),
        ((0.01, 0.01), 2 / 3),
        (0.5, 0.0),
    ):
        meter = Meter()
        with meter.listening():
            loss = AWM(weighting="t", clip_range=clip, kl=0.0).loss(policy, renoised(advantage))
        assert meter.mean("clip_fraction") == pytest.approx(fraction)
        ratio = [math.exp(0.025), 1.0, math.exp(-0.02)]
        low, high = clip if isinstance(clip, tuple) else (clip, clip)
        expected = [-min(r, min(max(r, 1 - low), 1 + high)) for r in ratio]
        assert loss.flatten().tolist() == pytest.approx(expected, abs=1e-9)


def test_awm_as_published_and_what_it_refuses():
    awm = AWM()
    assert (
        awm.weighting,
        awm.clip_range,
        awm.advantage_clip,
        awm.num_noise_draws,
        awm.kl,
        awm.ema_kl,
    ) == (
        "ghuber",
        1.0,
        1.0,
        6,
        1e-4,
        0.0,
    )
    for wrong in ({"clip_range": 0.0}, {"clip_range": (0.1, 0.0)}, {"advantage_clip": 0.0}):
        with pytest.raises(UserError, match="must be positive"):
            AWM(**wrong)


# Corrections of text


def answers(gap, advantage=None, mask=None):
    """Log-probs of the policy that are ``gap`` [B, L] above those of what sampled."""
    gap = torch.tensor(gap, dtype=torch.float64)
    name = torch.arange(len(gap))
    mask = (
        torch.ones(gap.shape, dtype=torch.bool)
        if mask is None
        else torch.tensor(mask, dtype=torch.bool)
    )
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


def test_importance_bounds_must_differ():
    for low in (3.0, 4.0):
        with pytest.raises(
            UserError, match=f"^importance_sampling: floor {low} must be less than cap 3.0"
        ):
            Importance(floor=low)


def test_off_policy_answers_are_dropped_only_where_they_are_bad_and_far():
    """Mean log(p_sampler / p): 0.3, 0.3, 0.3, 0.1, and exactly the threshold."""
    logp = torch.tensor(
        [[-1.5, -1.1], [-1.5, -1.1], [-1.5, -1.1], [-1.1, -1.1], [-1.25, -1.25]],
        dtype=torch.float64,
    )
    point = answers([[0.0, 0.0]] * 5, advantage=column(-1.0, 1.0, 0.0, -1.0, -1.0))
    meter = Meter()
    with meter.listening():
        weight = off_policy(logp, point, 0.25)
    assert weight.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    assert meter.mean("off_policy") == pytest.approx(0.2)
    recorded = off_policy(
        logp,
        point.replace(provenance=Provenance(), logprob=point.provenance.sampler_logprob),
        0.25,
    )
    assert torch.equal(recorded, weight)


# Centred reward distillation


VELOCITY = [
    [0.1, -0.3, 0.2, 0.0],
    [0.5, 0.1, 0.0, -0.2],
    [-0.4, 0.4, 0.1, 0.1],
    [0.0, 0.0, 0.0, 0.0],
]
BEFORE = [[0.2, -0.1, 0.2, 0.1], [0.4, 0.2, 0.1, -0.2], [-0.4, 0.3, 0.3, 0.1], [0.1, 0.2, 0.3, 0.4]]
ADVANTAGE = [1.5, -7.0, 0.5, 2.0]


def scaled_error(v):
    return sum(x * x for x in v) / 4 / max(sum(abs(x) for x in v) / 4, 1e-5)


@pytest.mark.parametrize("form", ["mse", "bce"])
@pytest.mark.parametrize("temperature", [None, 0.0, 0.25])
@pytest.mark.parametrize("centre", ["group", "batch"])
def test_crd_row_by_row(form, temperature, centre):
    """The implicit reward and the wanted one, both less their mean under each of the weights."""
    beta = 2.0
    clip = 5.0
    slopes = {None: [0.0], 0.0: [1.0, 0.0], 0.25: [4.0, -4.0]}[temperature]
    group = [0, 0, 1, 1]
    optimality = [0.5 + max(-clip, min(a, clip)) / (2 * clip) for a in ADVANTAGE]
    implicit = [
        scaled_error(old) - scaled_error(v) for v, old in zip(VELOCITY, BEFORE, strict=True)
    ]

    def fit(i, slope):
        rows = [j for j in range(4) if centre == "batch" or group[j] == group[i]]
        p = [math.exp(slope * optimality[j]) for j in rows]
        p = [x / sum(p) for x in p]
        goal = optimality[i] - sum(x * optimality[j] for x, j in zip(p, rows, strict=True))
        reward = beta * (implicit[i] - sum(x * implicit[j] for x, j in zip(p, rows, strict=True)))
        if form == "mse":
            return (reward - goal) ** 2
        share = 1 / (1 + math.exp(-goal))
        return math.log1p(math.exp(-reward)) + (1 - share) * reward

    policy = Velocities(
        live=torch.tensor(VELOCITY, dtype=torch.float64),
        old=torch.tensor(BEFORE, dtype=torch.float64),
    )
    objective = CRD(beta=beta, form=form, temperature=temperature, centre=centre, kl=0.0)
    point = renoised(column(*ADVANTAGE)).replace(group=torch.tensor(group))
    loss = objective.loss(policy, objective.couple(point, objective.measure(policy, point)))
    expected = [
        clip / beta * sum(fit(i, slope) for slope in slopes) / len(slopes) for i in range(4)
    ]
    assert loss.flatten().tolist() == pytest.approx(expected, rel=1e-9)


def test_crd_before_its_rows_are_coupled_and_near_the_reference():
    """The centres are 1/2 and 0 then; kl adds the mean square distance to the reference."""
    live = torch.tensor(VELOCITY, dtype=torch.float64)
    old = torch.tensor(BEFORE, dtype=torch.float64)
    policy = Velocities(live=live, old=old, ref=live + 0.5)
    point = renoised(column(*ADVANTAGE))
    plain = CRD(beta=2.0, kl=0.0).loss(policy, point)
    optimality = [max(-5.0, min(a, 5.0)) / 10 for a in ADVANTAGE]
    implicit = [scaled_error(b) - scaled_error(v) for v, b in zip(VELOCITY, BEFORE, strict=True)]
    expected = [2.5 * (2 * (r - 0.0) - a) ** 2 for r, a in zip(implicit, optimality, strict=True)]
    assert plain.flatten().tolist() == pytest.approx(expected, rel=1e-9)
    meter = Meter()
    with meter.listening():
        near = CRD(beta=2.0, kl=3.0).loss(policy, point)
    torch.testing.assert_close(near - plain, column(*[0.75] * 4))
    assert meter.mean("kl") == pytest.approx(0.25)


def test_crds_old_weights_and_what_it_refuses():
    assert [CRD().old_decay(step) for step in (0, 100, 1000)] == pytest.approx([0.25, 0.75, 0.999])
    for wrong in ({"beta": 0.0}, {"advantage_clip": 0.0}, {"temperature": -1.0}):
        with pytest.raises(UserError, match="must be positive"):
            CRD(**wrong)
    assert CRD(temperature=0.0).temperature == 0.0


@pytest.mark.parametrize("centre", ["group", "batch"])
def test_crd_of_a_perfect_old_prediction_is_finite(centre):
    """The mean absolute error is at least 1e-5."""
    zero = torch.zeros(2, 4, dtype=torch.float64)
    policy = Velocities(live=zero + 0.5, old=zero)
    point = renoised(column(1.0, -1.0))
    objective = CRD(kl=0.0, centre=centre)
    loss = objective.loss(policy, objective.couple(point, objective.measure(policy, point)))
    # (0 - 1/10)^2: both rows improved alike
    assert loss.flatten().tolist() == pytest.approx([5 * 0.01, 5 * 0.01])


# Direct group preference optimisation


def test_dgpo_row_by_row(subtests):
    """sigmoid(S) A d with S = beta mean(A (d - d_ref)), without a gradient where a sample has moved
    far."""
    for reference in ["ref", "old"]:
        for clip in [None, 0.02]:
            for kl in [0.0, 2.0]:
                with subtests.test(reference=reference, clip=clip, kl=kl):
                    beta = 3.0
                    group = [0, 0, 1, 1]
                    start = [
                        [0.3, 0.0, 0.1, -0.1],
                        [0.4, 0.0, 0.2, 0.1],
                        [-0.2, 0.2, 0.3, 0.1],
                        [0.2, 0.1, 0.0, -0.1],
                    ]
                    tables = {"live": VELOCITY, "old": BEFORE, "ref": start}
                    error = {
                        name: [sum(x * x for x in v) / 4 for v in table]
                        for name, table in tables.items()
                    }
                    advantage = [max(-5.0, min(a, 5.0)) for a in ADVANTAGE]
                    each = [
                        advantage[i] * beta * (error["live"][i] - error[reference][i])
                        for i in range(4)
                    ]
                    score = [
                        sum(each[j] for j in range(4) if group[j] == group[i]) / 2 for i in range(4)
                    ]
                    weight = [1 / (1 + math.exp(-s)) for s in score]
                    ratio = [
                        math.exp(b - d) for b, d in zip(error["old"], error["live"], strict=True)
                    ]
                    far = [
                        clip is not None
                        and (ratio[i] > 1 + clip if advantage[i] > 0 else ratio[i] < 1 - clip)
                        for i in range(4)
                    ]
                    tables = {
                        name: torch.tensor(table, dtype=torch.float64)
                        for name, table in tables.items()
                    }
                    live = tables.pop("live").requires_grad_()
                    objective = DGPO(beta=beta, clip_range=clip, kl=kl, reference=reference)
                    policy = Velocities(live=live, **tables)
                    point = renoised(column(*ADVANTAGE)).replace(group=torch.tensor(group))
                    meter = Meter()
                    with meter.listening():
                        with torch.no_grad():
                            ready = objective.couple(point, objective.measure(policy, point))
                        loss = objective.loss(policy, ready)
                    apart = [
                        sum((x - y) ** 2 for x, y in zip(v, s, strict=True)) / 4
                        for v, s in zip(VELOCITY, start, strict=True)
                    ]
                    expected = [
                        weight[i] * advantage[i] * error["live"][i] + kl * apart[i]
                        for i in range(4)
                    ]
                    assert loss.flatten().tolist() == pytest.approx(expected, rel=1e-9)
                    assert meter.mean("dgpo/weight") == pytest.approx(sum(weight) / 4)
                    if clip:
                        assert (
                            meter.mean("clip_fraction") == pytest.approx(sum(far) / 4)
                            and 0 < sum(far) < 4
                        )
                        assert meter.mean("ratio") == pytest.approx(sum(ratio) / 4)
                    if kl:
                        assert meter.mean("kl") == pytest.approx(sum(apart) / 4)
                    loss.sum().backward()
                    for i in range(4):
                        slope = 0.0 if far[i] else weight[i] * advantage[i]
                        gradient = [
                            slope * x / 2 + kl * (x - s) / 2
                            for x, s in zip(VELOCITY[i], start[i], strict=True)
                        ]
                        assert live.grad[i].tolist() == pytest.approx(gradient, abs=1e-12)


def test_dgpo_as_published_and_what_it_keeps_and_refuses():
    dgpo = DGPO()
    assert (dgpo.beta, dgpo.clip_range, dgpo.advantage_clip, dgpo.kl, dgpo.num_noise_draws) == (
        100.0,
        1e-2,
        5.0,
        0.02,
        4,
    )
    assert [dgpo.old_decay(step) for step in (0, 100, 1000)] == pytest.approx([0.0, 0.1, 0.3])
    options_by_snapshots = {
        ("ref",): {"clip_range": None},
        ("old", "ref"): {},
        ("old",): {"reference": "old", "kl": 0.0, "clip_range": None},
    }
    for snapshots, chosen in options_by_snapshots.items():
        assert DGPO(**chosen).snapshots == snapshots
    assert DGPO(clip_range=None, behavior_policy="old").snapshots == ("old", "ref")
    assert DGPO(reference="old").snapshots == ("old", "ref")
    for wrong in ({"beta": 0.0}, {"advantage_clip": 0.0}, {"clip_range": -1.0}):
        with pytest.raises(UserError, match="must be positive"):
            DGPO(**wrong)


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
    return policy, rollout.replace(advantage=torch.zeros(4, 1, dtype=torch.float64))


def transitions(policy, rollout, name):
    """(mean, std) of every step of the path under these weights."""
    steps = []
    with policy.weights.using(name), torch.no_grad():
        for k in range(3):
            state = make_point(
                group=rollout.group,
                cond=rollout.cond,
                row_id=rollout.row_id,
                state=rollout.latents.states[:, k],
                time=rollout.latents.time[:, k],
                next_time=rollout.latents.time[:, k + 1],
                noise_level=rollout.latents.noise_level[:, k],
                mask=rollout.mask[:, :1],
            )
            dist = policy.dist(state)
            steps.append((dist.mean, dist.std))
    return steps


DIVERGENCE = {  # of Gaussians that are d standard deviations apart
    "kl": lambda d2: d2 / 2,
    "hellinger": lambda d2: 1 - math.exp(-d2 / 8),
    "total_variation": lambda d2: math.erf(math.sqrt(d2) / (2 * math.sqrt(2))),
    "chi2": lambda d2: math.exp(d2) - 1,
}


def test_draft_pays_for_the_mean_divergence_of_its_steps(subtests):
    """Per dimension; a step without noise counts as if the clean prediction had variance 1/2."""
    for kernel in [flow_sde, ode]:
        for divergence in DIVERGENCE:
            with subtests.test(kernel=kernel, divergence=divergence):
                policy, rollout = walked(sde_type=kernel)
                losses = []
                for kl in (0.0, 2.0):
                    objective = Draft(last=2, kl=kl, divergence=divergence)
                    objective.attach(toys.smooth_reward)
                    (point,) = objective.points(policy, rollout, Rng.of(0))
                    losses.append(objective.loss(policy, point)[:, 0])
                assert losses[0].tolist() == pytest.approx(
                    (-toys.smooth_reward(rollout.sample, None)).tolist(), abs=1e-9
                )
                paid = torch.zeros(4, dtype=torch.float64)
                pairs = list(
                    zip(
                        transitions(policy, rollout, "live"),
                        transitions(policy, rollout, "ref"),
                        strict=True,
                    )
                )
                for k, ((mean, std), (base, _)) in list(enumerate(pairs))[1:]:
                    for row in range(4):
                        length = float(
                            rollout.latents.time[row, k] - rollout.latents.time[row, k + 1]
                        )
                        scale = float(std[row]) if float(std[row]) > 0 else length * math.sqrt(0.5)
                        paid[row] += (
                            DIVERGENCE[divergence](
                                float(((mean[row] - base[row]) / scale).square().mean())
                            )
                            / 2
                        )
                torch.testing.assert_close(losses[1] - losses[0], 2 * paid, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("sde", [all_steps, all_but_last])
@pytest.mark.parametrize("strength", [None, 0.5])
def test_adjoint_matchings_loss_step_by_step(strength, sde):
    """1/2 |(mean - base) / std + std a|^2 per dimension; a carried back by Jacobians of the base's
    means."""
    policy, rollout = walked(sde_type=memoryless, noise_level=1.0, noise_window=sde)
    objective = AdjointMatching() if strength is None else AdjointMatching(strength=strength)
    objective.attach(toys.smooth_reward)
    (point,) = objective.points(policy, rollout, Rng.of(0))
    meter = Meter()
    with meter.listening():
        computed = objective.loss(policy, point)[:, 0]
    assert meter.mean("reward/differentiated") == pytest.approx(
        toys.smooth_reward(rollout.sample, None).mean().item()
    )
    end = rollout.sample.clone().requires_grad_()
    (adjoint,) = torch.autograd.grad(-(strength or 1.0) * toys.smooth_reward(end, None).sum(), end)
    live, base = (transitions(policy, rollout, name) for name in ("live", "ref"))
    expected = torch.zeros(4, dtype=torch.float64)
    for k in (2, 1, 0):
        (mean, std), (start, _) = live[k], base[k]
        if (std > 0).all():
            expected += 0.5 * ((mean - start) / std + std * adjoint).square().mean(1)

        def base_mean(x, k=k):
            state = make_point(
                group=rollout.group,
                cond=rollout.cond,
                row_id=rollout.row_id,
                state=x,
                time=rollout.latents.time[:, k],
                next_time=rollout.latents.time[:, k + 1],
                noise_level=rollout.latents.noise_level[:, k],
                mask=rollout.mask[:, :1],
            )
            return policy.dist(state).mean

        with policy.weights.using("ref"):
            # [B, 2, B, 2]
            jacobian = torch.autograd.functional.jacobian(base_mean, rollout.latents.states[:, k])
        adjoint = torch.einsum("bibj,bi->bj", jacobian, adjoint)
    torch.testing.assert_close(computed, expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("objective", [Draft, AdjointMatching])
def test_without_a_differentiable_reward_nothing_can_be_followed(objective):
    policy, rollout = walked(sde_type=memoryless, noise_level=1.0)
    built = objective()
    (point,) = built.points(policy, rollout, Rng.of(0))
    with pytest.raises(UserError, match="needs a differentiable reward"):
        built.loss(policy, point)
    built.attach(lambda sample, prompts: torch.zeros(len(sample)))
    with pytest.raises(UserError, match="gives no gradient"):
        built.loss(policy, point)


# A trust region by divergence


def test_flow_dppo_of_an_unchanged_ratio_is_never_dropped():
    zero = column(0.0, 0.0)
    far = column(1.0, 1.0)
    mask = torch.ones(2, 1, dtype=torch.bool)
    assert gated(0.5, zero, zero, column(1.0, -1.0), far, mask).flatten().tolist() == [-1.0, 1.0]
    edge = gated(1.0, column(0.1, -0.1), zero, column(1.0, -1.0), far, mask)
    assert edge.flatten().tolist() == [0.0, 0.0], "the threshold itself is reached"


def test_flow_dppo_is_seen_by_the_gate_and_refuses_what_is_not_positive():
    policy, rollout = walked()
    point = next(iter(FlowDPPO().points(policy, rollout, Rng.of(0))))
    point = point.replace(logprob=point.logprob - 0.25, advantage=column(*[1.0] * len(point)))
    meter = Meter()
    with meter.listening():
        FlowDPPO().loss(policy, point)
    assert meter.top("log_ratio") == pytest.approx(0.25) and meter.mean("ratio") == pytest.approx(
        math.exp(0.25)
    )
    assert meter.mean("kl_old") == 0.0
    for wrong in ({"threshold": 0.0}, {"advantage_clip": 0.0}):
        with pytest.raises(UserError, match="must be positive"):
            FlowDPPO(**wrong)


@pytest.mark.parametrize("gap", [1000.0, 15.0, -15.0, -1000.0])
def test_a_bounded_kl_of_far_log_probs_has_a_finite_gradient(gap):
    logp = column(0.0).requires_grad_()
    kl = estimate(logp, column(gap), "k3", bounded=True)
    assert kl.item() == 10.0
    kl.sum().backward()
    assert logp.grad.item() == 0.0
    near = estimate(column(0.0), column(0.5), "k3", bounded=True).item()
    assert (
        near
        == pytest.approx(math.exp(0.5) - 1.5)
        == estimate(column(0.0), column(0.5), "k3").item()
    )
    assert estimate(column(0.0), column(3.0), "k3").item() == pytest.approx(math.exp(3.0) - 4)


def test_the_weight_of_a_kl_goes_on_a_line_from_start():
    kl = KL(weight=0.5, start=0.1, over=4)
    assert [kl.at(n) for n in (0, 1, 4, 9)] == pytest.approx([0.1, 0.2, 0.5, 0.5])
    assert [KL(weight=0.5).at(n) for n in (0, 9)] == [0.5, 0.5]
    assert KL(weight=0.5, over=2).at(1) == 0.25 and KL().at(0) == 0.0 and KL().form is None


# Tokens that are held back


def covariances(values, known=None):
    """Tokens of one row with these covariances."""
    point = answers([[0.0] * len(values)])
    return torch.tensor([values]), point.replace(
        coupling=None if known is None else Drawing(draw=torch.tensor([known]))
    )


def test_clip_cov_draws_from_the_tokens_inside_its_window():
    values = [-2.0, 0.5, 2.0, 6.0, 3.0, 1.0, 5.0, 4.0]
    known = [0.1, 0.2, 0.7, 0.3, 0.4, 0.05, 0.06, 0.9]
    covariance, point = covariances(values, known)
    every = torch.zeros(8)
    inside = [2, 4, 7]  # between 1 and 5
    for share, count in ((1.0, 3), (0.25, 2), (1e-4, 1)):
        drawn = sorted(inside, key=lambda i: known[i])[:count]
        chosen = ClipCov(share=share).chosen(every, covariance, point)
        assert chosen[0].nonzero()[:, 0].tolist() == sorted(drawn)
    assert not ClipCov(low=10.0, high=11.0).chosen(every, covariance, point).any()
    masked = point.replace(mask=point.mask & (torch.arange(8) != 4))
    assert ClipCov(share=1.0).chosen(every, covariance, masked)[0].nonzero()[:, 0].tolist() == [
        2,
        7,
    ]
    assert (ClipCov().share, ClipCov().low, ClipCov().high) == (2e-4, 1.0, 5.0)


def test_kl_cov_takes_the_highest_covariances_and_at_least_one():
    values = [-2.0, 0.5, 2.0, 6.0, 3.0, 1.0, 5.0, 4.0]
    covariance, point = covariances(values)
    for share, chosen in ((1e-4, [3]), (0.25, [3, 6]), (0.5, [3, 4, 6, 7]), (1.0, list(range(8)))):
        computed = KLCov(share=share).chosen(torch.tensor(values), covariance, point)
        assert computed[0].nonzero()[:, 0].tolist() == chosen
    assert (KLCov().share, KLCov().weight) == (2e-4, 1.0)


# Defaults of the papers and options that mean nothing


def test_as_published():
    for objective, published in (
        (FPO(), {"clip_range": 0.05, "advantage_clip": 5.0, "num_noise_draws": 8}),
        (NFT(), {"beta": 1.0, "advantage_clip": 5.0, "kl": 1e-4, "num_noise_draws": 9, "decay": 1}),
        (
            CRD(),
            {
                "beta": 1.0,
                "advantage_clip": 5.0,
                "kl": 0.1,
                "ref_guidance": 1.0,
                "num_noise_draws": 4,
                "centre": "group",
            },
        ),
        (D3PO(), {"beta": 0.1}),
        (DiffusionDPO(), {"beta": 100.0, "num_noise_draws": 1}),
        (FlowDPPO(), {"threshold": 1e-5, "advantage_clip": 5.0, "std": "exact"}),
        (Guard(), {"clip_range": 2e-6, "balance": True}),
        (Importance(), {"level": "token", "cap": 3.0, "floor": 0.0}),
    ):
        options = {name: getattr(objective, name) for name in published}
        assert options == published, type(objective).__name__


def test_surrogates_as_published():
    """Their defaults, by the loss: GMPO's bounds of 0.4, SAPO's and VESPO's temperatures by the
    sign of A."""
    old = torch.zeros(1, 1, dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    up = column(1.0)
    down = column(-1.0)
    far = column(2.0)
    back = column(-2.0)
    assert gmpo(far, old, up, mask).item() == pytest.approx(-math.exp(0.4))
    assert gmpo(back, old, down, mask).item() == pytest.approx(math.exp(-0.4))
    half = column(math.log(1.5))
    for advantage, tau in ((up, 1.0), (down, 1.05)):
        gate = 4 / tau / (1 + math.exp(-tau * 0.5))
        assert sapo(half, old, advantage, mask).item() == pytest.approx(-advantage.item() * gate)
    for advantage, (k, rate) in ((up, (2.0, 3.0)), (down, (3.0, 2.0))):
        weight = math.exp(rate) * 1.5**k * math.exp(-rate * 1.5)
        assert vespo(half, old, advantage, mask).item() == pytest.approx(
            -weight * advantage.item() * math.log(1.5)
        )


@pytest.mark.parametrize(
    ("objective", "wrong"),
    [
        (FPO, {"clip_range": 0.0}),
        (FPO, {"clip_range": (0.1, 0.0)}),
        (FPO, {"advantage_clip": 0.0}),
        (D3PO, {"beta": 0.0}),
        (DiffusionDPO, {"beta": 0.0}),
        (SePPO, {"beta": 0.0}),
        (NFT, {"beta": 0.0}),
        (NFT, {"advantage_clip": 0.0}),
        (RewardWeightedRegression, {"beta": 0.0}),
    ],
)
def test_options_that_mean_nothing_are_refused(objective, wrong):
    with pytest.raises(UserError, match="must be positive"):
        objective(**wrong)


@pytest.mark.parametrize("objective", [Draft, AdjointMatching])
def test_paths_of_tokens_cannot_be_followed(objective):
    policy = toys.make("causal", double=True)
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(2), 2, Rng.of("walk"))
    with pytest.raises(UserError, match="follows the sampler's steps"):
        objective().points(policy, rollout, Rng.of(0))


@pytest.mark.parametrize("parts", [10, 100])
def test_a_share_of_the_decisions_is_rounded_down_exactly(parts):
    """int(n k / parts) in whole numbers, at least one; 0.3 * 10 must not become 2, nor 0.84 * 75 in
    float32 62."""
    for n in (*range(1, 21), 75, 100, 150, 300):
        for k in range(1, parts + 1):
            chosen = subset(torch.ones(1, n, dtype=torch.bool), k / parts, None, torch.zeros(1))
            count = max(1, n * k // parts)
            assert chosen[0].tolist() == [True] * count + [False] * (n - count), (n, k)


def test_surrogates_by_bounds_and_small_advantages():
    old = torch.zeros(1, 1, dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert gspo(column(1.0), old, column(1.0), mask).item() == pytest.approx(-(1 + 4e-4), abs=1e-12)
    assert gspo(column(-1.0), old, column(-1.0), mask).item() == pytest.approx(1 - 3e-4, abs=1e-12)
    assert gmpo(
        column(1.0), old, column(0.5), mask, clip_low=0.1, clip_high=None
    ).item() == pytest.approx(-0.5 * math.exp(0.1))
    assert gmpo(
        column(1.0), old, column(0.5), mask, clip_low=0.1, clip_high=0.2
    ).item() == pytest.approx(-0.5 * math.exp(0.2))
    assert gmpo(column(1.0), old, column(-0.5), mask).item() == pytest.approx(0.5 * math.e), (
        "the other side is free"
    )
    empty = row_mean(torch.ones(2, 3), torch.tensor([[False] * 3, [True, True, False]]))
    assert empty.tolist() == [[0.0], [1.0]]


def samples(ratio, advantage, group):
    ratio, advantage = (torch.tensor(x).double() for x in (ratio, advantage))
    return Samples(
        ratio, ratio, advantage, torch.ones_like(ratio).long(), Groups(torch.tensor(group))
    )


def test_real_group_by_group():
    """Groups with both kinds of answers, with good ones only, with bad ones only; an advantage of 0
    is neither."""
    score = [0.3, -0.2, 0.5, 0.1, -0.4, 0.7, 0.2]
    advantage = [1.0, -2.0, 0.0, 0.5, 1.0, -1.0, -0.5]
    group = [0, 0, 0, 1, 1, 2, 2]
    good = math.log1p(math.exp(-0.3))
    bad = math.log1p(math.exp(-0.2))
    computed = REAL(tau=1.0).of_group(samples(score, advantage, group))
    assert computed.tolist() == pytest.approx([good + bad] * 3 + [0.0] * 4, abs=1e-7)


def blank():
    """A rollout that is not read, of single samples."""
    name = torch.arange(2)
    zero = torch.zeros(2, 2)
    return make_rollout(group=name, row_id=name, sample=zero, logprob=zero, mask=zero == 0)


class Parts:
    """A policy whose one row of two is scored in two passes."""

    capabilities = Capabilities("categorical")

    def path(self, rollout):
        point = answers([[0.0, 0.0], [0.0, 0.0]], advantage=column(1.0, 1.0))
        yield point.replace(num_decisions=torch.tensor([2, 3]))


def test_whole_answers_are_wanted_of_every_row():
    """Of a policy that says it scores a row in one pass."""
    with pytest.raises(UserError, match="whole samples"):
        list(PolicyGradient(surrogate=gspo).points(Parts(), blank(), Rng.of(0)))


def test_what_preferences_and_nft_tell_the_log():
    policy, rollout = walked()
    rollout = rollout.replace(advantage=column(1.0, -1.0, 0.5, -0.5))
    objective = D3PO()
    meter = Meter()
    point = next(iter(objective.points(policy, rollout, Rng.of(0))))
    measured = column(0.2, -0.1, -0.3, 0.1)
    with meter.listening():
        objective.couple(point, measured)
    assert meter.mean("dpo/right") == 0.5
    losses = [math.log1p(math.exp(-0.1 * margin)) for margin in (0.3, -0.4)]
    assert meter.mean("dpo/loss") == pytest.approx(sum(losses) / 2)
    live = torch.tensor(VELOCITY, dtype=torch.float64)
    policy = Velocities(live=live, old=live, ref=live + 0.5)
    meter = Meter()
    with meter.listening():
        NFT(kl=1.0).loss(policy, renoised(column(*ADVANTAGE)))
    assert meter.mean("kl") == pytest.approx(0.25) and meter.mean("nft/moved") == 0.0


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
    tables = {
        name: Rng.of(name).normal(torch.arange(4), (3, 5), dtype=torch.float64)
        for name in ("live", "ref", "old")
    }
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
    return policy, rollout, tables


def test_entropy_and_kl_of_text_by_hand():
    policy, rollout, tables = spoken()
    (point,) = PolicyGradient().points(policy, rollout, Rng.of(0))
    logp, ref = (tables[name].log_softmax(-1) for name in ("live", "ref"))
    mask = rollout.mask
    plain = PolicyGradient().loss(policy, point)
    entropy = torch.where(mask, -(logp.exp() * logp).sum(-1), 0.0)
    u = (ref - logp)[..., 0]
    ratio = (logp[..., 0] - rollout.logprob).exp()
    expected = torch.maximum(-rollout.advantage * ratio, -rollout.advantage * ratio.clamp(0.8, 1.2))
    torch.testing.assert_close(plain[mask], expected[mask])
    for objective, extra in (
        (PolicyGradient(entropy=0.5), -0.5 * entropy),
        (PolicyGradient(kl=0.3), 0.3 * torch.where(mask, u.exp() - u - 1, 0.0)),
        (
            PolicyGradient(kl=KL(weight=0.3, form="exact")),
            0.3 * torch.where(mask, (logp.exp() * (logp - ref)).sum(-1), 0.0),
        ),
        (
            PolicyGradient(kl=KL(weight=0.3, corrected=True)),
            0.3 * ratio * torch.where(mask, u.exp() - u - 1, 0.0),
        ),
    ):
        meter = Meter()
        with meter.listening():
            loss = objective.loss(policy, point)
        torch.testing.assert_close((loss - plain)[mask], extra[mask])
        assert meter.mean("entropy") == pytest.approx(float(entropy[mask].mean()))
        if objective.kl.weight:
            assert meter.mean("kl") == pytest.approx(
                float((extra if not objective.kl.corrected else extra / ratio)[mask].mean() / 0.3)
            )
            assert objective.snapshots == ("ref",)


def test_clipped_tokens_are_counted_by_the_side_they_leave():
    policy, rollout, tables = spoken()
    ratio = torch.tensor(
        [[1.5, 0.5, 1.0], [1.5, 0.5, 9.0], [1.5, 9.0, 9.0], [1.5, 1.1, 0.5]], dtype=torch.float64
    )
    logp = tables["live"].log_softmax(-1)[..., 0]
    rollout = rollout.replace(logprob=logp - ratio.log(), advantage=column(0.5, -1.0, 0.0, 2.0))
    (point,) = PolicyGradient().points(policy, rollout, Rng.of(0))
    meter = Meter()
    with meter.listening():
        PolicyGradient().loss(policy, point)
    assert meter.mean("clip/high") == pytest.approx(2 / 9), "1.5 where A > 0, twice of nine tokens"
    assert meter.mean("clip/low") == pytest.approx(1 / 9) and meter.mean(
        "clip_fraction"
    ) == pytest.approx(3 / 9)
    assert meter.mean("ratio") == pytest.approx(float(ratio[rollout.mask].mean()))


@pytest.mark.parametrize("width", [None, 1, 3])
def test_a_kl_in_the_reward_is_that_of_the_sampled_sequence(width):
    policy, rollout, tables = spoken(width)
    rewards = Rewards({"right": torch.ones(4, dtype=torch.float64)}, {"right": 2.0})
    shaped = PolicyGradient(kl=KL(weight=0.3, where="reward")).shaped(policy, rollout, rewards)
    gap = rollout.logprob - tables["ref"].log_softmax(-1)[..., 0]
    torch.testing.assert_close(shaped["kl"], torch.where(rollout.mask, gap, 0.0).sum(1))
    assert shaped.weights == {"right": 2.0, "kl": -0.3} and torch.equal(
        shaped["right"], rewards["right"]
    )
    for objective in (PolicyGradient(kl=0.3), PolicyGradient(kl=KL(where="reward"))):
        assert objective.shaped(policy, rollout, rewards) is rewards


@pytest.mark.parametrize("top", [0.2, 0.5, 0.75])
def test_tokens_of_high_entropy_lie_above_the_quantile(top):
    policy, rollout, _ = spoken()
    objective = PolicyGradient(top_entropy=top)
    (point,) = objective.points(policy, rollout, Rng.of(0))
    measured = objective.measure(policy, point)
    known = objective.couple(point, measured).coupling.weight
    edge = torch.quantile(measured[rollout.mask], 1 - top)
    assert torch.equal(known[rollout.mask] == 1, measured[rollout.mask] >= edge)
    plain = PolicyGradient().loss(policy, point)
    torch.testing.assert_close(
        objective.loss(policy, point.replace(coupling=TokenWeights(weight=known)))[rollout.mask],
        (plain * known)[rollout.mask],
    )
    assert objective.couples(policy) == "groups" and not PolicyGradient().couples(policy)
    assert objective.couple(point.replace(mask=point.mask & False), measured).coupling is None


def test_surrogates_of_tokens_take_rows_in_parts():
    assert len(list(PolicyGradient().points(Parts(), blank(), Rng.of(0)))) == 1


def test_kl_cov_pays_for_the_log_ratio_of_the_tokens_it_holds():
    policy, rollout, tables = spoken()
    (point,) = PolicyGradient().points(policy, rollout, Rng.of(0))
    known = torch.tensor(
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64
    )
    gap = tables["live"].log_softmax(-1)[..., 0] - rollout.logprob
    expected = -rollout.advantage * gap.exp() + 0.25 * known * gap.abs()
    loss = KLCov(weight=0.25).loss(policy, point.replace(coupling=HeldBack(held=known)))
    torch.testing.assert_close(loss[rollout.mask], expected[rollout.mask])


@pytest.mark.parametrize("shift", [0.25, -0.25])
def test_ratios_beyond_the_clip_are_counted_on_both_sides(shift):
    policy, rollout = walked()
    rollout = rollout.replace(advantage=column(1.0, 1.0, 1.0, 1.0))
    point = next(iter(PolicyGradient().points(policy, rollout, Rng.of(0))))
    point = point.replace(logprob=point.logprob - shift)
    for clip, fraction in (
        (0.2, 1.0),
        ((0.2, 9.0), float(shift < 0)),
        ((0.9, 0.2), float(shift > 0)),
    ):
        meter = Meter()
        with meter.listening():
            PolicyGradient(clip_range=clip).loss(policy, point)
        assert meter.mean("clip_fraction") == fraction


def test_guards_ratio_of_a_step_without_noise_is_one():
    zero = torch.zeros(2, 3)
    old = Gaussian(zero, torch.zeros(2, 1))
    assert normalised(Gaussian(zero + 0.5, torch.zeros(2, 1)), old, zero).abs().max() == 0


def test_gvpo_of_small_groups():
    """1/2 sum_i (R_i - mean R - (A_i - mean A))^2 / (n - 1), n times a row's share of the mean; 0
    for one alone."""
    value = GVPO(beta=1.0).of_group(samples([0.3, -0.1, 0.7], [1.0, -1.0, 2.0], [0, 0, 1]))
    assert value.tolist() == pytest.approx([0.8**2 / 2 * 2, 0.8**2 / 2 * 2, 0.0], abs=1e-7)


def test_an_entropy_bonus_that_adapts_starts_small_and_may_grow_to_one():
    objective = PolicyGradient(entropy=Entropy(target=2.0))
    term = objective.term(EntropyBonus)
    bonuses = []
    for n, entropy in enumerate([1.0, 1.0, 3.0, 2.0]):
        objective.adapt(n, {"entropy": entropy})
        bonuses.append(term.bonus)
    assert bonuses == pytest.approx([0.005, 0.01, 0.0, 0.0]) and Entropy().high == 1.0


def test_a_preference_is_right_where_the_better_sample_fits_better():
    live = torch.tensor([[0.1] * 4, [0.3] * 4, [0.4] * 4, [0.2] * 4], dtype=torch.float64)
    ref = torch.full((4, 4), 0.25, dtype=torch.float64)
    policy = Velocities(live=live, ref=ref)
    meter = Meter()
    point = renoised(column(1.0, -1.0, 1.0, -1.0)).replace(group=torch.tensor([0, 0, 1, 1]))
    objective = DiffusionDPO(beta=1.0)
    with meter.listening():
        ready = objective.couple(point, objective.measure(policy, point))
    margins = [0.01 - 0.09, 0.16 - 0.04]  # the better one's error less the worse one's
    assert meter.mean("dpo/right") == 0.5
    assert meter.mean("dpo/loss") == pytest.approx(
        sum(math.log1p(math.exp(m / 2)) for m in margins) / 2
    )
    slope = [1 / (1 + math.exp(-m / 2)) for m in margins]
    assert ready.coupling.slope.flatten().tolist() == pytest.approx(
        [slope[0], -slope[0], slope[1], -slope[1]]
    )


def test_crds_gradient_leaves_the_scale_of_the_error_alone():
    """d loss / d v = -(2 clip / beta) beta (beta r_c - a_c) dq / dv with dq / dv = v / 2 over the
    fixed mean |v|."""
    live = torch.tensor(VELOCITY, dtype=torch.float64).requires_grad_()
    policy = Velocities(live=live, old=torch.tensor(BEFORE, dtype=torch.float64))
    objective = CRD(beta=2.0, kl=0.0)
    point = renoised(column(*ADVANTAGE))
    with torch.no_grad():
        ready = objective.couple(point, objective.measure(policy, point))
    assert ready.coupling.old_error is not None
    loss = objective.loss(policy, ready)
    (gradient,) = torch.autograd.grad(loss.sum(), live)
    optimality = [max(-5.0, min(a, 5.0)) / 10 for a in ADVANTAGE]
    implicit = [scaled_error(b) - scaled_error(v) for v, b in zip(VELOCITY, BEFORE, strict=True)]
    for i, v in enumerate(VELOCITY[:3]):
        gap = 2 * (implicit[i] - sum(implicit) / 4) - (optimality[i] - sum(optimality) / 4)
        scale = sum(map(abs, v)) / 4
        expected = [-2.5 * 2 * gap * 2 * x / 2 / scale for x in v]
        assert gradient[i].tolist() == pytest.approx(expected, rel=1e-6)


def test_crd_counts_rows_with_any_decision_to_train_on():
    """A row without one, which an idle process has, is not in the mean."""
    policy = Velocities(
        live=torch.tensor(VELOCITY, dtype=torch.float64),
        old=torch.tensor(BEFORE, dtype=torch.float64),
    )
    point = renoised(column(*ADVANTAGE))
    objective = CRD(kl=0.0)
    alone = objective.couple(point[:3], objective.measure(policy, point[:3])).coupling
    idle = point.replace(mask=torch.tensor([True, True, True, False])[:, None])
    whole = objective.couple(idle, objective.measure(policy, idle)).coupling
    torch.testing.assert_close(whole.optimality[:3], alone.optimality)
    torch.testing.assert_close(whole.implicit_mean[:3], alone.implicit_mean)


def test_awm_is_seen_by_the_gate():
    live = torch.full((2, 4), 0.2, dtype=torch.float64)
    policy = Velocities(live=live, old=live * 1.5, ref=live)
    meter = Meter()
    with meter.listening():
        AWM(weighting="t").loss(policy, renoised(column(1.0, 1.0)))
    assert meter.top("log_ratio") == pytest.approx(0.5 * (0.09 - 0.04))
    assert meter.mean("ratio") == pytest.approx(math.exp(0.025)) and meter.mean("kl") == 0.0


def test_covariances_are_about_the_means_of_all_tokens():
    """The highest of (log p - mean) (A - mean) over nine tokens is held back, and counted."""
    policy, rollout, tables = spoken()
    objective = KLCov(share=0.25)
    meter = Meter()
    (point,) = objective.points(policy, rollout, Rng.of(0))
    logp = tables["live"].log_softmax(-1)[..., 0]
    advantage = rollout.advantage.expand(4, 3)
    mask = rollout.mask
    covariance = (logp - logp[mask].mean()) * (advantage - advantage[mask].mean())
    with meter.listening():
        known = objective.couple(point, objective.measure(policy, point)).coupling.held
    edge = covariance[mask].sort(descending=True).values[1]
    assert torch.equal(known == 1, mask & (covariance >= edge)) and int(known.sum()) == 2
    assert meter.mean("held_back") == pytest.approx(2 / 9)


def test_clip_cov_takes_held_tokens_out_of_the_policy_loss():
    policy, rollout, _ = spoken()
    (point,) = PolicyGradient().points(policy, rollout, Rng.of(0))
    plain = PolicyGradient().loss(policy, point)
    known = torch.tensor(
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64
    )
    mask = rollout.mask
    torch.testing.assert_close(
        ClipCov().loss(policy, point.replace(coupling=HeldBack(held=known)))[mask],
        (plain * (1 - known))[mask],
    )
    torch.testing.assert_close(ClipCov().loss(policy, point)[mask], plain[mask])
    unclipped = (
        -rollout.advantage * (policy.dist(point).log_prob(point.target) - point.logprob).exp()
    )
    torch.testing.assert_close(KLCov().loss(policy, point)[mask], unclipped[mask])


def test_divergences_of_equal_and_of_far_means():
    for name, d2 in (("kl", 0.0), ("hellinger", 0.0), ("total_variation", 0.0), ("chi2", 0.0)):
        distance = column(d2).requires_grad_()
        value = DIVERGENCES[name](distance)
        value.sum().backward()
        assert value.item() == pytest.approx(0.0, abs=1e-6) and distance.grad.isfinite().all()
    assert (
        DIVERGENCES["chi2"](column(1e4)).isfinite().all()
        and DIVERGENCES["hellinger"](column(1e4)).item() == 1.0
    )


@pytest.mark.parametrize("form", ["k1", "k3"])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_plus_gives_an_estimator_the_gradient_of_k2(form, bounded):
    logp = column(-1.0, 0.5, 0.0).requires_grad_()
    ref = column(0.0, 0.0, 0.7)
    value = estimate(logp, ref, f"{form}+", bounded)
    torch.testing.assert_close(value.detach(), estimate(logp, ref, form, bounded).detach())
    value.sum().backward()
    torch.testing.assert_close(logp.grad, (logp - ref).detach())


def test_fpo_clips_ratio_and_advantage_row_by_row():
    """The mean over a row's draws has one ratio; beyond the clip there is no gradient left."""
    advantage = [7.0, -7.0, 1.0, -1.0]
    point = renoised(column(*advantage))
    twice = Point.cat([point, point])
    measured = column(0.2, 0.2, 0.0, -0.2, 0.1, 0.1, 0.02, 0.0)
    meter = Meter()
    with meter.listening():
        ready = FPO(clip_range=(0.05, 0.12)).couple(twice, measured).coupling.slope[:, 0]
    mean = [0.15, 0.15, 0.01, -0.1]
    far = [True, False, False, True]
    expected = [
        0.0 if far[i] else max(-5.0, min(advantage[i], 5.0)) * math.exp(mean[i]) for i in range(4)
    ]
    assert ready.tolist() == pytest.approx(expected * 2)
    assert meter.mean("clip_fraction") == 0.5 and meter.top("log_ratio") == pytest.approx(0.15)


def test_d3po_is_seen_by_the_gate_and_wants_gaussian_steps():
    policy, rollout = walked()
    rollout = rollout.replace(advantage=column(1.0, -1.0, 0.5, -0.5))
    point = next(iter(D3PO().points(policy, rollout, Rng.of(0))))
    meter = Meter()
    with meter.listening():
        D3PO().loss(policy, point.replace(logprob=point.logprob - 0.25))
    assert meter.top("log_ratio") == pytest.approx(0.25)
    policy, rollout, _ = spoken()
    (point,) = PolicyGradient().points(policy, rollout, Rng.of(0))
    with pytest.raises(UserError, match="flow and diffusion models"):
        D3PO().loss(policy, point)
    with pytest.raises(UserError, match="timestep_weighting noise is for flow"):
        PolicyGradient(timestep_weighting="noise").loss(policy, point)
    with pytest.raises(UserError, match="compares means"):
        normalised(
            Gaussian(torch.zeros(1, 2), torch.ones(1, 1)),
            Categorical(torch.zeros(1, 2, 3)),
            torch.zeros(1, 2),
        )


def test_the_range_of_grpos_options():
    for chosen in (
        {"advantage_clip": 0.5},
        {"clip_range": (0.01, 0.5)},
        {"timestep_fraction": 1.0},
        {"kl": 0.0},
    ):
        PolicyGradient(**chosen)
    for wrong in (
        {"timestep_fraction": 1.5},
        {"timestep_fraction": 0.0},
        {"advantage_clip": 0.0},
        {"kl": -0.1},
        {"clip_range": (0.0, 0.1)},
    ):
        with pytest.raises(UserError, match=next(iter(wrong))):
            PolicyGradient(**wrong)
