"""Losses of whole groups: each paper's formula as plain loops, their gradient through all passes of
a group at once, and what must not change them."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from mmrl import config
from mmrl.advantages import dance_grpo
from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import Point
from mmrl.experiment.build import read
from mmrl.policies.diffusion.trees import Tree
from mmrl.train.optimizers import sgd
from mmrl.zoo.objectives import GroupLoss, group_contrast, group_preference
from mmrl.zoo.objectives.group_loss import Groups, Samples
from samplers.noise import Rng
from tests.fixtures import toys
from tests.objectives.test_objective_pairs import WHOLE, ToyHidden

registry.load_built_in()

NAMES = [
    name
    for name, entry in OBJECTIVES.items()
    if isinstance(entry, type) and issubclass(entry, GroupLoss)
]
KINDS = {
    "flow": partial(toys.ToyFlow, steps=3),
    "masked": toys.ToyMasked,
    "causal": toys.ToyCausal,
    "hidden": ToyHidden,
}


def build(name, **options):
    return config.build({name: options}, OBJECTIVES)


# Formulas, over one group: log-ratios R, log-probs, advantages and lengths of its samples


def pairs_of(pairing, a):
    n = range(len(a))
    if pairing == "all":
        return [(i, j) for i in n for j in n if a[i] > a[j]]
    return [(a.index(max(a)), a.index(min(a)))] if max(a) > min(a) else []


def mean_of_pairs(pairing, a, loss):
    losses = [loss(i, j) for i, j in pairs_of(pairing, a)]
    return sum(losses) / len(losses) if losses else 0.0


def clipped(ratio, a, width):
    return -min(a * ratio, a * min(max(ratio, 1 - width), 1 + width))


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def disco(score, a, tau, share):
    good = [i for i in range(len(a)) if a[i] > 0]
    bad = [j for j in range(len(a)) if a[j] < 0]
    if not good or not bad:
        return 0.0
    total = sum(share(i, good) for i in good)
    loss = 0.0
    for i in good:
        rivals = sum(math.exp((score[j] - score[i]) / tau) for j in bad) / len(bad)
        loss += share(i, good) / total * tau * math.log(rivals)
    return loss


def gvpo(r, logp, a, length):
    n = len(r)  # centred implicit minus centred real rewards; of one sample they are 0
    error = [0.3 * (r[i] - sum(r) / n) - (a[i] - sum(a) / n) for i in range(n)]
    return sum(e * e for e in error) / 2 / max(n - 1, 1)


def reg_grpo(r, logp, a, length):
    n = len(r)
    return sum((a[i] - 0.7 * (r[i] - sum(r) / n)) ** 2 for i in range(n)) / n


def reg_grpo_own_std(least):
    def loss(r, logp, a, length):
        n = len(r)
        mean = sum(r) / n
        std = max(math.sqrt(sum((x - mean) ** 2 for x in r) / n), least)
        return sum((a[i] - (r[i] - mean) / std) ** 2 for i in range(n)) / n

    return loss


def opmd(r, logp, a, length):
    return sum(-a[i] * logp[i] + 0.4 / 2 * r[i] ** 2 for i in range(len(r))) / len(r)


def a_lol(r, logp, a, length):
    weights = [min(max(math.exp(x), 1 - 0.5), 1 + 0.5) for x in r]
    return sum(-weights[i] * max(a[i], 0) * logp[i] for i in range(len(r))) / len(r)


def real(r, logp, a, length):
    s = [x / n / 0.1 for x, n in zip(r, length)]
    if not (max(a) > 0 > min(a)):
        return 0.0
    negative = sum(math.exp(s[i]) for i in range(len(r)) if a[i] < 0)
    positive = sum(math.exp(-s[i]) for i in range(len(r)) if a[i] > 0)
    return math.log(1 + negative) + math.log(1 + positive)


def multi_preference(r, logp, a, length):
    mean = sum(a) / len(a)
    term = [math.exp(0.6 * abs(a[i] - mean)) * math.exp(0.3 * r[i]) for i in range(len(a))]
    good = [term[i] for i in range(len(a)) if a[i] - mean > 0]
    return -math.log(sum(good) / sum(term)) if good else 0.0


def pacs(r, logp, a, length):
    n = len(r)
    loss = 0.0
    for i in range(n):
        others = [r[j] for j in range(n) if j != i] or [r[i]]
        score = 0.8 * (r[i] - sum(others) / len(others))
        if a[i] > 0:
            loss -= log_sigmoid(score)
        if a[i] < 0:
            loss -= log_sigmoid(-score)
    return loss / n


def p3o(clip):
    def loss(r, logp, a, length):
        def of_pair(i, j):
            half = (a[i] - a[j]) / 2
            if clip == "joint":
                return clipped(math.exp(r[i] - r[j]), half, 0.2)
            return clipped(math.exp(r[i]), half, 0.2) + clipped(math.exp(r[j]), -half, 0.2)

        return mean_of_pairs("all", a, of_pair)

    return loss


def pairwise(pairing, of_margin, sft=0.0, average=False):
    """The mean over pairs of a loss of margin and reward difference."""

    def loss(r, logp, a, length):
        divisor = length if average else [1] * len(r)
        r = [x / n for x, n in zip(r, divisor)]
        return mean_of_pairs(
            pairing,
            a,
            lambda i, j: of_margin(r[i] - r[j], a[i] - a[j]) - sft * logp[i] / divisor[i],
        )

    return loss


def by_length(x, length):
    return [each / n for each, n in zip(x, length)]


def log_odds(logp):
    return math.log(math.exp(logp) / (1 - math.exp(logp)))


def by_odds(r, logp, a, length):
    mean = by_length(logp, length)
    loss = pairwise("best_worst", lambda m, d: -0.3 * log_sigmoid(m), sft=1.0)
    return loss([log_odds(x) for x in mean], mean, a, length)


def by_mean_logp(r, logp, a, length):
    mean = by_length(logp, length)
    loss = pairwise("best_worst", lambda m, d: -log_sigmoid(1.5 * m - 0.7), sft=0.1)
    return loss(mean, mean, a, length)


def smoothed(m, d):
    return -0.8 * log_sigmoid(0.3 * m) - 0.2 * log_sigmoid(-0.3 * m)


def robust(m, d):
    return (-0.8 * log_sigmoid(0.3 * m) + 0.2 * log_sigmoid(-0.3 * m)) / 0.6


def good_only(r, logp, a, length):
    return sum(-max(x, 0) * y for x, y in zip(a, logp)) / len(r)


def contrast(tau, ratio=False, share=lambda a: 1.0):
    def loss(r, logp, a, length):
        score = [math.exp(x) for x in by_length(r, length)] if ratio else by_length(logp, length)
        return disco(score, a, tau, lambda i, _: share(a[i]))

    return loss


BEST = "best_worst"
SMOOTHED = {"beta": 0.3, "label_smoothing": 0.2}
FORMULAS = [  # objective, options, formula; the KL of disco and kto have their own tests
    ("gvpo", {"beta": 0.3}, gvpo),
    ("reg_grpo", {"beta": 0.7}, reg_grpo),
    ("reg_grpo", {"own_std": True, "least_std": 0.05}, reg_grpo_own_std(0.05)),
    ("reg_grpo", {"own_std": True, "least_std": 5.0}, reg_grpo_own_std(5.0)),  # the floor
    ("opmd", {"tau": 0.4}, opmd),
    ("a_lol", {"clip_range": 0.5}, a_lol),
    ("a_lol", {"clip_range": None}, good_only),
    ("real", {}, real),
    ("multi_preference", {"beta": 0.3, "alpha": 0.6}, multi_preference),
    ("pacs", {"beta": 0.8}, pacs),
    ("p3o", {}, p3o("separate")),
    ("p3o", {"clip": "joint"}, p3o("joint")),
    ("rebel", {"eta": 0.5}, pairwise(BEST, lambda m, d: (m / 0.5 - d) ** 2)),
    ("rebel", {"pairs": "all"}, pairwise("all", lambda m, d: (m - d) ** 2)),
    ("dpo", {"beta": 0.3}, pairwise(BEST, lambda m, d: -log_sigmoid(0.3 * m))),
    ("dpo", {"pairs": "all", "sft": 0.2}, pairwise("all", lambda m, d: -log_sigmoid(0.1 * m), 0.2)),
    ("dpo", SMOOTHED, pairwise(BEST, smoothed)),
    ("dpo", SMOOTHED | {"robust": True}, pairwise(BEST, robust)),
    ("simpo", {"beta": 1.5, "gamma": 0.7, "sft": 0.1}, by_mean_logp),
    ("orpo", {"weight": 0.3}, by_odds),
    ("ipo", {}, pairwise(BEST, lambda m, d: (m - 1 / (2 * 0.1)) ** 2)),
    ("ipo", {"average": True, "sft": 0.1}, pairwise(BEST, lambda m, d: (m - 5) ** 2, 0.1, True)),
    ("copg", {"beta": 0.3}, pairwise("all", lambda m, d: -d * m + 0.3 / 2 * m**2)),
    ("disco", {"beta": 0.0}, contrast(10.0)),
    ("disco", {"beta": 0.0, "score": "ratio", "tau": 1.0}, contrast(1.0, ratio=True)),
    (
        "drpo",
        {"beta": 0.0, "temperature": 0.5, "tau": 2.0},
        contrast(2.0, share=lambda a: math.exp(a / 0.5)),
    ),
]
ADVANTAGES = [
    [0.5, -1.0, 0.0, 0.5, 1.5, -1.0],  # ties and a zero
    [1.0, 2.0, 0.5],  # all good
    [-1.0, -0.5],
    [0.0, 0.0, 0.0, 0.0],  # nothing to compare
    [0.7],
]


def groups_of_samples(objective):
    """The groups above, their rows mixed, as ``couple`` gives them; and the plain lists."""
    generator = torch.Generator().manual_seed(3)
    sizes = [len(a) for a in ADVANTAGES]
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    mixed = torch.randperm(len(group), generator=generator)
    ratio, logp = (torch.randn(len(group), generator=generator).double() for _ in range(2))
    length = torch.randint(1, 9, (len(group),), generator=generator)
    advantage = torch.tensor(sum(ADVANTAGES, [])).double()
    columns = [x[mixed] for x in (ratio, logp - 5, advantage, length, group)]
    plain = [[x[columns[-1] == g].tolist() for x in columns[:-1]] for g in range(len(ADVANTAGES))]
    return objective._samples(*columns), plain


def test_losses_are_the_papers_formulas(subtests):
    assert {name for name, _, _ in FORMULAS} | {"kto"} == set(NAMES) and len(NAMES) > 10
    for name, options, formula in FORMULAS:
        with subtests.test(name=name, options=options):
            objective = build(name, **options)
            samples, plain = groups_of_samples(objective)
            value = objective.of_group(samples)
            for g, group in enumerate(plain):
                found = float(value[samples.groups.index == g].mean())
                assert found == pytest.approx(formula(*group), rel=1e-9, abs=1e-9)


def sloped(objective, samples):
    """(value, slope) of every row's loss along its log-ratio."""
    leaf = samples.ratio.clone().requires_grad_()
    value = objective.of_group(replace(samples, ratio=leaf))
    return value, torch.autograd.grad(value.sum(), leaf)[0]


