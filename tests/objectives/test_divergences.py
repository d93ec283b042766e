"""Divergences to a reference: closed forms against sums and integrals, estimators against what they
estimate, the weight in force, and a reference that is refreshed."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from mmrl import config
from mmrl.config.compatibility import unsuited
from mmrl.core import registry
from mmrl.core.distributions import Categorical, Gaussian
from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import Rewards
from mmrl.experiment import state
from mmrl.experiment.build import read
from mmrl.objectives import PolicyGradient, frozen
from mmrl.objectives.kl import KL
from mmrl.objectives.terms import KLPenalty, Scored
from mmrl.policies.masked.policy import Hidden
from samplers.noise import Rng
from tests.fixtures import toys
from tests.fixtures.records import make_point
from tests.objectives.test_objective_pairs import WHOLE, ToyHidden

registry.load_built_in()

LOGITS = torch.tensor([[[0.3, -1.0, 0.8], [1.5, 0.0, -0.2]]]).double()
REF = torch.tensor([[[0.0, 0.4, 0.1], [-0.3, 0.9, 0.2]]]).double()


def by_loop(divergence, p, q, order=2.0):
    """The definition, for probabilities of one decision."""
    pairs = list(zip(p, q))
    if divergence == "reverse":
        return sum(a * math.log(a / b) for a, b in pairs)
    if divergence == "forward":
        return sum(b * math.log(b / a) for a, b in pairs)
    if divergence == "chi2":
        return sum(b * (a / b) ** 2 for a, b in pairs) - 1
    return math.log(sum(a**order * b ** (1 - order) for a, b in pairs)) / (order - 1)


CASES = [("reverse", 2.0), ("forward", 2.0), ("chi2", 2.0), ("renyi", 0.5), ("renyi", 3.0)]
cases = pytest.mark.parametrize(("divergence", "order"), CASES)


@cases
def test_divergences_of_tokens_are_sums_over_the_vocabulary(divergence, order):
    """Also of hidden ones; a token that is impossible in both adds nothing, and spoils no
    gradient."""
    kl = KL(weight=1.0, divergence=divergence, order=order, form="exact")
    value = kl.of(Categorical(LOGITS), Categorical(REF), None, None)
    for i in range(2):
        p, q = (x[0, i].softmax(0).tolist() for x in (LOGITS, REF))
        assert float(value[0, i]) == pytest.approx(by_loop(divergence, p, q, order), rel=1e-9)
    where = torch.tensor([[True, False, True]])
    hidden = [Hidden(x[0], where) for x in (LOGITS, REF)]
    spread = kl.of(*hidden, None, None)
    assert spread[0, 1] == 0
    torch.testing.assert_close(spread[where], value[0])
    never = torch.full((1, 2, 1), -torch.inf).double()
    logits = LOGITS.clone().requires_grad_()
    wide = [Categorical(torch.cat([x, never], -1)) for x in (logits, REF)]
    found = kl.of(*wide, None, None)
    torch.testing.assert_close(found, value)
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert slope.isfinite().all()


def density(mean, std):
    x = torch.linspace(-9, 9, 40001, dtype=torch.float64)
    return (-0.5 * ((x - mean) / std) ** 2).exp() / (std * math.sqrt(2 * math.pi)) + 1e-300


@cases
@pytest.mark.parametrize("std", [0.8, 0.6])
def test_divergences_of_steps_are_integrals(divergence, order, std):
    kl = KL(weight=1.0, divergence=divergence, order=order)
    mean = torch.tensor([[0.3, -0.4]]).double()
    dist = Gaussian(mean, torch.full((1, 1), std).double())
    reference = Gaussian(mean * 0, torch.full((1, 1), 0.8).double())
    each = []
    for m in mean[0].tolist():
        p, q = density(m, std), density(0.0, 0.8)
        if divergence in ("chi2", "renyi"):
            each.append(math.log(float((p**order * q ** (1 - order)).sum()) * 18 / 40000))
            each[-1] /= order - 1
        else:
            a, b = (p, q) if divergence == "reverse" else (q, p)
            each.append(float((a * (a / b).log()).sum()) * 18 / 40000)
    expected = sum(each) / 2  # the mean over dimensions
    if divergence == "chi2":
        expected = math.expm1(expected)
    value = kl.of(dist, reference, None, None)
    assert value.shape == (1, 1) and float(value) == pytest.approx(expected, rel=1e-6)
    assert float(kl.of(dist, dist, None, None)) == 0
    if divergence == "renyi" and order > 1:  # of a reference too narrow it is infinite
        narrow = Gaussian(mean, torch.full((1, 1), std / 2).double())
        assert kl.of(dist, narrow, None, None).isinf().all()


V = 7
FORMS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "exact")
REFUSED = ("k2", "abs", "k1+", "k3+")
ADMITTED = [
    (form, divergence, corrected)
    for divergence in ("reverse", "forward", "chi2")
    for form in (FORMS if divergence == "reverse" else (None, "exact"))
    for corrected in (False, True)
    if not (corrected and form in REFUSED)
]


def enumerated(kl, logits, old, reference):
    """Value and gradient of the KL term, every token once, weighed by how often it is sampled."""
    leaf = logits.clone().requires_grad_()
    ids = torch.arange(V)[:, None]
    objective = PolicyGradient(kl=kl)
    objective.term(KLPenalty).held.reference_at = lambda policy, point: Categorical(
        reference.expand(V, 1, V)
    )
    dist, sampler = (Categorical(each.expand(V, 1, V)) for each in (leaf, old))
    recorded = sampler.log_prob(ids)
    point = make_point(
        group=torch.zeros(V).long(),
        row_id=torch.arange(V),
        state=ids,
        mask=torch.ones(V, 1).bool(),
        logprob=recorded,
    )
    logp, advantage = dist.log_prob(ids), point.advantage
    at = Scored(None, point, dist, logp, recorded, recorded, advantage)
    each = objective.term(KLPenalty).distance(at)
    total = (recorded.exp() * each).sum()
    return total.detach(), torch.autograd.grad(total, leaf)[0]


def defined(divergence, logits, reference):
    """Value and gradient of the divergence by its definition."""
    leaf = logits.clone().requires_grad_()
    p, q = leaf.log_softmax(0), reference.log_softmax(0)
    total = {
        "reverse": p.exp() * (p - q),
        "forward": q.exp() * (q - p),
        "chi2": (2 * p - q).exp() - q.exp(),
    }[divergence].sum()
    return total.detach(), torch.autograd.grad(total, leaf)[0]


@pytest.mark.parametrize(("form", "divergence", "corrected"), ADMITTED)
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_kl_term_is_on_average_what_it_says(form, divergence, corrected, on_policy):
    """Corrected and exact ones are the divergence under any sampler, the others under the policy
    itself; of k1 the gradient alone is 0, of k3 the other KL's, k2 and abs have their own value."""
    logits, reference, other = torch.randn(
        3, V, generator=torch.Generator().manual_seed(0)
    ).double()
    kl = KL(weight=1.0, form=form, divergence=divergence, corrected=corrected)
    found = enumerated(kl, logits, logits if on_policy else other, reference)
    value, gradient = defined(divergence, logits, reference)
    if not corrected and form != "exact":
        leaf = logits.clone().requires_grad_()
        p = leaf.log_softmax(0)
        u = reference.log_softmax(0) - p
        share = (logits if on_policy else other).softmax(0)
        values = {"k2": u**2 / 2, "abs": u.abs(), "k3": u.exp() - u - 1, "k1+": -u, "k1": -u}
        if divergence == "reverse":
            written = (share * values.get(form, values["k3"])).sum()
            value = written.detach()
            slope = (share * values["k2"]).sum() if form in ("k1+", "k3+") else written
            (apart,) = torch.autograd.grad(slope, leaf)
            if on_policy and form in ("k2", "k1+", "k3+"):
                torch.testing.assert_close(apart, gradient)  # the KL's
            if on_policy and form == "k1":
                torch.testing.assert_close(apart, torch.zeros_like(apart))
            if on_policy and form == "k3":
                torch.testing.assert_close(apart, defined("forward", logits, reference)[1])
            gradient = apart
        elif not on_policy:
            return  # estimated under the policy itself only
    torch.testing.assert_close(found, (value, gradient))


