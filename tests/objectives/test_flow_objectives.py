"""CRD, FPO, D3PO, SePPO, direct back-propagation and guided references: each gradient against its
definition."""

from functools import partial

import pytest
import torch
from torch.nn.functional import logsigmoid

from mmrl.core.distributions import Gaussian
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES, load_built_in
from mmrl.core.types import Point, SamplerState
from mmrl.core.weights import Weights
from mmrl.experiment import state
from mmrl.objectives import PolicyGradient
from mmrl.objectives.kl import KL
from mmrl.zoo.objectives import AWM, CRD, D3PO, FPO, NFT, Draft, SePPO
from mmrl.zoo.objectives.reward_gradient import DIVERGENCES
from samplers.kernels import consistency, ode
from samplers.noise import Rng
from samplers.windows import all_but_last
from tests.fixtures import toys
from tests.fixtures.records import make_point

load_built_in()


def setting(objective, moved=0.02, copies=4, **options):
    """A toy whose live weights have moved away from its snapshots, its rollout, and the objective's
    points."""
    policy = toys.make("flow", double=True, **options)
    for name in ("ref", "old", *objective.snapshots):
        policy.weights.keep(name)
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(3), copies, Rng.of("rollout"))
        for i, p in enumerate(policy.net.parameters()):
            p += moved * normal(i, p.shape)
    if hasattr(objective, "attach"):
        objective.attach(toys.smooth_reward)
    return policy, rollout.replace(advantage=normal(9, (len(rollout), 1)))


def normal(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(policy, loss):
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, list(policy.net.parameters()))]
    )


def coupled(objective, policy, rollout):
    """(gradient of the mean elementwise loss, all points of the step)."""
    whole = Point.cat(list(objective.points(policy, rollout, Rng.of("points"))))
    whole = whole[whole.mask.any(1)]
    with torch.no_grad():
        ready = objective.couple(whole, objective.measure(policy, whole))
    loss = (objective.loss(policy, ready) * ready.mask).sum() / ready.mask.sum()
    return gradient(policy, loss), whole


def test_crds_losses_are_those_of_published_code():
    """CRDTrainer._compute_crd_loss of Flow-Factory: these wanted and implicit rewards, beta 10."""
    a = torch.tensor([0.7, 0.4, 0.55, 0.2], dtype=torch.float64)[:, None]
    rt = torch.tensor([-0.02, 0.01, 0.03, -0.01], dtype=torch.float64)[:, None]
    point = make_point(
        group=torch.zeros(4, dtype=torch.long),
        row_id=torch.arange(4),
        state=rt,
        mask=rt > -9,
        advantage=(a - 0.5) * 10,
    )
    published = {
        ("mse", None): 0.07171874,
        ("mse", 0.0): 0.07237086,
        ("mse", 0.5): 0.07629474,
        ("bce", None): 0.69782054,
        ("bce", 0.0): 0.69783682,
        ("bce", 0.5): 0.69783795,
    }
    for (form, temperature), value in published.items():
        objective = CRD(beta=10, form=form, temperature=temperature, kl=0)
        ready = objective.couple(point, torch.cat([rt, torch.zeros_like(rt)], 1)).coupling
        columns = zip(ready.optimality.split(1, 1), ready.implicit_mean.split(1, 1))
        each = [objective._fit(10 * (rt - mean), goal) for goal, mean in columns]
        assert abs(float(torch.stack(each).mean()) - value) < 2e-8, (form, temperature)


def test_fpo_is_ppo_with_the_mean_in_the_exponent():
    objective = FPO(clip_range=0.002, num_noise_draws=3)
    policy, rollout = setting(objective)
    slope, whole = coupled(objective, policy, rollout)

    def errors(dist):
        return (dist.mean - whole.target).square().flatten(1).mean(1)

    with policy.weights.using("old"), torch.no_grad():
        old = errors(policy.dist(whole))
    gap = old - errors(policy.dist(whole))
    log_ratio = torch.stack([gap[whole.row_id == r].mean() for r in range(12)])
    ratio = log_ratio.exp()
    advantage = rollout.advantage[:, 0].clamp(-5, 5)
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.998, 1.002)).mean()
    assert ((ratio - 1).abs() > 0.002).any() and ((ratio - 1).abs() < 0.002).any()
    torch.testing.assert_close(slope, gradient(policy, loss), rtol=1e-9, atol=1e-12)