def test_kto_weighs_gains_and_losses_around_the_mean_of_all_processes(monkeypatch):
    """lambda (1 - sigmoid(+-beta (R - z))), z the mean log-ratio of the rows that are good or bad
    on two processes, not below 0 and without gradient."""
    elsewhere = torch.tensor([9.0, 4.0]).double()
    objective = build("kto", beta=0.4, desirable_weight=1.3, undesirable_weight=0.6)
    samples, _ = groups_of_samples(objective)
    rows = [(float(r), float(a)) for r, a in zip(samples.ratio, samples.advantage)]
    judged = [r for r, a in rows if a]
    z = (sum(judged) + 9) / (len(judged) + 4)
    assert z > 0 and len(judged) < len(rows)
    for added, mean in ((elsewhere, z), (-100, 0.0)):
        monkeypatch.setattr(group_preference, "all_sum", lambda x, added=added: x + added)
        for (r, a), found, steep in zip(rows, *(x.tolist() for x in sloped(objective, samples))):
            side, weight = (1, 1.3) if a > 0 else (-1, 0.6)
            share = 1 / (1 + math.exp(-side * 0.4 * (r - mean)))
            assert found == pytest.approx(weight * (1 - share) if a else 0.0, abs=1e-12)
            expected = -weight * side * 0.4 * share * (1 - share) if a else 0.0
            assert steep == pytest.approx(expected, abs=1e-12)