WRONG = [
    *[({"form": form, "corrected": True}, re.escape(f"the form {form} ")) for form in REFUSED],
    ({"where": "reward", "corrected": True}, "leave out corrected"),
    ({"divergence": "chi2", "form": "k3"}, "the form k3 estimates the reverse KL: leave it out"),
    ({"divergence": "forward", "where": "reward"}, "taken off the reward is the reverse KL"),
    ({"divergence": "chi2", "root": True}, "root is of the chi2 of whole samples"),
    ({"divergence": "renyi", "order": 1.0}, "order 1 is divergence: reverse"),
    ({"reweigh": 1.0}, "reweigh is for divergence: forward"),
    ({"uncertainty": "spread"}, "set where: reward"),
    ({"weight": 0.0, "start": 0.1, "target": 0.1}, "give it one to begin with"),
]


def test_what_means_nothing_together_is_refused():
    for options, complaint in WRONG:
        with pytest.raises(UserError, match=f"kl: .*{complaint}"):
            KL(**({"weight": 0.1} | options))


KL_FORMS = [
    (form, corrected)
    for form in (None, *FORMS, "flow_grpo")
    for corrected in (False, True)
    if not (corrected and form in REFUSED)
]
KINDS = toys.POLICIES | {"hidden": ToyHidden}


