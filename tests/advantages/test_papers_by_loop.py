"""Advantages of single papers against their formulas, written as plain loops over one group."""

import json
import math
from itertools import product
from statistics import fmean, pstdev, stdev

import pytest
import torch

from mmrl.advantages import dr_grpo
from mmrl.advantages.group import group
from mmrl.advantages.memory import capture, restore
from mmrl.advantages.process import process
from mmrl.core.errors import UserError
from mmrl.core.types import Provenance, Rewards
from mmrl.experiment.build import read
from mmrl.zoo.advantages import (
    AAPO,
    BRPO,
    COPO,
    PVPO,
    Branch,
    Filtered,
    RiskPO,
    SingleStream,
    bnpo,
    drpo,
    focal,
    gtpo,
    strata,
    tree_grpo,
    unlikeliness,
)
from mmrl.zoo.advantages import recorded as as_reward
from rewards.combined.votes import answer_frequency
from tests.advantages.test_advantages_by_loop import (
    ENTROPY,
    FLAT,
    GROUP,
    LEAVES,
    LENGTH,
    LOGPROB,
    NAME,
    NAN,
    OTHER,
    PRESENT,
    REWARD,
    SPANS,
    TREE,
    check,
    deviation,
    members,
    of_group,
    recorded,
    rollout,
    rows,
    same,
    tensor,
    two,
    whitened,
)
from tests.core.test_imports import ROOT

UNIT = [NAN if math.isnan(x) else 1 / (1 + math.exp(-3 * x)) for x in REWARD]  # between 0 and 1
RIGHT = [NAN if math.isnan(x) else float(x > 0.5) for x in REWARD]  # 0 or 1
MEANS = [fmean([REWARD[i] for i in PRESENT if GROUP[i] == g]) for g in range(5)]
BASE = {"base": dr_grpo}


def restored(fresh, advantage):
    restore(fresh, json.loads(json.dumps(capture(advantage))))
    return fresh


# Weights from the rewards of a group


def beta_density(p, alpha, beta):
    constant = math.gamma(alpha + beta) / math.gamma(alpha) / math.gamma(beta)
    return constant * p ** (alpha - 1) * (1 - p) ** (beta - 1)


def by_beta(i, values=UNIT):
    means = [fmean([values[j] for j in PRESENT if GROUP[j] == g]) for g in range(5)]
    p = fmean(means)
    strength = p * (1 - p) / stdev(means) ** 2 - 1
    alpha = max(1, 1 + strength * p / 3)
    beta = max(1, 1 + strength * (1 - p) / 3)
    mean = fmean(of_group(i, values))
    flat = len(set(of_group(i, values))) == 1
    return 0.0 if flat else (values[i] - mean) / beta_density(mean, alpha, beta)


def test_bnpo_divides_by_the_beta_density_of_the_mean():
    check("bnpo", {}, by_beta, tensor(UNIT))
    check("bnpo", {"low": -2.0, "high": 2.0}, by_beta, tensor([4 * x - 2 for x in UNIT]))
    both = Rewards({"a": tensor(UNIT), "b": tensor(RIGHT)}, {"a": 0.5, "b": 0.25})
    check("bnpo", {}, lambda i: 0.5 * by_beta(i) + 0.25 * by_beta(i, RIGHT), both)
    # of one mean the moments say nothing: the lead alone, a Beta density of (1, 1)
    same(bnpo(*two(0.0, 1.0)), [-0.5, 0.5])
    equal = bnpo(tensor([0.0, 1.0, 1.0, 0.0]), rollout([0, 0, 1, 1], [1] * 4))
    same(equal, [-0.5, 0.5, 0.5, -0.5])


def mixed_by_certainty(right):
    def of_row(i):
        mean = fmean(of_group(i, UNIT))
        q = mean if right is None else fmean([float(x >= right) for x in of_group(i, UNIT)])
        certain = 1 - 4 * q * (1 - q)
        percent = 0.0 if GROUP[i] in FLAT else (UNIT[i] - mean) / (mean + 1e-6)
        return (1 - certain) * whitened(i, values=UNIT) + certain * percent

    return of_row


@pytest.mark.parametrize("right", [None, 0.5])
def test_mapo_mixes_by_certainty(right):
    check("mapo", {"right": right}, mixed_by_certainty(right), tensor(UNIT))


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_noise_aware_weights(noise):
    """The multiple of the observed z-score that is nearest to the true one: their covariance."""

    def expected(i):
        q = fmean(of_group(i, RIGHT))
        t = min(max((q - noise) / (1 - 2 * noise), 0), 1)
        if GROUP[i] in FLAT or q in (0, 1):
            return 0.0
        weight = (1 - 2 * noise) * math.sqrt(t * (1 - t)) / math.sqrt(q * (1 - q))
        return weight * (RIGHT[i] - q) / math.sqrt(q * (1 - q))

    def base(rewards, batch):
        return group(rewards, batch, eps=0.0)

    check("noise_aware", {"base": base, "noise": noise}, expected, tensor(RIGHT))