def test_the_penalty_of_disco_bounds_the_kl_of_all_processes(monkeypatch):
    """max(0, KL - delta)^2 beta with the KL over the decisions of two processes; every row of both
    has it, and its slope is that of the mean over all rows."""
    objective = build("disco", beta=50.0, delta=0.01)
    samples, _ = groups_of_samples(objective)
    flat = replace(samples, ratio=samples.ratio - 1, advantage=samples.advantage * 0)
    elsewhere = torch.tensor([7.0, 40.0, 5.0]).double()
    monkeypatch.setattr(group_contrast, "all_sum", lambda x: x + elsewhere)
    value, slope = sloped(objective, flat)
    leaf = flat.ratio.clone().requires_grad_()
    kl = (7.0 - leaf.sum()) / (40 + flat.length.sum())
    expected = 50 * (kl - 0.01).clamp_min(0) ** 2
    (whole,) = torch.autograd.grad(expected * (len(leaf) + 5), leaf)
    assert float(expected.detach()) > 0
    torch.testing.assert_close(value, expected.expand_as(value))
    torch.testing.assert_close(slope, whole)
    near = build("disco", beta=50.0, delta=100.0)
    assert near.of_group(flat).abs().max() == 0


def test_a_group_without_bad_samples_has_no_sum_of_them():
    groups = Groups(torch.tensor([4, 4, 9]))
    x = torch.tensor([800.0, -2.0, 1.0]).double().requires_grad_()
    total = groups.log_sum_exp(x, torch.tensor([True, True, False]))
    assert total.tolist() == [800.0, 800.0, -math.inf]
    (slope,) = torch.autograd.grad(total[:2].sum(), x)
    assert slope.tolist() == [2.0, 0.0, 0.0]