def with_kl():
    """Objectives whose KL is of decisions, each with a toy that it is for."""
    for name, entry in OBJECTIVES.items():
        if not (isinstance(entry, type) and issubclass(entry, PolicyGradient)):
            continue
        if name in ("laser", "distill", "dmd"):  # no token that judges, no teacher
            continue
        for kind in ("flow", "diffusion", "causal", "masked", "hidden"):
            if not unsuited(entry, KINDS[kind]):
                yield name, kind


@pytest.mark.parametrize(("name", "kind"), list(with_kl()))
def test_the_kl_to_itself_is_0_and_so_is_its_gradient(name, kind):
    """Whatever ratio an objective uses instead of the policy's own."""
    policy = KINDS[kind]()
    policy.net.double()
    for snapshot in ("ref", "old"):
        policy.weights.keep(snapshot)
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(2), 4, Rng.of("itself"))
    rollout = rollout.replace(advantage=torch.zeros(8, 1, dtype=torch.float64))
    # the others take the form's value from the same place
    for form, corrected in KL_FORMS if name == "policy_gradient" else KL_FORMS[:2]:
        if form == "flow_grpo" and kind in ("causal", "masked", "hidden"):
            continue
        objective = OBJECTIVES[name](kl=KL(weight=1.0, form=form, corrected=corrected))
        policy.net.zero_grad()
        with Meter().listening() as meter:
            for point in objective.points(policy, rollout, Rng.of("points")):
                (objective.loss(policy, point) * point.mask).sum().backward()
        assert abs(meter.means()["kl"]) < 1e-9, (form, corrected)
        slopes = [p.grad for p in policy.net.parameters() if p.grad is not None]
        # of single decisions that of k1 is not 0, but on average
        assert form == "k1" or all(slope.abs().max() < 1e-8 for slope in slopes), form


def walked(kind="causal", **kl):
    policy = toys.make(kind, double=True)
    objective = PolicyGradient(kl=KL(weight=0.5, **kl))
    for name in objective.snapshots:
        policy.weights.keep(name)
    with torch.no_grad():
        for parameter in policy.net.parameters():
            parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
        rollout = policy.rollout(toys.prompts(2), 2, Rng.of(0))
    advantage = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]).double()
    return policy, objective, rollout.replace(advantage=advantage)


@pytest.mark.parametrize("kind", ["causal", "masked", "flow"])
def test_a_reweighed_reference_counts_good_samples_more(kind):
    """RAPO: the forward KL to ref e^(A / reweigh), decision by decision; values and gradients."""
    policy, objective, rollout = walked(kind, divergence="forward", reweigh=2.0)
    decisions = 0
    for point in objective.points(policy, rollout, Rng.of(0)):
        term = objective.loss(policy, point) - PolicyGradient().loss(policy, point)
        logp = policy.dist(point).log_prob(point.target)
        ref = frozen(policy, "ref", point).log_prob(point.target)
        expected = torch.zeros_like(term)
        for row, k in point.mask.nonzero().tolist():
            lead = float(point.advantage.expand_as(term)[row, k]) / 2
            ratio = math.exp(float((ref - logp)[row, k].detach()) + lead)
            value = ratio * math.log(ratio) - ratio + 1
            tangent = (1 - ratio) * (logp[row, k] - logp[row, k].detach())
            expected[row, k] = 0.5 * (value + tangent)
            decisions += 1
        mask = point.mask
        torch.testing.assert_close(term[mask], expected[mask], atol=1e-9, rtol=1e-9)
        weights = torch.linspace(0.5, 1.5, int(mask.sum())).double()
        slopes = [
            torch.autograd.grad(total, policy.net.parameters(), retain_graph=True)
            for total in ((x[mask] * weights).sum() for x in (term, expected))
        ]
        for left, right in zip(*slopes, strict=True):
            torch.testing.assert_close(left, right, atol=1e-9, rtol=1e-7)
    assert decisions >= 8