@pytest.mark.parametrize("length", [None, 0.05])
def test_grpo_lead_weighs_by_difficulty(length):
    def shaped(i):
        if length is None:
            return REWARD[i]
        if REWARD[i] < 0.5:
            return -1.0
        sizes = [LENGTH[j] for j in members(i) if REWARD[j] >= 0.5]
        return math.exp(-length * (LENGTH[i] - fmean(sizes)) / (pstdev(sizes) + 1e-8))

    values = [shaped(i) if i in PRESENT else NAN for i in range(16)]

    def weight(x):
        return 0.4 + 1.1 / (1 + math.exp(10 * (x - 0.75)))

    def expected(i):
        over = of_group(i, values)
        advantage = 0.0 if max(over) - min(over) < 1e-12 else values[i] - fmean(over)
        q = fmean([float(REWARD[j] >= 0.5) for j in members(i)])
        return advantage * weight(q if advantage > 0 else 1 - q)

    check("grpo_lead", BASE | {"length": length}, expected)


def test_drpo_compares_right_answers_among_themselves():
    both = Rewards({"right": tensor(RIGHT), "short": tensor(OTHER)}, {"short": 2.0})

    def expected(i):
        solved = [j for j in members(i) if RIGHT[j] == 1]
        advantage = RIGHT[i] - fmean(of_group(i, RIGHT))
        if RIGHT[i] < 1:
            return advantage
        power = {j: math.exp(2.0 * OTHER[j] / 0.5) for j in solved}
        return advantage * len(solved) * power[i] / sum(power.values())

    check("drpo", BASE | {"reward": "right", "temperature": 0.5}, expected, both)
    alone = drpo(tensor(RIGHT), rollout(), base=dr_grpo)
    same(alone, rows(lambda i: RIGHT[i] - fmean(of_group(i, RIGHT))))


def blended(outcome):
    """COPO, by the outcome of every row."""

    def of_row(i):
        kinds = [outcome[j] for j in members(i)]
        shares = [kinds.count(kind) / len(kinds) for kind in sorted(set(kinds))]
        entropy = -sum(share * math.log(share) for share in shares)
        local = 1 / (1 + math.exp(-3 * (entropy - 0.35)))
        apart = (fmean(of_group(i)) - fmean(MEANS)) / (pstdev(MEANS) + 1e-4)
        return local * whitened(i) + (1 - local) * apart

    return of_row


@pytest.mark.parametrize("width", [0.0, 0.5])
def test_copo_blends_by_the_entropy_of_outcomes(width):
    outcome = {i: round(REWARD[i] / width) if width else REWARD[i] for i in PRESENT}
    check("copo", {"width": width}, blended(outcome))
    parts = COPO(width=width).parts(tensor(REWARD), rollout())
    assert parts.shape == (16, 1, 2)
    same(parts.sum(-1), rows(blended(outcome)), atol=1e-9)


LETTERS = ["ab-cb"[(3 * i) % 5] for i in range(16)]


@pytest.mark.parametrize("kinds", [LETTERS, ["a"] * 16, ["-"] * 16])
def test_outcomes_of_copo_may_be_answers(kinds):
    """The entropy of the answers, by the shares that answer_frequency gives; it is only watched."""
    texts = ["" if kinds[i] == "-" else f"<answer>{kinds[i]}</answer>" for i in PRESENT]
    groups = [{"text": str(GROUP[i]), "group": GROUP[i]} for i in PRESENT]
    shares = torch.zeros(16).double()
    shares[PRESENT] = answer_frequency(texts, groups).double()
    rewards = Rewards({"a": tensor(REWARD), "votes": shares}, {"votes": 0.0})
    check("copo", {"frequency": "votes"}, blended(kinds), rewards, atol=1e-6)  # shares are float32


# What a policy records


def mean_of(values, i):
    return fmean([float(values[i, t]) for t in range(LENGTH[i])] or [0.0])


@pytest.mark.parametrize("over", ["batch", "group"])
@pytest.mark.parametrize("limit", [None, 1.2])
def test_sure_answers_count_more(over, limit):
    def expected(i):
        if not LENGTH[i]:
            return whitened(i, "none")
        among = members(i) if over == "group" else PRESENT
        share = mean_of(ENTROPY, i) / (fmean([mean_of(ENTROPY, j) for j in among]) + 1e-8)
        share = share if limit is None else min(max(share, 1 / limit), limit)
        return whitened(i, "none") / (share + 1e-8)

    check("edge_grpo", BASE | {"over": over, "limit": limit}, expected)


@pytest.mark.parametrize("std", [True, False])
def test_long_answers_count_by_their_length_in_the_mean(std):
    def normed(i):
        tokens = [REWARD[j] for j in members(i) for _ in range(LENGTH[j])]
        lead = 0.0 if GROUP[i] in FLAT else REWARD[i] - fmean(tokens)
        return lead / (pstdev(tokens) + 1e-6) if std else lead

    check("hapo", {"std": std, "limit": None}, normed)
    limit = sorted(abs(normed(i)) for i in PRESENT)[-3]  # groups with larger ones fall back

    def limited(i):
        far = any(abs(normed(j)) >= limit for j in members(i))
        return whitened(i) if far else normed(i)

    check("hapo", {"std": std, "limit": limit}, limited)


def test_what_was_recorded_is_a_reward():
    """Or the only one (Intuitor): rewards of weight 0 are watched."""
    for which, values in (("self_certainty", ENTROPY.sqrt()), ("entropy", ENTROPY)):
        total = [REWARD[i] + 0.5 * mean_of(values, i) for i in range(16)]
        chosen = BASE | {"which": which, "weight": 0.5}
        check("recorded", chosen, lambda i, x=total: x[i] - fmean(of_group(i, x)))
    watched = Rewards({"watched": tensor([0.0, 1.0, NAN] + [0.5] * 13)}, {"watched": 0.0})
    certain = [mean_of(ENTROPY.sqrt(), i) if i != 2 else NAN for i in range(16)]
    among = [[j for j in range(16) if GROUP[j] == GROUP[i] and j != 2] for i in range(16)]
    leads = [certain[i] - fmean([certain[j] for j in among[i]]) for i in range(16)]
    same(as_reward(watched, recorded(), base=dr_grpo), leads, atol=1e-9)