# On every kind of decisions


ANCHORS = {"old": "old", "ref": "ref", "moving": {"every": 2}}
SIX = torch.tensor([1.0, -0.5, -0.5, 0.7, 0.2, -0.9]).double()[:, None]


def moved(policy, objective):
    """The policy, which has moved since it sampled, and the points of two groups of three."""
    policy.net.double()
    for name in objective.snapshots:
        policy.weights.keep(name)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.net.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
        rollout = policy.rollout(toys.prompts(2), 3, Rng.of("rollout"))
        for parameter in policy.net.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
    rollout = rollout.replace(advantage=SIX)
    return policy, Point.cat(list(objective.points(policy, rollout, Rng.of("points"))))


def ready(policy, objective, whole):
    with torch.no_grad():
        return objective.couple(whole, objective.measure(policy, whole))


def gradients(policy, loss):
    return torch.autograd.grad(loss, list(policy.net.parameters()), allow_unused=True)


def of_rows(whole, x):
    """The sums [B] of x [N, L] over the decisions of every row, by a loop."""
    rows = [whole.mask & (whole.row_id == row)[:, None] for row in whole.row_id.unique()]
    return torch.stack([x[chosen].sum() for chosen in rows])


def compare(policy, objective, whole, loss, ratio, logp):
    """The loss and its gradient against those of the groups of these log-ratios and log-probs."""
    first = [int((whole.row_id == row).nonzero()[0, 0]) for row in whole.row_id.unique()]
    length = of_rows(whole, torch.ones_like(whole.mask, dtype=torch.long))
    divisor = length if objective.average else 1
    groups = Groups(whole.group[first])
    advantage = whole.advantage[first, 0]
    samples = Samples(ratio / divisor, logp / divisor, advantage, length, groups)
    expected = objective.of_group(samples).mean()
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-9)
    slopes = [gradients(policy, x) for x in (loss, expected)]
    assert any(slope is not None and slope.abs().max() > 0 for slope in slopes[0])
    for slope, truth in zip(*slopes, strict=True):
        if truth is not None:
            torch.testing.assert_close(slope, truth, atol=1e-10, rtol=1e-8)


