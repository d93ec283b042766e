"""Advantages of single papers against their formulas, written as plain loops over one group."""

import json
import math
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
    GCPO,
    PVPO,
    Branch,
    Filtered,
    RiskPO,
    SingleStream,
    asymre,
    bnpo,
    drpo,
    grpo_lead,
    gtpo,
    mapo,
    noise_aware,
    strata,
    tree_grpo,
    unlikeliness,
)
from rewards.combined.votes import answer_frequency
from tests.advantages.test_advantages_by_loop import (
    FLAT,
    GROUP,
    LENGTH,
    NAME,
    NAN,
    PRESENT,
    REWARD,
    deviation,
    group_rewards,
    rollout,
    rows,
    same,
    tensor,
    tree,
    whitened,
)
from tests.core.test_imports import ROOT

UNIT = [NAN if math.isnan(x) else 1 / (1 + math.exp(-3 * x)) for x in REWARD]  # between 0 and 1
RIGHT = [NAN if math.isnan(x) else float(x > 0.5) for x in REWARD]  # 0 or 1
OTHER = [math.sin(3 * i) for i in range(16)]
LOGPROB = torch.tensor(
    [[-1 - math.cos(7 * i + 3 * t) for t in range(5)] for i in range(16)], dtype=torch.float64
)
LEAVES = [0.1, 0.5, 0.9, 0.3, 0.8, 0.2, 0.6, 0.7]


def members(i):
    """Rows of the group of row i that are there."""
    return [j for j in PRESENT if GROUP[j] == GROUP[i]]


def groups_there():
    return sorted({GROUP[i] for i in PRESENT})


def share_right(i, threshold):
    return fmean([float(REWARD[j] >= threshold) for j in members(i)])


# Weights from the rewards of a group


def beta_density(p, alpha, beta):
    constant = math.gamma(alpha + beta) / math.gamma(alpha) / math.gamma(beta)
    return constant * p ** (alpha - 1) * (1 - p) ** (beta - 1)


def bnpo_of(values, i):
    means = [fmean([values[j] for j in PRESENT if GROUP[j] == g]) for g in groups_there()]
    p = fmean(means)
    strength = p * (1 - p) / stdev(means) ** 2 - 1
    alpha = max(1, 1 + strength * p / 3)
    beta = max(1, 1 + strength * (1 - p) / 3)
    mean = fmean(group_rewards(i, values))
    flat = len(set(group_rewards(i, values))) == 1
    return 0.0 if flat else (values[i] - mean) / beta_density(mean, alpha, beta)


def test_bnpo_divides_by_the_beta_density_of_the_mean():
    same(bnpo(tensor(UNIT), rollout()), rows(lambda i: bnpo_of(UNIT, i)), atol=1e-9)
    wide = [4 * x - 2 for x in UNIT]
    moved = bnpo(tensor(wide), rollout(), low=-2.0, high=2.0)
    same(moved, rows(lambda i: bnpo_of(UNIT, i)), atol=1e-9)
    both = Rewards({"a": tensor(UNIT), "b": tensor(RIGHT)}, {"a": 0.5, "b": 0.25})
    expected = rows(lambda i: 0.5 * bnpo_of(UNIT, i) + 0.25 * bnpo_of(RIGHT, i))
    same(bnpo(both, rollout()), expected, atol=1e-9)


def test_bnpo_of_few_groups_and_of_wrong_rewards():
    """Of one group the moments say nothing: the lead alone, which is a Beta density of (1, 1)."""
    same(bnpo(tensor([0.0, 1.0]), rollout([0, 0], [1, 1])), [-0.5, 0.5])
    equal = bnpo(tensor([0.0, 1.0, 1.0, 0.0]), rollout([0, 0, 1, 1], [1] * 4))
    same(equal, [-0.5, 0.5, 0.5, -0.5])
    with pytest.raises(UserError, match="bnpo needs rewards between low = 0.0 and high = 1.0"):
        bnpo(tensor([0.0, 1.5]), rollout([0, 0], [1, 1]))
    with pytest.raises(UserError, match="must be less than high"):
        bnpo(tensor([0.0, 1.0]), rollout([0, 0], [1, 1]), low=1.0)


@pytest.mark.parametrize("right", [None, 0.5])
def test_mapo_mixes_by_certainty(right):
    def expected(i):
        mean = fmean(group_rewards(i, UNIT))
        q = mean if right is None else fmean([float(x >= right) for x in group_rewards(i, UNIT)])
        certain = 1 - 4 * q * (1 - q)
        percent = 0.0 if GROUP[i] in FLAT else (UNIT[i] - mean) / (mean + 1e-6)
        return (1 - certain) * whitened(i, values=UNIT) + certain * percent

    same(mapo(tensor(UNIT), rollout(), right=right), rows(expected), atol=1e-9)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_noise_aware_weights(noise):
    """The multiple of the observed z-score that is nearest to the true one: their covariance."""

    def expected(i):
        q = fmean(group_rewards(i, RIGHT))
        t = min(max((q - noise) / (1 - 2 * noise), 0), 1)
        if GROUP[i] in FLAT or q in (0, 1):
            return 0.0
        weight = (1 - 2 * noise) * t * (1 - t) / math.sqrt(q * (1 - q))
        weight = weight / math.sqrt(t * (1 - t)) if 0 < t < 1 else 0.0
        return weight * (RIGHT[i] - q) / math.sqrt(q * (1 - q))

    def base(rewards, batch):
        return group(rewards, batch, eps=0.0)

    computed = noise_aware(tensor(RIGHT), rollout(), base=base, noise=noise)
    same(computed, rows(expected), atol=1e-9)