def test_places_at_which_whole_distributions_differ_count_more():
    """Scaled over the places that the group's longest answer reaches."""
    spread = torch.rand(6, 5, generator=torch.Generator().manual_seed(2)).double()
    batch = rollout().replace(divergence=spread[torch.tensor(GROUP)])
    base = dr_grpo(tensor(REWARD), batch)[:, 0]
    computed = focal(tensor(REWARD), batch, base=dr_grpo, spread="distributions", most=2.0)
    for i in range(16):
        longest = max(LENGTH[j] for j in range(16) if GROUP[j] == GROUP[i])
        among = spread[GROUP[i], :longest].tolist()
        for t in range(LENGTH[i]):
            scaled = (among[t] - min(among)) / (max(among) - min(among) + 1e-8)
            expected = float(base[i]) * (1 + scaled)
            assert float(computed[i, t]) == pytest.approx(expected, abs=1e-9, nan_ok=True)


# Filters


def quantity(i, name):
    logp = [float(LOGPROB[i, t]) for t in range(LENGTH[i])]
    return {
        "reward": REWARD[i],
        "length": LENGTH[i],
        "reward_per_token": REWARD[i] / max(LENGTH[i], 1),
        "logprob": sum(logp),
        "surprisal": -sum(logp) / max(len(logp), 1),
        "b": OTHER[i],
    }[name]


QUANTITIES = ["reward", "length", "reward_per_token", "logprob", "surprisal", "b"]


@pytest.mark.parametrize(
    ("prefer", "outside"), [("highest", "drop"), ("lowest", "zero"), ("ends", "drop")]
)
def test_only_k_of_a_group_are_compared(prefer, outside, subtests):
    """GFPO: mean and std of those that stay; ties by the name of the row. "b" is only watched."""
    watched = Rewards({"a": tensor(REWARD), "b": tensor(OTHER)}, {"b": 0.0})
    for by in QUANTITIES:

        def kept(i, by=by):
            order = sorted(members(i), key=lambda j: (quantity(j, by), NAME[j]))
            if prefer == "ends" and len(order) > 3:
                return [order[0], order[-2], order[-1]]
            return order[:3] if prefer == "lowest" else order[-3:]

        def expected(i):
            if i not in kept(i):
                return NAN if outside == "drop" else 0.0
            over = [REWARD[j] for j in kept(i)]
            flat = max(over) == min(over)
            return 0.0 if flat else (REWARD[i] - fmean(over)) / (deviation(over, 1) + 1e-4)

        with subtests.test(by=by):
            chosen = {"by": by, "keep": 3, "prefer": prefer, "outside": outside}
            check("filtered", chosen, expected, None if by == "reward" else watched)


def test_thresholds_and_statistics_of_all_rows():
    """GTPO's filter: a bound on the entropy. PF-PPO's: all are compared, the ends are trained."""

    def within(by, low, high):
        def expected(i):
            over = [REWARD[j] for j in members(i) if low <= quantity(j, by) <= high]
            return REWARD[i] - fmean(over) if low <= quantity(i, by) <= high else NAN

        return expected

    check("filtered", BASE | {"by": "surprisal", "at_most": 1.1}, within("surprisal", -9, 1.1))
    bounds = {"by": "length", "at_least": 2.0, "at_most": 4.0}
    check("filtered", BASE | bounds, within("length", 2, 4))

    def ends(i):
        order = sorted(members(i), key=lambda j: (REWARD[j], NAME[j]))
        return whitened(i, "none") if i in (order[0], order[-1]) else NAN

    check("filtered", BASE | {"keep": 2, "prefer": "ends", "statistics": "all"}, ends)


def test_the_best_and_one_by_lot():
    """PF-PPO's best and random: the best always, the other of each group another in time."""
    advantage = Filtered(base=dr_grpo, keep=2, prefer="best_and_random", statistics="all", seed=3)
    drawn = set()
    for _ in range(20):
        stays = advantage(tensor([0.0, 3.0, 1.0, 2.0]), rollout([0] * 4, [1] * 4)).isfinite()
        chosen = stays[:, 0].nonzero()[:, 0].tolist()
        assert len(chosen) == 2 and 1 in chosen
        drawn |= set(chosen) - {1}
    assert drawn == {0, 2, 3} and advantage.iteration == 20


LEFT = [  # options, the groups that are trained on: right and flat ones go
    ({}, [0, 1, 2, 3]),
    ({"drop_groups": ["right"], "right": 0.8}, [1, 2, 3]),
    ({"drop_groups": ["wrong"], "right": 0.4}, [0, 1, 3]),
    ({"drop_groups": ["flat"]}, [0, 1, 2, 3]),
    ({"drop_groups": ["flat"], "flat_std": 0.01}, [0, 1, 2]),
    ({"drop_groups": ["flat", "right", "wrong"], "right": 0.45, "flat_std": 0.01}, [1]),
    ({"drop_groups": ["flat"], "outside": "zero", "flat_std": 0.01}, [0, 1, 2]),
]