@pytest.mark.parametrize("kind", ["causal", "masked", "flow"])
@pytest.mark.parametrize("root", [False, True])
def test_the_chi2_of_whole_samples_is_taken_off_their_rewards(kind, root):
    """The ratio to the base over all of a sample's decisions; or of the square root."""
    policy, objective, rollout = walked(kind, divergence="chi2", where="reward", root=root)
    ratios = []
    for row in range(len(rollout)):
        total = 0.0
        for point in policy.path(rollout[row : row + 1]):
            gap = point.recorded - frozen(policy, "ref", point).log_prob(point.target)
            total += float(torch.where(point.mask, gap, 0.0).sum())
        ratios.append(math.exp(total))
    mean = sum(ratio - 1 for ratio in ratios) / len(ratios)
    factor = 1 / math.sqrt(max(mean, 1e-4)) if root else 2
    rewards = objective.shaped(policy, rollout, Rewards({"toy": torch.ones(4).double()}))
    expected = [1 - 0.5 * factor * (ratio - 1) for ratio in ratios]
    assert rewards.total().tolist() == pytest.approx(expected, rel=1e-9)
    assert float(rewards["kl"].mean()) == pytest.approx(mean)


def test_what_is_taken_off_rewards_has_the_gradient_of_the_chi2():
    """Of a policy with five samples, exactly: sum_y p(y) grad log p(y) reward(y)."""
    logits = torch.tensor([0.3, -0.2, 0.5, 0.1, -0.7]).double().requires_grad_()
    ref = torch.tensor([0.1, 0.2, -0.3, 0.4, 0.0]).double().log_softmax(0)
    logp = logits.log_softmax(0)
    exact = (2 * logp - ref).exp().sum() - 1
    kl = KL(weight=1.0, divergence="chi2", where="reward")
    value, factor = kl.penalty((logp - ref).detach())
    surrogate = (logp.exp().detach() * factor * value * logp).sum()
    truth, slope = (
        torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (exact, surrogate)
    )
    torch.testing.assert_close(slope, truth)


@pytest.mark.parametrize("options", ["divergence: renyi", "divergence: chi2, form: exact"])
def test_sums_over_a_vocabulary_that_nobody_keeps_are_refused(options, tmp_path):
    file = tmp_path / "run.yaml"
    objective = f"{{policy_gradient: {{kl: {{weight: 1, {options}}}}}}}"
    for policy, reward in (("sd3", "digits"), ("masked_lm", "count")):
        file.write_text(WHOLE.format(policy=policy, reward=reward, objective=objective))
        read(file, []) if policy == "sd3" else None
    file.write_text(WHOLE.format(policy="vlm", reward="count", objective=objective))
    with pytest.raises(UserError, match=r"run.yaml:6: objective.policy_gradient.kl: .*one by one"):
        read(file, [])
    with pytest.raises(UserError, match="without keeping the whole vocabulary"):
        dist = SimpleNamespace()
        KL(weight=1.0, divergence="renyi").of(dist, dist, None, None)


# Weights


LEFT = [0.4 * 0.01 ** (n / 4) for n in range(4)]  # GRPO-D, our reading: by one factor an iteration
BEND = 0.1 + 0.4 * (1 - math.cos(math.pi / 4)) / 2
SCHEDULES = [  # options, weights of the first six iterations
    ({}, [0.5] * 6),
    ({"start": 0.1, "over": 4}, [0.1, 0.2, 0.3, 0.4, 0.5, 0.5]),
    ({"over": 2}, [0.0, 0.25, 0.5, 0.5, 0.5, 0.5]),
    ({"start": 0.1, "over": 4, "schedule": "cosine"}, [0.1, BEND, 0.3, 0.6 - BEND, 0.5, 0.5]),
    ({"start": 0.1, "over": 4, "schedule": "decay"}, [*(0.5 - x for x in LEFT), 0.5, 0.5]),
]