def test_noise_aware_weight_minimises_the_error_of_the_z_score():
    """Exact expectation over flips: no other multiple comes nearer."""
    t, noise = 0.3, 0.2
    q = t * (1 - noise) + (1 - t) * noise
    cases = [
        (true, seen, (t if true else 1 - t) * (1 - noise if true == seen else noise))
        for true in (0, 1)
        for seen in (0, 1)
    ]

    def error(weight):
        return sum(
            chance
            * (weight * (s - q) / math.sqrt(q * (1 - q)) - (r - t) / math.sqrt(t * (1 - t))) ** 2
            for r, s, chance in cases
        )

    weight = (1 - 2 * noise) * math.sqrt(t * (1 - t) / (q * (1 - q)))
    assert error(weight) < min(error(weight + 1e-3), error(weight - 1e-3))


@pytest.mark.parametrize("length", [None, 0.05])
def test_grpo_lead_weighs_by_difficulty(length):
    def shaped(i):
        if length is None:
            return REWARD[i]
        if REWARD[i] < 0.5:
            return -1.0
        sizes = [LENGTH[j] for j in members(i) if REWARD[j] >= 0.5]
        return math.exp(-length * (LENGTH[i] - fmean(sizes)) / (pstdev(sizes) + 1e-8))

    values = [NAN if i not in PRESENT else shaped(i) for i in range(16)]

    def weight(x):
        return 0.4 + 1.1 / (1 + math.exp(10 * (x - 0.75)))

    def expected(i):
        over = group_rewards(i, values)
        flat = max(over) - min(over) < 1e-12
        advantage = 0.0 if flat else values[i] - fmean(over)
        q = share_right(i, 0.5)
        return advantage * weight(q if advantage > 0 else 1 - q)

    computed = grpo_lead(tensor(REWARD), rollout(), base=dr_grpo, length=length)
    same(computed, rows(expected), atol=1e-9)


def test_drpo_compares_right_answers_among_themselves():
    both = Rewards({"right": tensor(RIGHT), "short": tensor(OTHER)}, {"short": 2.0})

    def expected(i):
        solved = [j for j in members(i) if RIGHT[j] == 1]
        advantage = RIGHT[i] - fmean(group_rewards(i, RIGHT))
        if RIGHT[i] < 1:
            return advantage
        power = {j: math.exp(2.0 * OTHER[j] / 0.5) for j in solved}
        return advantage * len(solved) * power[i] / sum(power.values())

    computed = drpo(both, rollout(), base=dr_grpo, reward="right", temperature=0.5)
    same(computed, rows(expected), atol=1e-9)
    solved = torch.tensor(RIGHT) == 1
    assert (computed[solved] >= 0).all()
    alone = drpo(tensor(RIGHT), rollout(), base=dr_grpo)
    same(alone, rows(lambda i: RIGHT[i] - fmean(group_rewards(i, RIGHT))))
    with pytest.raises(UserError, match="drpo: reward is 'wright'.*did you mean 'right'"):
        drpo(both, rollout(), reward="wright")


def test_asymre_shifts_the_baseline():
    same(asymre(tensor(REWARD), rollout()), rows(lambda i: whitened(i, "none") + 0.1))
    same(asymre(tensor(REWARD), rollout(), shift=0.5), rows(lambda i: whitened(i, "none") - 0.5))


@pytest.mark.parametrize("width", [0.0, 0.5])
def test_copo_blends_by_the_entropy_of_outcomes(width):
    means = [fmean([REWARD[j] for j in PRESENT if GROUP[j] == g]) for g in groups_there()]

    def expected(i):
        over = group_rewards(i)
        outcomes = [round(x / width) if width else x for x in over]
        shares = [outcomes.count(kind) / len(over) for kind in set(outcomes)]
        entropy = -sum(share * math.log(share) for share in shares)
        local = 1 / (1 + math.exp(-3 * (entropy - 0.35)))
        apart = (fmean(over) - fmean(means)) / (pstdev(means) + 1e-4)
        return local * whitened(i) + (1 - local) * apart

    same(COPO(width=width)(tensor(REWARD), rollout()), rows(expected), atol=1e-9)
    parts = COPO(width=width).parts(tensor(REWARD), rollout())
    assert parts.shape == (16, 1, 2)
    same(parts.sum(-1), rows(expected), atol=1e-9)
    order = torch.arange(15, -1, -1)
    turned = COPO(width=width).parts(tensor(REWARD)[order], rollout()[order])
    torch.testing.assert_close(turned, parts[order], atol=1e-12, rtol=0, equal_nan=True)