def test_groups_leave():
    """Flat by a threshold; of continuous rewards all right or all wrong."""
    reward = tensor([0.9, 1.0, 0.2, 0.9, 0.1, 0.3, 0.50, 0.51])
    batch = rollout([0, 0, 1, 1, 2, 2, 3, 3], [1] * 8)
    for chosen, groups in LEFT:
        stays = Filtered(base=dr_grpo, **chosen)(reward, batch).isfinite()[:, 0]
        assert sorted(set(batch.group[stays].tolist())) == groups, chosen


def test_hard_prompts_keep_more_answers():
    """GFPO's adaptive difficulty: quartiles of the mean rewards met so far."""
    advantage = Filtered(base=dr_grpo, keep=[4, 3, 2, 1], memory=6)

    def kept(*means):
        reward = tensor([m + d for m in means for d in (-0.3, -0.1, 0.1, 0.3)])
        index = [g for g in range(len(means)) for _ in range(4)]
        stays = advantage(reward, rollout(index, [1] * len(index), list(range(len(index)))))
        return stays.isfinite().view(-1, 4).sum(1).tolist()

    assert kept(0.0, 1.0, 2.0, 3.0) == [4, 3, 2, 1]
    # 0 1 2 3 10 11: quartiles 1.25, 2.5, 8.25
    assert kept(11.0, 10.0) == [1, 1]
    assert advantage.means == pytest.approx([0, 1, 2, 3, 11, 10])
    assert kept(1.0) == [4]  # 1 2 3 11 10 1


def test_a_filter_of_step_rewards():
    steps = tensor([[1.0, 3.0], [2.0, 2.0], [5.0, 0.0]])
    batch = rollout([0, 0, 0], [2, 2, 2])
    advantage = Filtered(base=process, by="steps", keep=2)(Rewards({"steps": steps}), batch)
    whole = process(Rewards({"steps": steps[[0, 2]]}), batch[torch.tensor([0, 2])])
    assert advantage[1].isnan().all()
    torch.testing.assert_close(advantage[[0, 2]], whole)


def r_squared(pairs):
    """Of a line through the points: 1 - unexplained / all variance."""
    xs, ys = zip(*pairs, strict=True)
    slope = sum((x - fmean(xs)) * (y - fmean(ys)) for x, y in pairs)
    slope /= sum((x - fmean(xs)) ** 2 for x in xs)
    left = sum((y - fmean(ys) - slope * (x - fmean(xs))) ** 2 for x, y in pairs)
    return 1 - left / sum((y - fmean(ys)) ** 2 for y in ys)


def test_the_filter_whose_rows_tell_the_truth_best_is_chosen():
    """PF-PPO: R^2 between reward and actual score over all rows a strategy has kept so far."""
    strategies = ("highest", "lowest", "ends")
    chosen = {"keep": 2, "strategies": strategies, "actual": "truth", "statistics": "all"}
    advantage = Filtered(**chosen)
    kept = {name: set() for name in strategies}
    for i in PRESENT:
        order = sorted(members(i), key=lambda j: (REWARD[j], NAME[j]))
        kept["highest"] |= set(order[-2:])
        kept["lowest"] |= set(order[:2])
        kept["ends"] |= {order[0], order[-1]}
    points = {name: [] for name in strategies}
    choices = set()
    for n in range(3):
        # the reward tells the truth at the top, or at the bottom
        truth = [
            x if (x > 0.5) == (n == 0) else OTHER[(5 * i + n) % 16] for i, x in enumerate(REWARD)
        ]
        rewards = Rewards({"a": tensor(REWARD), "truth": tensor(truth)}, {"truth": 0.0})
        for name in strategies:
            points[name] += [(REWARD[i], truth[i]) for i in sorted(kept[name])]
        best = max(strategies, key=lambda name: r_squared(points[name]))
        stay = [whitened(i) if i in PRESENT and i in kept[best] else NAN for i in range(16)]
        same(advantage(rewards, rollout()), stay, atol=1e-9)
        for name in strategies:
            assert advantage.r_squared(name) == pytest.approx(r_squared(points[name]), abs=1e-9)
        choices.add(best)
        advantage = restored(Filtered(**chosen), advantage)
    assert len(choices) > 1
    flat = Rewards({"a": tensor(REWARD), "truth": tensor([1.0] * 16)}, {"truth": 0.0})
    unknown = Filtered(keep=2, prefer="lowest", actual="truth")(flat, rollout())
    same(unknown, Filtered(keep=2, prefer="lowest")(tensor(REWARD), rollout()), atol=0)


# Baselines with a memory or a reference


def test_pvpo_keeps_the_reward_of_the_first_meeting():
    value = [whitened(i, "none") for i in PRESENT]
    scale = pstdev(value) + 1e-4
    check("pvpo", {}, lambda i: whitened(i, "none"))
    check("pvpo", {"scale": "batch"}, lambda i: whitened(i, "none") / scale)
    advantage = PVPO()
    advantage(tensor(REWARD), rollout())
    later = restored(PVPO(), advantage)(tensor(REWARD) + 1, rollout())
    same(later, rows(lambda i: whitened(i, "none") + 1), atol=1e-12)
    again = PVPO(refresh=2)
    found = [again(*two(0.0 + n, 2.0 + n)).flatten().tolist() for n in range(4)]
    assert found == [[-1.0, 1.0], [0.0, 2.0], [-1.0, 1.0], [0.0, 2.0]]