def test_d3po_prefers_the_best_at_every_step():
    objective = D3PO(beta=2.0)
    policy, rollout = setting(objective)
    slope, whole = coupled(objective, policy, rollout)
    live = policy.dist(whole).log_prob(whole.target)[:, 0]
    with policy.weights.using("ref"), torch.no_grad():
        ref = policy.dist(whole).log_prob(whole.target)[:, 0]
    losses = []
    for rows in torch.arange(12).split(4):
        order = rows[rollout.advantage[rows, 0].argsort()]
        for k in range(rollout.mask.shape[1]):
            time = rollout.latents.time[0, k]
            best, worst = (
                ((whole.row_id == row) & (whole.time == time)).nonzero()[0, 0]
                for row in (order[-1], order[0])
            )
            margin = (live[best] - ref[best]) - (live[worst] - ref[worst])
            losses.append(-logsigmoid(2.0 * margin))
    expected = gradient(policy, torch.stack(losses).mean())
    torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-12)


def test_seppo_follows_a_reference_that_beats_the_current_model_on_the_winner():
    """SePPO (Zhang et al. 2024): the anchor is the current model; elsewhere the loss is that of
    DPO."""
    objective = SePPO(beta=3.0, num_noise_draws=4)
    policy, rollout = setting(objective, moved=0.1)
    with policy.weights.using("ref"), torch.no_grad():  # the base model has no say in it
        list(policy.net.parameters())[-1].add_(3.0)
    slope, whole = coupled(objective, policy, rollout)
    with policy.weights.using("earlier-0"), torch.no_grad():
        reference = (policy.dist(whole).mean - whole.target).square().flatten(1).mean(1)
    excess = (policy.dist(whole).mean - whole.target).square().flatten(1).mean(1) - reference
    losses = []
    followed = []
    for group in range(3):
        pair = whole.row_id[whole.group == group].unique()
        rival, best = (int(row) for row in pair[rollout.advantage[pair, 0].argsort()])
        assert rollout.advantage[best] == rollout.advantage[rollout.group == group].max()
        for t in whole.time[whole.row_id == best]:
            w, r = (
                excess[((whole.row_id == row) & (whole.time == t)).nonzero()[0, 0]]
                for row in (best, rival)
            )
            # the reference denoises the winner better than the current model
            followed.append(bool(w > 0))
            losses.append(-logsigmoid(-1.5 * (w + r if followed[-1] else w - r)))
    assert 0 < sum(followed) < len(followed), "both cases are there"
    expected = gradient(policy, torch.stack(losses).mean())
    torch.testing.assert_close(slope, expected, rtol=1e-8, atol=1e-12)


def test_seppo_takes_a_reference_as_good_as_the_current_model_for_the_loser():
    objective = SePPO(beta=3.0, num_noise_draws=2)
    policy, rollout = setting(objective, moved=0.0)
    whole = Point.cat(list(objective.points(policy, rollout, Rng.of("points"))))
    whole = whole[whole.mask.any(1)]
    measured = objective.measure(policy, whole).detach()
    assert not measured.any()
    side = objective.couple(whole, measured).coupling.slope
    wins = whole.advantage == rollout.advantage.view(3, 4).amax(1)[whole.group][:, None]
    # beta sigmoid(0)
    torch.testing.assert_close(side, torch.where(wins, 1.5, -1.5).to(side), rtol=0, atol=1e-12)