@pytest.mark.parametrize("answer", ["letters", "all alike", "none"])
def test_outcomes_of_copo_may_be_answers(answer):
    """The entropy of the answers, by the shares that answer_frequency gives; it is only watched."""
    kinds = {
        "letters": ["ab-cb"[(3 * i) % 5] for i in range(16)],
        "all alike": ["a"] * 16,
        "none": ["-"] * 16,
    }[answer]
    texts = ["" if kinds[i] == "-" else f"<answer>{kinds[i]}</answer>" for i in PRESENT]
    groups = [{"text": str(GROUP[i]), "group": GROUP[i]} for i in PRESENT]
    shares = torch.zeros(16).double()
    shares[PRESENT] = answer_frequency(texts, groups).double()
    rewards = Rewards({"a": tensor(REWARD), "votes": shares}, {"votes": 0.0})
    means = [fmean([REWARD[j] for j in PRESENT if GROUP[j] == g]) for g in groups_there()]

    def expected(i):
        outcomes = [kinds[j] for j in members(i)]
        parts = [outcomes.count(kind) / len(outcomes) for kind in sorted(set(outcomes))]
        entropy = -sum(part * math.log(part) for part in parts)
        local = 1 / (1 + math.exp(-3 * (entropy - 0.35)))
        apart = (fmean(group_rewards(i)) - fmean(means)) / (pstdev(means) + 1e-4)
        return local * whitened(i) + (1 - local) * apart

    # shares are float32
    same(COPO(frequency="votes")(rewards, rollout()), rows(expected), atol=1e-6)
    with pytest.raises(UserError, match="neither a reward nor a quantity"):
        COPO(frequency="vote")(rewards, rollout())


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


@pytest.mark.parametrize(
    "by", ["reward", "length", "reward_per_token", "logprob", "surprisal", "b"]
)
@pytest.mark.parametrize(
    ("prefer", "outside"), [("highest", "drop"), ("lowest", "zero"), ("ends", "drop")]
)
def test_only_k_of_a_group_are_compared(by, prefer, outside):
    """GFPO: mean and std of those that stay; ties by the name of the row. "b" is only watched."""
    rewards = Rewards({"a": tensor(REWARD), "b": tensor(OTHER)}, {"b": 0.0})
    if by == "reward":
        rewards = tensor(REWARD)

    def kept(i):
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

    batch = rollout().replace(logprob=LOGPROB)
    advantage = Filtered(by=by, keep=3, prefer=prefer, outside=outside)
    same(advantage(rewards, batch), rows(expected), atol=1e-9)


def test_thresholds_and_statistics_of_all_rows():
    """GTPO's filter: a bound on the entropy. PF-PPO's: all are compared, the ends are trained."""
    batch = rollout().replace(logprob=LOGPROB)

    def low(i):
        return quantity(i, "surprisal") <= 1.1

    def expected(i):
        over = [REWARD[j] for j in members(i) if low(j)]
        return REWARD[i] - fmean(over) if low(i) else NAN

    bounded = Filtered(base=dr_grpo, by="surprisal", at_most=1.1)(tensor(REWARD), batch)
    same(bounded, rows(expected), atol=1e-9)
    apart = Filtered(base=dr_grpo, by="length", at_least=2.0, at_most=4.0)(tensor(REWARD), batch)
    assert [i for i in range(16) if apart[i].isfinite()] == [
        i for i in PRESENT if 2 <= LENGTH[i] <= 4
    ]

    def ends(i):
        order = sorted(members(i), key=lambda j: (REWARD[j], NAME[j]))
        return whitened(i, "none") if i in (order[0], order[-1]) else NAN

    policy_filtration = Filtered(base=dr_grpo, keep=2, prefer="ends", statistics="all")
    same(policy_filtration(tensor(REWARD), batch), rows(ends), atol=1e-9)


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


def test_groups_leave():
    """Flat by a threshold; of continuous rewards all right or all wrong."""
    reward = tensor([0.9, 1.0, 0.2, 0.9, 0.1, 0.3, 0.50, 0.51])
    batch = rollout([0, 0, 1, 1, 2, 2, 3, 3], [1] * 8)

    def left(**chosen):
        stays = Filtered(base=dr_grpo, **chosen)(reward, batch).isfinite()[:, 0]
        return sorted(set(batch.group[stays].tolist()))

    assert left() == [0, 1, 2, 3]
    assert left(drop_groups=["right"], right=0.8) == [1, 2, 3]
    assert left(drop_groups=["wrong"], right=0.4) == [0, 1, 3]
    assert left(drop_groups=["flat"]) == [0, 1, 2, 3]
    assert left(drop_groups=["flat"], flat_std=0.01) == [0, 1, 2]
    assert left(drop_groups=["flat", "right", "wrong"], right=0.45, flat_std=0.01) == [1]
    assert left(drop_groups=["flat"], outside="zero", flat_std=0.01) == [0, 1, 2]


def test_hard_prompts_keep_more_answers():
    """GFPO's adaptive difficulty: quartiles of the mean rewards met so far."""
    advantage = Filtered(base=dr_grpo, keep=[4, 3, 2, 1], memory=6)

    def kept(*means):
        reward = tensor([m + d for m in means for d in (-0.3, -0.1, 0.1, 0.3)])
        index = [g for g in range(len(means)) for _ in range(4)]
        stays = advantage(reward, rollout(index, [1] * len(index), list(range(len(index)))))
        return stays.isfinite().view(-1, 4).sum(1).tolist()

    assert kept(0.0, 1.0, 2.0, 3.0) == [4, 3, 2, 1]
    resumed = Filtered(base=dr_grpo, keep=[4, 3, 2, 1], memory=6)
    resumed.load_state_dict(json.loads(json.dumps(advantage.state_dict())))
    # 0 1 2 3 10 11: quartiles 1.25, 2.5, 8.25
    assert kept(11.0, 10.0) == [1, 1]
    assert advantage.means == pytest.approx([0, 1, 2, 3, 11, 10])
    assert resumed.means == pytest.approx([0, 1, 2, 3]) and resumed.iteration == 1
    assert kept(1.0) == [4]  # 1 2 3 11 10 1