ONLY_OLD = ("disco", "drpo", "orpo", "simpo")


def kinds_and_anchors():
    """All with one loss; every other loss with one of them, in turn."""
    both = list(itertools.product(KINDS, ANCHORS))
    yield from (("rebel", kind, anchor) for kind, anchor in both)
    for turn, name in enumerate(NAMES):
        kind, anchor = both[5 * turn % len(both)]
        if name != "rebel":
            yield name, kind, "old" if name in ONLY_OLD else anchor


def test_loss_and_gradient_are_those_of_whole_groups(subtests):
    """Through all passes of all rows at once, without a tangent; the rows may come in any order."""
    for name, kind, anchor in kinds_and_anchors():
        with subtests.test(name=name, kind=kind, anchor=anchor):
            options = {} if name in ONLY_OLD else {"anchor": ANCHORS[anchor]}
            objective = build(name, **options)
            policy, whole = moved(KINDS[kind](), objective)
            point = ready(policy, objective, whole)
            weight = whole.mask.double() / whole.num_decisions[:, None]
            loss = (objective.loss(policy, point) * weight).sum() / len(SIX)
            logp = policy.dist(whole).log_prob(whole.target)
            old = whole.recorded
            if anchor != "old":
                with policy.weights.using(anchor), torch.no_grad():
                    old = policy.dist(whole).log_prob(whole.target)
            sums = [of_rows(whole, x) for x in (logp - old, logp)]
            compare(policy, objective, whole, loss, *sums)
            order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
            mixed = ready(policy, objective, whole[order]).coupling
            for part in ("value", "slope"):
                one, two = getattr(mixed, part), getattr(point.coupling, part)[order]
                torch.testing.assert_close(one, two, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gvpo", "flow"), ("kto", "masked"), ("disco", "flow"), ("dpo", "masked"), ("orpo", "masked")],
)
def test_micro_batches_change_nothing(name, kind):
    sizes = {"max_grad_norm": None, "loss_agg_mode": "seq_mean_token_mean"}
    runs = []
    for micro in (None, 3):
        policy = KINDS[kind]()
        policy.net.double()
        trainer = toys.trainer(
            policy, build(name), lr=0.02, optimizer=sgd, micro_batch_size=micro, **sizes
        )
        assert all(trainer.iterate()["grad_norm"] >= 0 for _ in range(2))
        runs.append(policy.weights.full())
    for key, value in runs[0].items():
        torch.testing.assert_close(value, runs[1][key], atol=1e-10, rtol=0)


# A reference that follows, and refusals