def test_seppos_reference_is_drawn_evenly_from_all_earlier_checkpoints_of_a_bounded_pool():
    """Weights that count the iterations tell which checkpoint a slot holds."""
    counts = torch.zeros(8)
    for seed in range(120):
        objective = SePPO(pool=3)
        net = torch.nn.Linear(1, 1)
        weights = Weights(net)
        for name in objective.snapshots:
            weights.keep(name)
        for iteration in range(8):
            with torch.no_grad():
                net.bias.fill_(iteration)
            for _ in range(2 if seed < 10 else 1):  # a second call changes nothing
                objective.begin_iteration(weights, iteration, Rng.of(seed, iteration))
            drawn = int(weights.saved[objective.behavior_policy]["bias"])
            assert len(weights.saved) == 3 and drawn <= iteration
        counts[drawn] += 1
    expected = 120 / 8
    # chi-squared with 7 degrees of freedom: p = 0.001
    assert ((counts - expected) ** 2 / expected).sum() < 24.3, counts


def test_seppos_pool_comes_through_a_checkpoint_to_the_bit():
    whole, first, second = (
        toys.trainer("flow", SePPO(beta=5.0, pool=2), toys.smooth_reward) for _ in range(3)
    )
    rewards = [whole.iterate()["reward/mean"] for _ in range(6)]
    for _ in range(3):
        first.iterate()
    state.restore(second, *state.capture(first))
    assert [second.iterate()["reward/mean"] for _ in range(3)] == rewards[3:]
    for name in ("live", "earlier-0", "earlier-1"):
        known, restored = (each.policy.weights.full(name) for each in (whole, second))
        assert all(torch.equal(known[key], restored[key]) for key in known), name


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_against_quadrature(name):
    """Of N(0, 1) and N(d, 1) on a line."""
    x = torch.linspace(-30, 30, 200_001, dtype=torch.float64)
    for d in (0.3, 1.5):
        p, q = (
            Gaussian(torch.full((1, 1), m, dtype=torch.float64), torch.ones(1, 1)) for m in (d, 0.0)
        )
        p, q = (torch.exp(-0.5 * (x - g.mean) ** 2)[0] / (2 * torch.pi) ** 0.5 for g in (p, q))
        dx = x[1] - x[0]
        exact = {
            "kl": (p * (p / q.clamp_min(1e-300)).clamp_min(1e-300).log()).sum() * dx,
            "hellinger": 1 - (p * q).sqrt().sum() * dx,
            "total_variation": (p - q).abs().sum() * dx / 2,
            "chi2": (p**2 / q.clamp_min(1e-300)).sum() * dx - 1,
        }[name]
        divergence = DIVERGENCES[name](torch.tensor(d**2, dtype=torch.float64))
        torch.testing.assert_close(divergence, exact, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("objective", [AWM, NFT, CRD, PolicyGradient])
def test_a_reference_whose_weight_has_gone_costs_no_passes(objective):
    term = objective(kl=KL(weight=0.0, start=1.0, over=2))
    policy, rollout = setting(term)
    spent = []
    for iteration in range(4):
        before = policy.report.forwards
        for point in term.points(policy, rollout, Rng.of("points")):
            term.loss(policy, point)
        spent.append(policy.report.forwards - before)
        term.adapt(iteration, {})
    assert spent[0] == spent[1] > spent[2] == spent[3]


def test_on_policy_awm_looks_once_and_has_the_gradient_of_two_looks():
    """On the first step of an iteration the old weights are the live ones."""
    policy, rollout = setting(AWM(kl=0.0), moved=0.0)
    policy.weights.keep("old")
    for point in AWM(kl=0.0).points(policy, rollout, Rng.of("points")):
        losses, forwards = [], []
        for on_policy in (False, True):
            before = policy.report.forwards
            loss = AWM(kl=0.0).loss(policy, point.replace(on_policy=on_policy))
            losses.append((loss.detach(), gradient(policy, loss.sum())))
            forwards.append(policy.report.forwards - before)
        for two, one in zip(*losses, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
        assert forwards == [2 * len(point), len(point)]


def test_guidance_without_an_empty_prompt_is_refused():
    policy, rollout = setting(CRD())
    (point,) = CRD(num_noise_draws=1).points(policy, rollout, Rng.of("points"))
    bare = point.replace(cond={k: v for k, v in point.cond.items() if k != "uncond"})
    with pytest.raises(UserError, match='"uncond" from .*encode.*option empty'):
        CRD(kl=1.0, ref_guidance=2.0).loss(policy, bare)


# Rewards that are differentiated


@pytest.mark.parametrize(
    "options",
    [
        {"sde_type": ode},
        {"noise_window": all_but_last},
        {"sde_type": consistency, "noise_level": 1.0},
    ],
)
@pytest.mark.parametrize(("last", "moved"), [(None, 0.0), (None, 0.05), (2, 0.0), (2, 0.05)])
def test_draft_is_the_gradient_through_the_sampler(options, last, moved):
    """The reward of a sampler that is run again from the same state with the same noise, on policy
    or, after a step of the optimizer, with weights that have moved."""
    objective = Draft(last=last)
    policy, rollout = setting(objective, moved=moved, **options)
    (point,) = objective.points(policy, rollout, Rng.of(0))
    slope = gradient(policy, objective.loss(policy, point).mean())
    steps = rollout.latents.noise_level.shape[1]
    first = 0 if last is None else steps - last
    path = rollout.latents
    x = path.states[:, first]
    for k in range(first, steps):
        step = SamplerState(time=path.time[:, k])
        v = policy._velocities(point.replace(state=x, step=step), guided=False)[0]
        times = path.time[:, k], path.time[:, k + 1], path.noise_level[:, k]
        mean, std = policy.sde_type(x, v, *times)
        x = mean + std * Rng.of("rollout").normal(rollout.row_id, (2,), k + 1, torch.float64)
    assert moved or torch.allclose(x, rollout.sample, atol=1e-12, rtol=0)
    expected = gradient(policy, -toys.smooth_reward(x, None).mean())
    torch.testing.assert_close(slope, expected, rtol=1e-8, atol=1e-12)


def test_a_reward_without_gradient_is_refused_by_name():
    scorer = toys.trainer("flow", Draft(), toys.smooth_reward).scorer
    with pytest.raises(UserError, match="'toy' has no gradient"):
        scorer.differentiable(torch.zeros(2, 2), toys.prompts(2))


# References


@pytest.mark.parametrize("name", ["awm", "nft", "crd", "dgpo", "policy_gradient"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_a_guided_reference_is_the_bases_own_guidance(name, scale):
    """The distance is of the plain prediction to the guided one, v_u + w (v_c - v_u)."""
    options = {} if name == "policy_gradient" else {"num_noise_draws": 1}
    make = partial(OBJECTIVES[name], **options)
    guided = {"kl": KL(weight=0.5, ref_guidance=scale)}
    if name in ("crd", "dgpo"):
        guided = {"kl": 0.5, "ref_guidance": scale}
    near = make(**guided)
    policy, rollout = setting(near, moved=0.05)
    policy.weights.keep("old")
    for point in near.points(policy, rollout, Rng.of("points")):
        extra = near.loss(policy, point) - make(kl=0.0).loss(policy, point)
        with policy.weights.using("ref"), torch.no_grad():
            conditional, empty = policy._velocities(point, guided=True)
        assert (conditional - empty).abs().max() > 0.1
        blended = empty + scale * (conditional - empty)
        dist = policy.dist(point)
        distance = (dist.mean - blended).square().flatten(1).mean(1, keepdim=True)
        if name == "policy_gradient":
            step = point.transition
            times = step.time, step.next_time, step.noise_level
            moments = policy.sde_type(point.state, blended, *times)
            distance = dist.kl(Gaussian(*moments, policy.logprob_reduction))
        torch.testing.assert_close(extra, 0.5 * distance, rtol=1e-9, atol=1e-12)
        if name == "dgpo":  # whose score is of the same reference
            errors = [(x - point.target).square().mean(1) for x in (dist.mean, blended)]
            torch.testing.assert_close(near.measure(policy, point)[:, 0], errors[0] - errors[1])