def test_a_filter_of_step_rewards_and_its_mistakes():
    steps = tensor([[1.0, 3.0], [2.0, 2.0], [5.0, 0.0]])
    batch = rollout([0, 0, 0], [2, 2, 2])
    rewards = Rewards({"steps": steps})
    advantage = Filtered(base=process, by="steps", keep=2)(rewards, batch)
    whole = process(Rewards({"steps": steps[[0, 2]]}), batch[torch.tensor([0, 2])])
    assert advantage[1].isnan().all()
    torch.testing.assert_close(advantage[[0, 2]], whole)
    with pytest.raises(UserError, match="by is 'lenght'.*did you mean 'length'"):
        Filtered(by="lenght")(tensor([1.0, 2.0]), rollout([0, 0], [1, 1]))
    with pytest.raises(UserError, match="which this policy does not record"):
        Filtered(by="self_certainty")(tensor([1.0, 2.0]), rollout([0, 0], [1, 1]))
    with pytest.raises(UserError, match="empty list"):
        Filtered(keep=[])


# Baselines with a memory or a reference


def test_pvpo_keeps_the_reward_of_the_first_meeting():
    advantage = PVPO()
    same(advantage(tensor(REWARD), rollout()), rows(lambda i: whitened(i, "none")), atol=1e-12)
    later = [x + 1 for x in REWARD]
    resumed = PVPO()
    restore(resumed, json.loads(json.dumps(capture(advantage))))
    expected = rows(lambda i: later[i] - fmean(group_rewards(i)))
    same(resumed(tensor(later), rollout()), expected, atol=1e-12)


def test_pvpo_measures_again():
    advantage = PVPO(refresh=2)
    batch = rollout([0, 0], [1, 1])
    values = [advantage(tensor([0.0 + n, 2.0 + n]), batch).flatten().tolist() for n in range(4)]
    assert values == [[-1.0, 1.0], [0.0, 2.0], [-1.0, 1.0], [0.0, 2.0]]