def test_a_reference_follows_the_policy_and_remembers_when():
    """TR-DPO: every second iteration half of the way; a second call for an iteration does
    nothing, nor does a resumed objective."""
    objective = build("dpo", anchor={"every": 2, "decay": 0.5})
    policy = toys.make("causal", double=True)
    assert objective.snapshots == ("moving",) and objective.anchor.every == 2
    policy.weights.keep("moving")
    base = policy.weights.full("moving")
    with torch.no_grad():
        for parameter in policy.net.parameters():
            parameter.add_(1.0)
    again = build("dpo", anchor={"every": 2, "decay": 0.5})
    shares = []
    for iteration in (0, 1, 2, 2, 3, 4):
        objective.begin_iteration(policy.weights, iteration, Rng.of(0))
        again.load_state_dict(objective.state_dict())
        again.begin_iteration(policy.weights, iteration, Rng.of(0))
        shares.append(
            [float((x - base[k]).mean()) for k, x in policy.weights.full("moving").items()][0]
        )
    assert shares == pytest.approx([0, 0, 0.5, 0.5, 0.5, 0.75])


@pytest.mark.parametrize("name", ["gvpo", "kto"])
def test_a_tree_is_refused(name, tmp_path):
    (tmp_path / "run.yaml").write_text(WHOLE.format(policy="sd3", reward="digits", objective=name))
    read(tmp_path / "run.yaml", [])
    with pytest.raises(UserError, match="follows single paths: remove .* tree"):
        read(tmp_path / "run.yaml", ["policy.sd3.tree={splits: 2}"])
    policy = toys.ToyFlow(tree=Tree(splits=(1,)))
    rollout = policy.rollout(toys.prompts(2), 2, Rng.of(0))
    with pytest.raises(UserError, match="those of a tree share steps"):
        list(build(name).points(policy, rollout, Rng.of(0)))


# Denoising errors in place of log-ratios


@pytest.mark.parametrize("anchor", ANCHORS)
def test_denoising_errors_take_the_place_of_log_ratios(anchor):
    """R = -mean over draws of (e - e_anchor), by a loop; its gradient through the group's loss."""
    objective = build("rebel", num_noise_draws=3, pairs="all", anchor=ANCHORS[anchor])
    policy, whole = moved(toys.ToyFlow(steps=3), objective)
    point = ready(policy, objective, whole)
    weight = whole.mask.double() / whole.num_decisions[:, None]
    loss = (objective.loss(policy, point) * weight).sum() / len(SIX)

    def errors():
        off = (policy.dist(whole).mean - whole.target).square().flatten(1).mean(1)
        return torch.stack([off[whole.row_id == row].sum() for row in range(6)])

    with policy.weights.using(objective.snapshots[0]), torch.no_grad():
        before = errors()
    ratio = before - errors()
    compare(policy, objective, whole, loss, ratio, ratio)


def test_denoising_errors_need_no_noise_on_the_path_and_no_tokens(tmp_path):
    file = tmp_path / "run.yaml"
    errors = "{gvpo: {num_noise_draws: 2}}"
    file.write_text(WHOLE.format(policy="sd3", reward="digits", objective=errors))
    read(file, ["policy.sd3.sde_type=ode"])
    with pytest.raises(UserError, match="needs steps with noise"):
        read(file, ["policy.sd3.sde_type=ode", "objective=gvpo"])
    file.write_text(WHOLE.format(policy="vlm", reward="count", objective=errors))
    with pytest.raises(UserError, match="num_noise_draws: denoising errors are of flow"):
        read(file, [])


def test_denoising_errors_raise_the_reward_of_an_ode_sampler():
    objective = build("rebel", num_noise_draws=4, eta=0.1)
    policy = toys.ToyFlow(steps=4, noise_level=0.0)
    sizes = {"prompts_per_iteration": 2, "group_size": 12, "train_batch_size": 24, "seed": 1}
    trainer = toys.trainer(policy, objective, toys.smooth_reward, dance_grpo, 2e-2, **sizes)
    rewards = [trainer.iterate()["reward/mean"] for _ in range(8)]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.2, rewards