@pytest.mark.parametrize(("options", "weights"), SCHEDULES)
def test_the_weight_of_a_kl_follows_its_schedule(options, weights):
    kl = KL(weight=0.5, **options)
    assert [kl.at(n) for n in range(6)] == pytest.approx(weights, abs=1e-12)
    objective = PolicyGradient(kl=kl)
    objective.adapt(1, {})
    resumed = PolicyGradient(kl=kl)
    resumed.load_state_dict(objective.state_dict())
    for each in (objective, resumed):
        assert each.term(KLPenalty).held.weight() == pytest.approx(weights[2])
    assert KL().at(0) == 0.0 and KL().form is None


def test_a_target_multiplies_the_weight_and_is_saved():
    """Ziegler et al. 2019: by 1 + rate times the relative error, which is cut at 0.2."""
    objective = PolicyGradient(kl=KL(weight=0.5, target=0.1))
    weights = []
    for iteration, kl in enumerate([1.0, 0.11, 0.0, math.nan]):
        metrics = {"kl": kl}
        objective.adapt(iteration, metrics)
        weights.append(metrics["kl_weight"])
    factors = [1.02, 1.02 * 1.01, 1.02 * 1.01 * 0.98, 1.02 * 1.01 * 0.98]
    assert weights == pytest.approx([0.5 * factor for factor in factors])
    again = PolicyGradient(kl=KL(weight=0.5, target=0.1))
    again.load_state_dict(objective.state_dict())
    assert again.term(KLPenalty).held.weight() == weights[-1]
    reward = PolicyGradient(kl=KL(weight=0.5, target=2.0, where="reward"))
    reward.adapt(0, {"reward/kl/mean": 1.0, "kl": 9.0})
    assert reward.term(KLPenalty).held.weight() == pytest.approx(0.5 * 0.98)
    fixed = PolicyGradient(kl=0.5)
    fixed.adapt(0, {"kl": 9.0})
    assert fixed.term(KLPenalty).held.weight() == 0.5


@pytest.mark.parametrize("family", ["causal", "masked", "flow", "diffusion"])
def test_uncertain_samples_pay_more_for_leaving_the_reference(family):
    """r - b s^2 log(p / ref) (uncertainty-aware RLHF)."""
    policy, plain, rollout = walked(family, where="reward")
    spread = torch.tensor([0.0, 1.0, 2.0, 0.5]).double()
    rewards = Rewards({"r": spread * 0, "spread": spread}, {"r": 1.0, "spread": 0.0})
    uncertain = PolicyGradient(kl=KL(weight=0.5, where="reward", uncertainty="spread"))
    expected = plain.shaped(policy, rollout, rewards)["kl"] * spread
    shaped = uncertain.shaped(policy, rollout, rewards)
    assert expected.abs().max() > 0 and shaped.weights["kl"] == -0.5
    torch.testing.assert_close(shaped["kl"], expected)
    with pytest.raises(UserError, match="names no reward of this run: 'spread'; there are r"):
        uncertain.shaped(policy, rollout, Rewards({"r": spread}))


@pytest.mark.parametrize("name", ["nft", "awm", "crd", "dgpo"])
def test_distances_of_velocities_share_weights_and_reference(name):
    """With the schedule's weight of an iteration, to the reference that follows the policy."""
    policy = toys.make("flow", double=True)
    objective, at_half, without = (
        config.build({name: {"kl": kl, "num_noise_draws": 1}}, OBJECTIVES)
        for kl in ({"weight": 0.8, "over": 4, "refresh": {"every": 3}}, 0.4, 0.0)
    )
    assert "moving" in objective.snapshots and "moving" not in at_half.snapshots
    for snapshot in {"ref", "old", *objective.snapshots}:
        policy.weights.keep(snapshot)
    with torch.no_grad():
        for parameter in policy.net.parameters():
            parameter.add_(0.1)
        rollout = policy.rollout(toys.prompts(2), 2, Rng.of(0))
    advantage = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]).double()
    rollout = rollout.replace(advantage=advantage)
    metrics = {}
    objective.adapt(1, metrics)
    assert objective.term.weight() == 0.4 and objective.state_dict()["iteration"] == 2
    point = next(iter(objective.points(policy, rollout, Rng.of(0))))
    loss = [each.loss(policy, point) for each in (objective, at_half, without)]
    torch.testing.assert_close(loss[0], loss[1])
    assert (loss[1] - loss[2]).min() > 0
    objective.begin_iteration(policy.weights, 3, Rng.of(0))
    if name != "dgpo":  # which needs the reference besides
        torch.testing.assert_close(objective.loss(policy, point), loss[2])
    with pytest.raises(UserError, match=f"objective.{name}.kl is the squared distance"):
        config.build({name: {"kl": {"weight": 0.1, "form": "k3"}}}, OBJECTIVES)