def test_the_mean_of_a_prompt_moves():
    """AVATAR's baseline: what the policy earned on the prompt before, moved by what it samples;
    old answers are compared with it and do not move it. Any order of rows; after a resume."""
    batch = rollout([0, 0, 1, 1], [1, 1, 1, 1])
    old = torch.tensor([False, True, False, False])
    batch = batch.replace(provenance=Provenance(is_replayed=old))
    visits = [[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.5, NAN], [0.5, 0.25, 0.0, 1.0]]
    advantage = PVPO(rate=0.3)
    levels = {}
    for number, rewards in enumerate(visits):
        for g in (0, 1):
            scored = [r for r in rewards[2 * g : 2 * g + 2] if not math.isnan(r)]
            levels.setdefault(g, fmean(scored))
        expected = [r - levels[i // 2] for i, r in enumerate(rewards)]
        turned = torch.tensor([2, 0, 3, 1])
        computed = advantage(tensor(rewards)[turned], batch[turned])[turned.argsort()]
        same(computed, expected, atol=1e-12)
        for g in (0, 1):
            fresh = [
                r for i, r in enumerate(rewards) if i // 2 == g and not old[i] and not math.isnan(r)
            ]
            levels[g] += 0.3 * (fmean(fresh) - levels[g])
        if number == 0:
            state = json.loads(json.dumps(capture(advantage)))
            advantage = PVPO(rate=0.3)
            restore(advantage, state)
    with pytest.raises(UserError, match="leave out file, field and refresh, or rate"):
        PVPO(rate=0.3, refresh=2)


def test_references_from_a_file_or_a_field(tmp_path):
    path = tmp_path / "reference.jsonl"
    lines = [{"text": "prompt 0", "reward": [0.0, 1.0]}, {"text": "prompt 1", "reward": 0.25}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    batch = rollout([0, 1, 1], [1, 1, 1])
    same(PVPO(file=path)(tensor([1.0, 1.0, 0.0]), batch), [0.5, 0.75, -0.25])
    fields = [{"text": "x", "value": 0.5}, {"text": "y", "value": 0.25}]
    of_field = PVPO(field="value")(tensor([1.0, 1.0, 0.0]), batch.replace(prompts=fields))
    same(of_field, [0.5, 0.75, -0.25])
    with pytest.raises(UserError, match="has no reward for the prompt 'prompt 2'"):
        PVPO(file=path)(tensor([1.0]), rollout([2], [1]))
    with pytest.raises(UserError, match="every prompt needs a number 'value'"):
        PVPO(field="value")(tensor([1.0]), rollout([0], [1]))
    with pytest.raises(UserError, match="not both"):
        PVPO(file=path, field="value")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match=r"broken.jsonl:1: expected"):
        PVPO(file=tmp_path / "broken.jsonl")
    for content in ("\n", '{"text": "a", "reward": []}'):
        (tmp_path / "empty.jsonl").write_text(content)
        with pytest.raises(UserError, match="a reward of a reference is missing"):
            PVPO(file=tmp_path / "empty.jsonl")


def test_pvpo_over_the_spread_of_the_batch():
    value = [whitened(i, "none") for i in PRESENT]
    scale = pstdev(value) + 1e-4
    computed = PVPO(scale="batch")(tensor(REWARD), rollout())
    same(computed, rows(lambda i: whitened(i, "none") / scale), atol=1e-9)


def test_aapo_adds_a_bounded_lead_over_the_reference(tmp_path):
    path = tmp_path / "reference.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"prompt {g}", "reward": 0.4}) for g in range(6)))

    def expected(i):
        return whitened(i) + min(max(REWARD[i] - 0.4, -0.2), 0.28)

    same(AAPO(file=path)(tensor(REWARD), rollout()), rows(expected), atol=1e-9)
    with pytest.raises(UserError, match="must not be above"):
        AAPO(low=1.0, high=0.0)


@pytest.mark.parametrize("source", ["file", "field", "first sight"])
def test_aapo_pairs_every_answer_with_one_of_the_reference(source, tmp_path):
    """The n-th answer by name with the n-th of the reference, from the first again after the
    last."""
    known = {g: [0.1 * g, 0.9, 0.3] for g in range(6)}
    options = {"compare": "answers"}
    batch = rollout()
    if source == "file":
        path = tmp_path / "reference.jsonl"
        lines = [json.dumps({"text": f"prompt {g}", "reward": known[g]}) for g in known]
        path.write_text("\n".join(lines))
        options["file"] = path
    elif source == "field":
        options["field"] = "earlier"
        given = [{**prompt, "earlier": known[g]} for g, prompt in enumerate(batch.prompts)]
        batch = batch.replace(prompts=given)
    advantage = AAPO(**options)
    if source == "first sight":  # of which only the scored answers are known
        first = [0.5 * x for x in REWARD]
        advantage(tensor(first), batch)
        known = {
            g: [first[i] for i in sorted(PRESENT, key=lambda i: NAME[i]) if GROUP[i] == g]
            for g in set(GROUP)
        }
        advantage = restored(AAPO(**options), advantage)

    def expected(i):
        group = sorted((j for j in PRESENT if GROUP[j] == GROUP[i]), key=lambda j: NAME[j])
        values = known[GROUP[i]]
        reference = values[group.index(i) % len(values)]
        return whitened(i) + min(max(REWARD[i] - reference, -0.2), 0.28)

    same(advantage(tensor(REWARD), batch), rows(expected), atol=1e-9)


def restored(fresh, advantage):
    restore(fresh, json.loads(json.dumps(capture(advantage))))
    return fresh


def test_single_stream_tracks_a_value_for_each_prompt(tmp_path):
    """Two iterations, the first from rewards of a reference, with a drift of the log-probs."""
    path = tmp_path / "reference.jsonl"
    path.write_text(json.dumps({"text": "prompt 0", "reward": [1.0, 0.0, 1.0]}))
    reward = [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]
    drifts = [0.0, 0.01]  # so that rho lies inside its bounds: 2^(-1/6) = 0.89
    count = 1 / (1 - 0.875)
    tracker = {
        0: [count * 2.5 / 4, count * 1.5 / 4],
        1: [0.5, 0.5],
    }
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
    resumed = SingleStream(file=path)
    resumed.load_state_dict(json.loads(json.dumps(advantage.state_dict())))
    last = rollout(group_of, [2, 2, 2])
    assert torch.equal(resumed(tensor(reward[0]), last), advantage(tensor(reward[0]), last))


def test_single_stream_of_single_samples_and_its_mistakes():
    """One sample a prompt: groups of one teach."""
    batch = rollout([0, 1, 2], [1, 1, 1])
    computed = SingleStream(drift="none")(tensor([1.0, 0.0, 1.0]), batch)
    value = [0.5, -0.5, 0.5]
    same(computed, [(x - fmean(value)) / stdev(value) for x in value], atol=1e-7)
    with pytest.raises(UserError, match="between low = 0.0 and high = 1.0"):
        SingleStream()(tensor([1.0, 3.0, 1.0]), batch)
    with pytest.raises(UserError, match="must not be above forget_max"):
        SingleStream(forget_min=0.97)
    with pytest.raises(UserError, match="negative weight"):
        SingleStream()(Rewards({"a": tensor([1.0, 0.0, 1.0])}, {"a": -1.0}), batch)
    with pytest.raises(UserError, match="identifies prompts by 'name'"):
        SingleStream(key="name")(tensor([1.0, 0.0, 1.0]), batch)


# One of the group, and bundles


@pytest.mark.parametrize("compare", ["sign", "difference"])
def test_brpo_compares_with_a_pivot_by_lot(compare):
    advantage = BRPO(compare=compare, margin=0.15, seed=5)
    reward = [0.0, 0.1, 0.5, 1.0]
    pivots = set()
    for n in range(30):
        assert advantage.iteration == n
        computed = advantage(tensor(reward), rollout([0] * 4, [1] * 4))[:, 0].tolist()
        # the pivot is one for which all comparisons come out as they did
        fits = []
        for pivot in range(4):
            lead = [r - reward[pivot] if abs(r - reward[pivot]) > 0.15 else 0.0 for r in reward]
            signs = [math.copysign(1, x) if x else 0.0 for x in lead]
            if computed == pytest.approx(signs if compare == "sign" else lead):
                fits.append(pivot)
        assert fits
        pivots |= set(fits)
    assert pivots == {0, 1, 2, 3}
    resumed = BRPO(compare=compare, margin=0.15, seed=5)
    resumed.load_state_dict(json.loads(json.dumps(advantage.state_dict())))
    batch = rollout([0] * 4, [1] * 4)
    assert torch.equal(resumed(tensor(reward), batch), advantage(tensor(reward), batch))


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
    batch = rollout(index, [1] * 9, name)
    advantage = RiskPO(bundle=2)
    of_group = [
        [i for _, i in sorted((name[i], i) for i in range(9) if index[i] == g)] for g in range(3)
    ]
    bundles = [list(zip(of_group[0], of_group[1])), [(i,) for i in of_group[2]]]
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
        same(advantage(tensor(values), batch), expected, atol=1e-9)
        levels = (0.2, 0.8)
        if tracked is None:
            tracked = [quantile(every, level) for level in levels]
        else:
            tracked = [
                q + 0.1 * (level - fmean([float(x < q) for x in every]))
                for q, level in zip(tracked, levels)
            ]
        assert advantage.tracked == pytest.approx(tracked)
    resumed = RiskPO(bundle=2)
    resumed.load_state_dict(json.loads(json.dumps(advantage.state_dict())))
    assert torch.equal(resumed(tensor(reward), batch), advantage(tensor(reward), batch))


def test_riskpo_without_a_memory_or_a_scale():
    reward = [0.1, 0.9, 0.4, 0.7]
    batch = rollout([0] * 4, [1] * 4, [0, 1, 2, 3])
    lower, upper = quantile(reward, 0.2), quantile(reward, 0.8)

    def value(x):
        return (min(max(x, lower), upper) - upper) / 0.6

    plain = RiskPO(bundle=1, tail=0.0, quantiles="batch", std=False)
    same(plain(tensor(reward), batch), [value(x) for x in reward], atol=1e-12)
    mean = fmean([value(x) for x in reward])
    centred = RiskPO(bundle=1, tail=0.0, quantiles="batch", std=False, centred=True)
    same(centred(tensor(reward), batch), [value(x) - mean for x in reward], atol=1e-12)
    with pytest.raises(UserError, match="must be less than high"):
        RiskPO(low=0.8, high=0.2)


# Probabilities, tokens, behaviours


def test_unlikely_right_answers_are_paid_more():
    batch = rollout().replace(logprob=LOGPROB)
    both = Rewards({"right": tensor(RIGHT), "b": tensor(OTHER)}, {"right": 2.0, "b": 0.5})

    def shaped(i, strength):
        likely = sorted(members(i), key=lambda j: -quantity(j, "logprob"))
        size = len(likely)
        return RIGHT[i] * (1 - strength * (size - likely.index(i)) / size)

    def expected(i, strength=0.25):
        value = {j: 2 * shaped(j, strength) + 0.5 * OTHER[j] for j in members(i)}
        return value[i] - fmean(value.values())

    computed = unlikeliness(both, batch, base=dr_grpo, reward="right")
    same(computed, rows(expected), atol=1e-9)
    stronger = unlikeliness(both, batch, base=dr_grpo, reward="right", strength=0.5)
    same(stronger, rows(lambda i: expected(i, 0.5)), atol=1e-9)
    # answers of one probability are paid alike
    same(unlikeliness(tensor([1.0, 1.0]), rollout([0, 0], [1, 1]), base=dr_grpo), [0.0, 0.0])


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
    logprob = torch.tensor(
        [[-0.1 * (1 + i) - 0.05 * t for t in range(5)] for i in range(5)], dtype=torch.float64
    )
    batch = rollout([0] * 5, lengths, list(range(5))).replace(
        sample=torch.tensor(tokens), logprob=torch.zeros_like(logprob), entropy=-logprob
    )
    mean = fmean(reward)
    sign = [1 if r > mean else -1 for r in reward]
    whole = {"at_most": None, "penalty": 0.5, "share_conflicts": False}
    for chosen, limit, penalty in (({}, 0.7, 0.1), (whole, 9.0, 0.5)):
        computed = gtpo(tensor(reward), batch, base=dr_grpo, **chosen)
        for i in range(5):
            entropy = -fmean([float(logprob[i, t]) for t in range(lengths[i])])
            shaped = reward[i] - mean - penalty * entropy if entropy <= limit else 0.0
            weights = [conflict_weight(i, t, tokens, lengths, sign) for t in range(lengths[i])]
            conflicts = max(1, sum(weight != 1 for weight in weights))
            for t, weight in enumerate(weights):
                expected = shaped * weight / (1 if chosen else conflicts)
                assert float(computed[i, t]) == pytest.approx(expected, abs=1e-9)
    with pytest.raises(UserError, match="policies that write tokens"):
        gtpo(tensor(reward), rollout([0] * 5, lengths))


def test_gtpo_drops_answers_of_high_entropy_and_knows_groups_apart():
    tokens = torch.tensor([[1, 2], [1, 3], [1, 2], [1, 3]])
    logprob = torch.tensor([[-0.1, -0.1], [-2.0, -1.0], [-0.1, -0.1], [-0.2, -0.2]]).double()
    apart = rollout([0, 0, 1, 1], [2] * 4, [0, 1, 2, 3]).replace(sample=tokens, entropy=-logprob)
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

    chosen = {"behaviour": "tool", "outcome": outcome, "margin": 0.3}
    computed = GCPO(base=dr_grpo, **chosen)(rewards, rollout())
    same(computed, rows(expected), atol=1e-9)
    assert {sign(i) for i in PRESENT} == {-1.0, 0.0, 1.0} or outcome is None
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    moved = Rewards({name: x[order] for name, x in rewards.items()}, weights)
    again = GCPO(base=dr_grpo, **chosen)(moved, rollout()[order])
    torch.testing.assert_close(again, computed[order], equal_nan=True)


def test_gcpo_says_what_it_needs():
    batch = rollout([0, 0], [1, 1])
    with pytest.raises(UserError, match="behaviour is 'tol'.*did you mean 'tool'"):
        GCPO(behaviour="tol")(Rewards({"tool": tensor([1.0, 0.0])}), batch)
    with pytest.raises(UserError, match="gcpo.*behaviour"):
        read(ROOT / "configs" / "vlm" / "othink_mr1.yaml", ["advantage=gcpo"])
    read(ROOT / "configs" / "vlm" / "othink_mr1.yaml", ["advantage={gcpo: {behaviour: format}}"])
    with pytest.raises(UserError, match="is the only reward"):
        GCPO(behaviour="tool")(Rewards({"tool": tensor([1.0, 0.0])}), batch)


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
    advantage = Filtered(keep=2, strategies=strategies, actual="truth", statistics="all")
    points = {name: [] for name in strategies}
    choices = []
    for n in range(3):
        # the reward tells the truth at the top, or at the bottom
        truth = [
            x if (x > 0.5) == (n == 0) else OTHER[(5 * i + n) % 16] for i, x in enumerate(REWARD)
        ]
        rewards = Rewards({"a": tensor(REWARD), "truth": tensor(truth)}, {"truth": 0.0})
        kept = {name: set() for name in strategies}
        for i in PRESENT:
            order = sorted(members(i), key=lambda j: (REWARD[j], NAME[j]))
            kept["highest"] |= set(order[-2:])
            kept["lowest"] |= set(order[:2])
            kept["ends"] |= {order[0], order[-1]}
        for name in strategies:
            points[name] += [(REWARD[i], truth[i]) for i in sorted(kept[name])]
        best = max(strategies, key=lambda name: r_squared(points[name]))
        stay = [whitened(i) if i in PRESENT and i in kept[best] else NAN for i in range(16)]
        same(advantage(rewards, rollout()), stay, atol=1e-9)
        for name in strategies:
            assert advantage.r_squared(name) == pytest.approx(r_squared(points[name]), abs=1e-9)
        choices.append(best)
        fresh = Filtered(keep=2, strategies=strategies, actual="truth", statistics="all")
        advantage = restored(fresh, advantage)
    assert len(set(choices)) > 1
    with pytest.raises(UserError, match="say with keep how many"):
        Filtered(actual="truth")
    flat = Rewards({"a": tensor(REWARD), "truth": tensor([1.0] * 16)}, {"truth": 0.0})
    unknown = Filtered(keep=2, prefer="lowest", actual="truth")(flat, rollout())
    same(unknown, Filtered(keep=2, prefer="lowest")(tensor(REWARD), rollout()), atol=0)


# Tasks


TASK = {g: ("count", "read", "draw")[g % 3] for g in range(6)}


@pytest.mark.parametrize("count", ["rows", "decisions"])
@pytest.mark.parametrize("shares", [None, {"count": 3.0, "draw": 0.5}])
def test_every_task_has_its_share_of_the_gradient(count, shares):
    """CGPO: each task's own mean, times its share; one task is compared in another way."""
    batch = rollout()
    prompts = [{**prompt, "task": TASK[g]} for g, prompt in enumerate(batch.prompts)]
    batch = batch.replace(prompts=prompts)
    advantage = strata(tensor(REWARD), batch, shares=shares, count=count, tasks={"read": dr_grpo})

    def size(rows_of):
        return sum(LENGTH[i] if count == "decisions" else 1 for i in rows_of)

    def plain(i):
        mean = fmean(group_rewards(i))
        return REWARD[i] - mean if TASK[GROUP[i]] == "read" else whitened(i)

    met = sorted({TASK[GROUP[i]] for i in PRESENT})
    share = {task: (shares or {}).get(task, 1.0) for task in met}
    share = {task: x / sum(share.values()) for task, x in share.items()}

    def expected(i):
        stratum = [j for j in PRESENT if TASK[GROUP[j]] == TASK[GROUP[i]]]
        return plain(i) * share[TASK[GROUP[i]]] * size(PRESENT) / size(stratum)

    same(advantage, rows(expected), atol=1e-9)
    # so the mean of the batch is that of the means of the tasks
    weights = [LENGTH[i] if count == "decisions" else 1 for i in PRESENT]
    slopes = [math.sin(i) for i in PRESENT]
    whole = sum(
        w * s * float(advantage[i]) for w, s, i in zip(weights, slopes, PRESENT, strict=True)
    ) / sum(weights)
    parts = 0.0
    for task in met:
        inside = [n for n, i in enumerate(PRESENT) if TASK[GROUP[i]] == task]
        mean = sum(weights[n] * slopes[n] * plain(PRESENT[n]) for n in inside)
        parts += share[task] * mean / sum(weights[n] for n in inside)
    assert whole == pytest.approx(parts, abs=1e-9)


def test_a_task_that_is_missing_leaves_its_share_to_the_others():
    batch = rollout([0, 0, 1, 1], [1] * 4)
    batch = batch.replace(prompts=[{"task": "a"}, {"task": "b"}])
    rewards = tensor([0.0, 1.0, NAN, NAN])
    advantage = strata(rewards, batch, base=dr_grpo, shares={"a": 0.2, "b": 0.8})
    same(advantage, [-0.5, 0.5, NAN, NAN])
    with pytest.raises(UserError, match="share of 'a' is -1"):
        strata(rewards, batch, shares={"a": -1.0})


# Trees


def two_trees():
    """Two trees of eight leaves in one group; the second reads its leaves backwards."""
    part = tree([0, 1, 3], 2, 5)
    both = type(part).cat([part, part.replace(row_id=part.row_id + 8, edge_id=part.edge_id + 8)])
    return both, LEAVES + [x + 0.05 for x in reversed(LEAVES)]


def test_an_edge_is_compared_with_its_siblings():
    """TreeRPO: those that begin at the end of one edge. The first edges are siblings."""
    batch, leaves = two_trees()
    spans = (4, 2, 2, 1, 1)
    above = (16, 4, 4, 2, 2)  # leaves below the edge before, where another begins
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    for chosen, ddof, eps in (({}, 1, 1e-8), ({"ddof": 0, "eps": 0.5}, 0, 0.5)):
        advantage = Branch(among="siblings", **chosen)(tensor(leaves), batch)
        for k, (span, parent) in enumerate(zip(spans, above)):
            for i in range(16):
                first = i - i % parent
                edges = [fmean(leaves[j : j + span]) for j in range(first, first + parent, span)]
                own = fmean(leaves[i - i % span : i - i % span + span])
                expected = (own - fmean(edges)) / (deviation(edges, ddof) + eps)
                assert float(advantage[i, k]) == pytest.approx(expected, abs=1e-6)
        moved = Branch(among="siblings", **chosen)(tensor(leaves)[order], batch[order])
        torch.testing.assert_close(moved, advantage[order])


def test_siblings_of_token_trees_have_unequal_edges():
    """A text of three tokens for two images, and a row that shares nothing."""
    edge_id = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [2, 2, 2, 2]])
    batch = rollout([0, 0, 0], [4, 4, 4], [0, 1, 2]).replace(edge_id=edge_id)
    advantage = Branch(among="siblings", ddof=0, eps=1e-12)(tensor([1.0, 3.0, 4.0]), batch)
    expected = [[-1, -1, -1, -1], [-1, -1, 1, 1], [1, 1, 0, 0]]
    expected[2] = [1, 1, 1, 1]  # its edge goes on: still the one beside the plan
    torch.testing.assert_close(advantage, torch.tensor(expected).float(), atol=1e-6, rtol=0)