def test_the_mean_of_a_prompt_moves():
    """AVATAR's baseline: what the policy earned on the prompt before, moved by what it samples;
    old answers are compared with it and do not move it. Any order of rows; after a resume."""
    old = torch.tensor([False, True, False, False])
    batch = rollout([0, 0, 1, 1], [1, 1, 1, 1]).replace(provenance=Provenance(is_replayed=old))
    visits = [[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.5, NAN], [0.5, 0.25, 0.0, 1.0]]
    advantage = PVPO(rate=0.3)
    levels = {0: 0.5, 1: 0.5}  # the means of the first visit
    for rewards in visits:
        turned = torch.tensor([2, 0, 3, 1])
        computed = advantage(tensor(rewards)[turned], batch[turned])[turned.argsort()]
        same(computed, [r - levels[i // 2] for i, r in enumerate(rewards)], atol=1e-12)
        for g in (0, 1):
            own = [(i, r) for i, r in enumerate(rewards) if i // 2 == g and not math.isnan(r)]
            levels[g] += 0.3 * (fmean([r for i, r in own if not old[i]]) - levels[g])
        advantage = restored(PVPO(rate=0.3), advantage)


def test_references_from_a_file_or_a_field(tmp_path):
    path = tmp_path / "reference.jsonl"
    lines = [{"text": "prompt 0", "reward": [0.0, 1.0]}, {"text": "prompt 1", "reward": 0.25}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    batch = rollout([0, 1, 1], [1, 1, 1])
    fields = batch.replace(prompts=[{"text": "x", "value": 0.5}, {"text": "y", "value": 0.25}])
    for reference, known in ((PVPO(file=path), batch), (PVPO(field="value"), fields)):
        same(reference(tensor([1.0, 1.0, 0.0]), known), [0.5, 0.75, -0.25])
    with pytest.raises(UserError, match="has no reward for the prompt 'prompt 2'"):
        PVPO(file=path)(tensor([1.0]), rollout([2], [1]))
    for content, says in (
        ('{"text": "a"}\n', "reference.jsonl:1: expected"),
        ("\n", "a reward of a reference is missing"),
        ('{"text": "a", "reward": []}', "a reward of a reference is missing"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=says):
            PVPO(file=path)


@pytest.mark.parametrize("source", ["file", "field", "first sight"])
@pytest.mark.parametrize("compare", ["answers", "mean"])
def test_aapo_adds_a_bounded_lead_over_the_reference(source, compare, tmp_path):
    """Over its mean, or the n-th answer by name over the n-th of the reference, from the first
    again after the last."""
    known = {g: [0.1 * g, 0.9, 0.3] for g in range(6)}
    options = {"compare": compare}
    batch = rollout()
    if source == "file":
        options["file"] = tmp_path / "reference.jsonl"
        lines = [json.dumps({"text": f"prompt {g}", "reward": known[g]}) for g in known]
        options["file"].write_text("\n".join(lines))
    elif source == "field":
        options["field"] = "earlier"
        given = [{**prompt, "earlier": known[g]} for g, prompt in enumerate(batch.prompts)]
        batch = batch.replace(prompts=given)
    advantage = AAPO(**options)
    if source == "first sight":  # of which only the scored answers are known
        first = [0.5 * x for x in REWARD]
        advantage(tensor(first), batch)
        by_name = sorted(PRESENT, key=lambda i: NAME[i])
        known = {g: [first[i] for i in by_name if GROUP[i] == g] for g in set(GROUP)}
        advantage = restored(AAPO(**options), advantage)

    def expected(i):
        values = known[GROUP[i]]
        place = sorted(members(i), key=lambda j: NAME[j]).index(i) % len(values)
        reference = values[place] if compare == "answers" else fmean(values)
        return whitened(i) + min(max(REWARD[i] - reference, -0.2), 0.28)

    same(advantage(tensor(REWARD), batch), rows(expected), atol=1e-9)


def test_single_stream_tracks_a_value_for_each_prompt(tmp_path):
    """Two iterations, the first from rewards of a reference, with a drift of the log-probs."""
    path = tmp_path / "reference.jsonl"
    path.write_text(json.dumps({"text": "prompt 0", "reward": [1.0, 0.0, 1.0]}))
    reward = [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]
    drifts = [0.0, 0.01]  # so that rho lies inside its bounds: 2^(-1/6) = 0.89
    count = 1 / (1 - 0.875)
    tracker = {0: [count * 2.5 / 4, count * 1.5 / 4], 1: [0.5, 0.5]}
    advantage = SingleStream(file=path)
    group_of = [0, 1, 1]
    for n in range(2):
        batch = rollout(group_of, [2, 2, 2])
        batch = batch.replace(logprob=torch.full((3, 2), -1.0 - drifts[n], dtype=torch.float64))
        lead = [r - tracker[g][0] / sum(tracker[g]) for r, g in zip(reward[n], group_of)]
        expected = [(x - fmean(lead)) / (stdev(lead) + 1e-8) for x in lead]
        same(advantage(tensor(reward[n]), batch), expected, atol=1e-9)
        for g in tracker:
            rho = min(max(2 ** (-drifts[n] / 0.06), 0.875), 0.96)
            own = [r for r, h in zip(reward[n], group_of) if h == g]
            alpha, beta = tracker[g]
            tracker[g] = [rho * alpha + sum(own), rho * beta + len(own) - sum(own)]
            assert advantage.trackers[f"prompt {g}"][:2] == pytest.approx(tracker[g])
        assert 0.875 < 2 ** (-0.01 / 0.06) < 0.96
    # groups of one teach
    computed = SingleStream(drift="none")(tensor([1.0, 0.0, 1.0]), rollout([0, 1, 2], [1, 1, 1]))
    value = [0.5, -0.5, 0.5]
    same(computed, [(x - fmean(value)) / stdev(value) for x in value], atol=1e-7)


# One of the group, and bundles


@pytest.mark.parametrize("compare", ["sign", "difference"])
def test_brpo_compares_with_a_pivot_by_lot(compare):
    advantage = BRPO(compare=compare, margin=0.15, seed=5)
    reward = [0.0, 0.1, 0.5, 1.0]
    pivots = set()
    for n in range(30):
        assert advantage.iteration == n
        computed = advantage(tensor(reward), rollout([0] * 4, [1] * 4))[:, 0].tolist()
        fits = set()  # the pivots for which all comparisons come out as they did
        for pivot in range(4):
            lead = [r - reward[pivot] if abs(r - reward[pivot]) > 0.15 else 0.0 for r in reward]
            signs = [math.copysign(1, x) if x else 0.0 for x in lead]
            if computed == pytest.approx(signs if compare == "sign" else lead):
                fits.add(pivot)
        assert fits
        pivots |= fits
    assert pivots == {0, 1, 2, 3}


def quantile(values, level):
    """Between the two neighbours, as numpy's and torch's default."""
    order = sorted(values)
    place = level * (len(order) - 1)
    below = math.floor(place)
    above = min(below + 1, len(order) - 1)
    return order[below] + (place - below) * (order[above] - order[below])


def risk(x, trials, lower, upper, tail):
    """max(x - l, 0) - max(x - u, 0) + l - u over the width; max(l - x, 0) over the lower level."""
    value = max(x - lower, 0) - max(x - upper, 0) + lower - upper
    value = (value / 0.6 + tail * -max(lower - x, 0) / 0.2) / (1 + tail)
    return value / (stdev(trials) + 1e-6)


def test_riskpo_learns_from_the_tail_of_bundles():
    """Groups of 4, 3 | 2: the first two are a bundle of three trials, the last one alone."""
    reward = [0.1, 0.9, 0.4, 0.7, 0.3, 0.8, 0.2, 0.6, 0.5]
    index = [0, 1, 0, 1, 0, 1, 0, 2, 2]
    name = [4, 7, 3, 5, 1, 6, 2, 9, 8]
    advantage = RiskPO(bundle=2)
    of_name = sorted(range(9), key=lambda i: name[i])
    first, second, last = ([i for i in of_name if index[i] == g] for g in range(3))
    bundles = [list(zip(first, second)), [(i,) for i in last]]
    tracked = None
    for n in range(2):
        values = [x * (n + 1) for x in reward]
        expected = [0.0] * 9
        every = []
        for trials in bundles:
            scores = [sum(values[i] for i in trial) for trial in trials]
            every += scores
            ends = [quantile(scores, 0.2), quantile(scores, 0.8)]
            if tracked:
                ends = [(a + b) / 2 for a, b in zip(ends, tracked)]
            for trial, x in zip(trials, scores):
                for i in trial:
                    expected[i] = risk(x, scores, *ends, 1.5)
        same(advantage(tensor(values), rollout(index, [1] * 9, name)), expected, atol=1e-9)
        below = [fmean([float(x < q) for x in every]) for q in tracked or ()]
        moves = [0.1 * (level - share) for level, share in zip((0.2, 0.8), below)]
        start = [quantile(every, level) for level in (0.2, 0.8)]
        tracked = [q + move for q, move in zip(tracked, moves)] if tracked else start
        assert advantage.tracked == pytest.approx(tracked)
    reward = [0.1, 0.9, 0.4, 0.7]
    lower, upper = quantile(reward, 0.2), quantile(reward, 0.8)
    value = [(min(max(x, lower), upper) - upper) / 0.6 for x in reward]
    for centred, off in ((False, 0.0), (True, fmean(value))):
        chosen = {"bundle": 1, "tail": 0.0, "quantiles": "batch", "std": False}
        plain = RiskPO(**chosen, centred=centred)(tensor(reward), rollout([0] * 4, [1] * 4))
        same(plain, [x - off for x in value], atol=1e-12)


# Probabilities, tokens, behaviours


def test_unlikely_right_answers_are_paid_more():
    both = Rewards({"right": tensor(RIGHT), "b": tensor(OTHER)}, {"right": 2.0, "b": 0.5})

    def shaped(i, strength):
        likely = sorted(members(i), key=lambda j: -quantity(j, "logprob"))
        size = len(likely)
        return RIGHT[i] * (1 - strength * (size - likely.index(i)) / size)

    for chosen, strength in (({}, 0.25), ({"strength": 0.5}, 0.5)):
        total = {i: 2 * shaped(i, strength) + 0.5 * OTHER[i] for i in PRESENT}
        options = BASE | {"reward": "right"} | chosen
        check("unlikeliness", options, lambda i, x=total: x[i] - fmean(of_group(i, x)), both)
    # answers of one probability are paid alike
    same(unlikeliness(*two(1.0, 1.0), base=dr_grpo), [0.0, 0.0])


def conflict_weight(i, t, tokens, lengths, sign):
    """One token: whether it is in a run of shared tokens from the first, or from the last."""

    def shared(j, place, behind):
        at = lengths[j] - 1 - place if behind else place
        sides = {
            sign[k]
            for k in range(len(tokens))
            if 0 <= (p := lengths[k] - 1 - place if behind else place) < lengths[k]
            and tokens[k][p] == tokens[j][at]
        }
        return {1, -1} <= sides

    forward = all(shared(i, p, False) for p in range(t + 1))
    backward = all(shared(i, p, True) for p in range(lengths[i] - t))
    if sign[i] < 0:
        return 0.0 if forward or backward else 1.0
    return (2.0 if forward else 1.0) * (2.0 if backward else 1.0)


def test_conflict_tokens_are_spared_in_bad_answers_and_count_twice_in_good_ones():
    tokens = [[5, 6, 7, 8, 9], [5, 6, 1, 9, 0], [5, 6, 7, 8, 9], [4, 6, 7, 9, 0], [5, 2, 9, 0, 0]]
    lengths = [5, 4, 5, 4, 3]
    reward = [1.0, 0.0, 1.0, 0.25, 0.0]
    entropy = [[0.1 * (1 + i) + 0.05 * t for t in range(5)] for i in range(5)]
    batch = rollout([0] * 5, lengths, list(range(5))).replace(
        sample=torch.tensor(tokens), entropy=tensor(entropy)
    )
    mean = fmean(reward)
    sign = [1 if r > mean else -1 for r in reward]
    whole = {"at_most": None, "penalty": 0.5, "share_conflicts": False}
    for chosen, limit, penalty in (({}, 0.7, 0.1), (whole, 9.0, 0.5)):
        computed = gtpo(tensor(reward), batch, base=dr_grpo, **chosen)
        for i in range(5):
            mean_entropy = fmean(entropy[i][: lengths[i]])
            shaped = reward[i] - mean - penalty * mean_entropy if mean_entropy <= limit else 0.0
            weights = [conflict_weight(i, t, tokens, lengths, sign) for t in range(lengths[i])]
            conflicts = max(1, sum(weight != 1 for weight in weights))
            expected = [shaped * weight / (1 if chosen else conflicts) for weight in weights]
            assert computed[i, : lengths[i]].tolist() == pytest.approx(expected, abs=1e-9)


def test_gtpo_drops_answers_of_high_entropy_and_knows_groups_apart():
    tokens = torch.tensor([[1, 2], [1, 3], [1, 2], [1, 3]])
    entropy = tensor([[0.1, 0.1], [2.0, 1.0], [0.1, 0.1], [0.2, 0.2]])
    apart = rollout([0, 0, 1, 1], [2] * 4, [0, 1, 2, 3]).replace(sample=tokens, entropy=entropy)
    computed = gtpo(tensor([1.0, 0.0, 1.0, 1.0]), apart, base=dr_grpo, penalty=0.0)
    expected = [[1.0, 0.5], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    torch.testing.assert_close(computed, tensor(expected), atol=1e-12, rtol=0)
    missing = gtpo(tensor([1.0, 0.0, NAN, 1.0]), apart, base=dr_grpo, penalty=0.0)
    assert missing[2].isnan().all() and missing[[0, 1, 3]].isfinite().all()
    order = torch.tensor([3, 0, 2, 1])
    moved = gtpo(tensor([1.0, 1.0, 1.0, 0.0]), apart[order], base=dr_grpo, penalty=0.0)
    torch.testing.assert_close(moved, computed[order])


@pytest.mark.parametrize("outcome", [None, "right"])
def test_a_behaviour_is_paid_where_it_helps_its_group(outcome):
    shows = [float(i in (0, 1)) for i in range(16)]
    values = {"right": RIGHT, "form": OTHER, "tool": shows}
    weights = {"right": 1.0, "form": 0.25, "tool": 0.5}
    rewards = Rewards({name: tensor(x) for name, x in values.items()}, weights)

    def earned(j):
        return RIGHT[j] if outcome else RIGHT[j] + 0.25 * OTHER[j]

    def sign(i):
        having = [earned(j) for j in members(i) if shows[j]]
        lacking = [earned(j) for j in members(i) if not shows[j]]
        if not having or not lacking or abs(fmean(having) - fmean(lacking)) <= 0.3:
            return 0.0
        return math.copysign(1, fmean(having) - fmean(lacking))

    def expected(i):
        total = {j: RIGHT[j] + 0.25 * OTHER[j] + 0.5 * sign(i) * shows[j] for j in members(i)}
        return total[i] - fmean(total.values())

    chosen = BASE | {"behaviour": "tool", "outcome": outcome, "margin": 0.3}
    check("gcpo", chosen, expected, rewards)
    assert {sign(i) for i in PRESENT} == {-1.0, 0.0, 1.0} or outcome is None
    path = ROOT / "configs" / "vlm" / "othink_mr1.yaml"
    with pytest.raises(UserError, match="gcpo.*behaviour"):
        read(path, ["advantage=gcpo"])
    read(path, ["advantage={gcpo: {behaviour: format}}"])


# Tasks

TASK = {g: ("count", "read", "draw")[g % 3] for g in range(6)}


@pytest.mark.parametrize("count", ["rows", "decisions"])
@pytest.mark.parametrize("shares", [None, {"count": 3.0, "draw": 0.5}])
def test_every_task_has_its_share_of_the_gradient(count, shares):
    """CGPO: the sum over tasks of the share times the task's own mean; one is compared in another
    way."""
    batch = rollout()
    batch = batch.replace(prompts=[{"text": "", "task": TASK[g]} for g in range(6)])
    advantage = strata(tensor(REWARD), batch, shares=shares, count=count, tasks={"read": dr_grpo})
    weight = {i: LENGTH[i] if count == "decisions" else 1 for i in PRESENT}
    met = {TASK[GROUP[i]] for i in PRESENT}
    share = {task: (shares or {}).get(task, 1.0) for task in met}

    def expected(i):
        task = TASK[GROUP[i]]
        stratum = [weight[j] for j in PRESENT if TASK[GROUP[j]] == task]
        plain = whitened(i, "none" if task == "read" else "group")
        return plain * share[task] / sum(share.values()) * sum(weight.values()) / sum(stratum)

    same(advantage, rows(expected), atol=1e-9)


def test_a_task_that_is_missing_leaves_its_share_to_the_others():
    batch = rollout([0, 0, 1, 1], [1] * 4)
    batch = batch.replace(prompts=[{"task": "a"}, {"task": "b"}])
    rewards = tensor([0.0, 1.0, NAN, NAN])
    advantage = strata(rewards, batch, base=dr_grpo, shares={"a": 0.2, "b": 0.8})
    same(advantage, [-0.5, 0.5, NAN, NAN])


# Trees


# two trees of eight leaves in one group; the second reads its leaves backwards
TREES = type(TREE).cat([TREE, TREE.replace(row_id=TREE.row_id + 8, edge_id=TREE.edge_id + 8)])
BOTH = LEAVES + [x + 0.05 for x in reversed(LEAVES)]
MIXED = torch.randperm(16, generator=torch.Generator().manual_seed(0))


def test_an_edge_is_compared_with_its_siblings():
    """TreeRPO: those that begin at the end of one edge. The first edges are siblings."""
    above = (16, 4, 4, 2, 2)  # leaves below the edge before, where another begins
    for chosen, ddof, eps in (({}, 1, 1e-8), ({"ddof": 0, "eps": 0.5}, 0, 0.5)):
        advantage = Branch(among="siblings", **chosen)(tensor(BOTH), TREES)
        for (k, span), i in product(enumerate(SPANS), range(16)):
            first = i - i % above[k]
            edges = [fmean(BOTH[j : j + span]) for j in range(first, first + above[k], span)]
            own = fmean(BOTH[i - i % span : i - i % span + span])
            expected = (own - fmean(edges)) / (deviation(edges, ddof) + eps)
            assert float(advantage[i, k]) == pytest.approx(expected, abs=1e-6)
        moved = Branch(among="siblings", **chosen)(tensor(BOTH)[MIXED], TREES[MIXED])
        torch.testing.assert_close(moved, advantage[MIXED])


def test_siblings_of_token_trees_have_unequal_edges():
    """A text of three tokens for two images, and a row that shares nothing: its edge goes on, and
    is still the one beside the plan."""
    edge_id = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [2, 2, 2, 2]])
    batch = rollout([0, 0, 0], [4, 4, 4], [0, 1, 2]).replace(edge_id=edge_id)
    advantage = Branch(among="siblings", ddof=0, eps=1e-12)(tensor([1.0, 3.0, 4.0]), batch)
    expected = torch.tensor([[-1.0, -1, -1, -1], [-1, -1, 1, 1], [1, 1, 1, 1]])
    torch.testing.assert_close(advantage, expected, atol=1e-6, rtol=0)


def test_tree_grpo_adds_the_comparison_within_and_between_trees():
    """The first edges part at once: four trees of four leaves."""

    def z(i, over):
        return (BOTH[i] - fmean(over)) / (stdev(over) + 1e-6)

    for chosen, intra, inter in (({}, 1, 1), ({"intra": 0.5, "inter": 2.0}, 0.5, 2.0)):
        own = [BOTH[i - i % 4 : i - i % 4 + 4] for i in range(16)]
        expected = [intra * z(i, own[i]) + inter * z(i, BOTH) for i in range(16)]
        same(tree_grpo(tensor(BOTH), TREES, **chosen), expected, atol=1e-9)
        moved = tree_grpo(tensor(BOTH)[MIXED], TREES[MIXED], **chosen)
        same(moved[MIXED.argsort()], expected, atol=1e-9)


def test_probabilities_on_a_tree_are_those_of_whole_paths():
    """Shared decisions are in one row's mask only, but belong to the others too."""
    edge_id = torch.tensor([[0, 0, 0], [0, 0, 1]])
    mask = torch.tensor([[True, True, True], [False, False, True]])
    logprob = tensor([[-1.0, -1.0, -0.5], [-1.0, -1.0, -2.0]])
    batch = rollout([0, 0], [3, 3], [0, 1]).replace(mask=mask, logprob=logprob, edge_id=edge_id)
    computed = unlikeliness(tensor([1.0, 1.0]), batch, base=dr_grpo)
    same(computed, [-0.0625, 0.0625])  # 1 - 1/4 for the likely, 1 - 1/8 for the other
    longest = Filtered(base=dr_grpo, by="length", at_least=3.0)(tensor([1.0, 0.0]), batch)
    same(longest, [0.5, -0.5])