# A reference that is refreshed

COUNTED = [1, 2, 3, 4, 5]
REFRESHED = [  # options, steps of AdamW after every iteration, iterations that begin with a copy,
    # and where the run is resumed
    ({"every": 2}, COUNTED, {0, 2, 4}, 3),
    ({"every": 2, "optimizer": True}, [1, 2, 1, 2, 1], {0, 2, 4}, 2),  # ProRL
    ({"at": 3, "optimizer": True}, [1, 2, 3, 1, 2], {0, 3}, 2),  # ReMix, once
]


@pytest.mark.parametrize(("refresh", "steps", "copies", "stop"), REFRESHED)
def test_the_reference_is_refreshed_also_after_a_resume(refresh, steps, copies, stop):
    """And the optimizer forgets its moments with it; the base itself is not touched."""

    def fresh():
        options = {"kl": {"weight": 0.1, "refresh": refresh}}
        objective = config.build({"policy_gradient": options}, OBJECTIVES)
        return toys.trainer("causal", objective, train_batch_size=16)

    trainer = fresh()
    assert trainer.snapshots() == ("moving",)
    counts = []
    for iteration in range(5):
        if iteration == stop:
            resumed = fresh()
            state.restore(resumed, *state.capture(trainer))
            trainer = resumed
        if iteration in copies:
            reference = trainer.policy.weights.full()
        trainer.iterate()
        moving = trainer.policy.weights.full("moving")
        assert all(torch.equal(x, reference[key]) for key, x in moving.items())
        (count,) = {int(known["step"]) for known in trainer.update.optimizer.state.values()}
        counts.append(count)
    assert counts == steps


@pytest.mark.parametrize("name", ["diffusion_dpo", "d3po"])
def test_preferences_of_flows_may_follow_the_policy_too(name):
    """At the reference itself no pair is preferred; TR-DPO's copy brings it there."""
    policy = toys.make("flow", double=True)
    objective = config.build({name: {"refresh": {"every": 2}}}, OBJECTIVES)
    policy.weights.keep("moving")
    with torch.no_grad():
        for parameter in policy.net.parameters():
            parameter.add_(0.1)
        rollout = policy.rollout(toys.prompts(2), 2, Rng.of(0))
    rollout = rollout.replace(advantage=torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]).double())
    point = next(iter(objective.points(policy, rollout, Rng.of(0))))
    assert objective.measure(policy, point).abs().max() > 1e-4
    objective.begin_iteration(policy.weights, 2, Rng.of(0))
    assert objective.measure(policy, point).abs().max() < 1e-12
    assert objective.state_dict() == {"refreshed": 2}


def test_the_constraint_is_convex_in_the_reference_and_the_policy_before_the_update():
    """ReMix: (1 - previous) KL(p || ref) + previous KL(p || old), by hand on two snapshots."""
    policy = toys.make("flow", double=True)
    with torch.no_grad():
        for name in ("ref", "old"):
            policy.weights.keep(name)
            for weight in policy.net.parameters():
                weight.add_(0.1)
        rollout = policy.rollout(toys.prompts(2), 2, Rng.of(1))
    (point, *_) = policy.path(rollout)
    losses = {
        share: PolicyGradient(kl=KL(weight=1.0, previous=share)).loss(policy, point)
        for share in (0.0, 0.25, 1.0)
    }
    with policy.weights.using("old"):
        old = policy.dist(point)
    torch.testing.assert_close(losses[1.0], policy.dist(point).kl(old), atol=1e-9, rtol=0)
    convex = 0.75 * losses[0.0] + 0.25 * losses[1.0]
    torch.testing.assert_close(losses[0.25], convex, atol=1e-9, rtol=0)
    assert set(PolicyGradient(kl=KL(weight=1.0, previous=0.5)).snapshots) == {"ref", "old"}