def test_tree_grpo_adds_the_comparison_within_and_between_trees():
    batch, leaves = two_trees()
    # the first edges part at once: four trees of four leaves
    roots = [i // 4 for i in range(16)]

    def z(i, over):
        return (leaves[i] - fmean(over)) / (stdev(over) + 1e-6)

    def expected(i, intra=1.0, inter=1.0):
        tree_of = [leaves[j] for j in range(16) if roots[j] == roots[i]]
        return intra * z(i, tree_of) + inter * z(i, leaves)

    same(tree_grpo(tensor(leaves), batch), [expected(i) for i in range(16)], atol=1e-9)
    weighted = tree_grpo(tensor(leaves), batch, intra=0.5, inter=2.0)
    same(weighted, [expected(i, 0.5, 2.0) for i in range(16)], atol=1e-9)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    moved = tree_grpo(tensor(leaves)[order], batch[order])
    torch.testing.assert_close(moved, tree_grpo(tensor(leaves), batch)[order])
    with pytest.raises(UserError, match="compares the samples of a tree"):
        tree_grpo(tensor([1.0, 2.0]), rollout([0, 0], [1, 1]))


def test_probabilities_on_a_tree_are_those_of_whole_paths():
    """Shared decisions are in one row's mask only, but belong to the others too."""
    edge_id = torch.tensor([[0, 0, 0], [0, 0, 1]])
    mask = torch.tensor([[True, True, True], [False, False, True]])
    logprob = torch.tensor([[-1.0, -1.0, -0.5], [-1.0, -1.0, -2.0]], dtype=torch.float64)
    batch = rollout([0, 0], [3, 3], [0, 1]).replace(mask=mask, logprob=logprob, edge_id=edge_id)
    reward = tensor([1.0, 1.0])
    computed = unlikeliness(reward, batch, base=dr_grpo)
    same(computed, [-0.0625, 0.0625])  # 1 - 1/4 for the likely, 1 - 1/8 for the other
    longest = Filtered(base=dr_grpo, by="length", at_least=3.0)(tensor([1.0, 0.0]), batch)
    same(longest, [0.5, -0.5])
