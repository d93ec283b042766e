"""Advantages against loops over rows, in plain Python, as their papers and docstrings write them.

One batch for all: groups of five, four, three, two and one, in mixed order, answers of zero to five
tokens; a group is flat, one sample is missing, one group has nothing but missing ones.
"""

import math
from statistics import fmean, pstdev, stdev

import pytest
import torch

from mmrl.advantages import dance_grpo, dr_grpo, flow_grpo, gdpo, grpo, outcomes, rloo, statistics
from mmrl.advantages.group import group
from mmrl.advantages.process import process
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards
from mmrl.zoo.advantages import (
    DDPO,
    Branch,
    MaxMin,
    Running,
    focal,
    gpg,
    ngrpo,
    opo,
    pairs,
    pass_at_k,
    reinforce_pp,
    temporal,
    tree_mean,
)
from tests.fixtures.records import make_rollout

NAN = math.nan
GROUP = [0, 1, 0, 2, 1, 0, 3, 2, 0, 1, 4, 2, 3, 0, 1, 5]
REWARD = [0.3, 1.5, -0.2, 0.7, 0.1, 0.9, 4.0, 0.7, 0.3, 0.6, 2.0, 0.7, 1.0, NAN, 0.1, NAN]
OTHER = [math.sin(3 * i) for i in range(16)]
LENGTH = [3, 1, 5, 2, 0, 4, 5, 1, 2, 3, 4, 5, 1, 2, 4, 3]
NAME = [7, 0, 12, 3, 9, 1, 15, 4, 2, 8, 11, 5, 6, 10, 14, 13]
FLAT = [2, 4]  # groups of one reward
PRESENT = [i for i in range(16) if not math.isnan(REWARD[i])]


def rollout(group=GROUP, length=LENGTH, name=None, **changes):
    mask = torch.arange(max(length)) < torch.tensor(length)[:, None]
    return make_rollout(
        group=torch.tensor(group),
        row_id=torch.tensor(name or NAME[: len(group)]),
        sample=torch.zeros(len(group), 1),
        prompts=[{"text": f"prompt {p}"} for p in range(max(group) + 1)],
        logprob=torch.zeros(mask.shape),
        mask=mask,
        **changes,
    )


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def same(computed, expected, atol=1e-12):
    expected = tensor([NAN if x is None else x for x in expected])
    assert computed.shape == (len(expected), 1)
    torch.testing.assert_close(computed[:, 0], expected, atol=atol, rtol=0, equal_nan=True)


def group_rewards(i, values=REWARD):
    """Rewards of the group of row i that are there."""
    return [values[j] for j in PRESENT if GROUP[j] == GROUP[i]]


def rows(value_of):
    """One number per row, None where the sample is missing."""
    return [value_of(i) if i in PRESENT else None for i in range(16)]


def deviation(values, ddof):
    return pstdev(values) if ddof == 0 else (stdev(values) if len(values) > 1 else 0.0)


def whitened(i, std="group", ddof=1, eps=1e-4, values=REWARD):
    if GROUP[i] in FLAT:
        return 0.0
    over = {
        "group": group_rewards(i, values),
        "global": [values[j] for j in PRESENT],
        "none": None,
    }[std]
    return (values[i] - fmean(group_rewards(i, values))) / (
        1.0 if over is None else deviation(over, ddof) + eps
    )


@pytest.mark.parametrize("std", ["group", "global", "none"])
@pytest.mark.parametrize("eps", [None, 0.5])
def test_grpo(std, eps):
    chosen = {} if eps is None else {"eps": eps}
    same(
        grpo(tensor(REWARD), rollout(), std=std, **chosen),
        rows(lambda i: whitened(i, std, eps=eps or 1e-4)),
    )


@pytest.mark.parametrize("std", ["group", "global"])
def test_options_of_the_grouped_kind_default_to_what_is_published(std):
    same(grpo(tensor(REWARD), rollout()), rows(whitened))
    same(group(tensor(REWARD), rollout()), rows(lambda i: whitened(i, ddof=0)))
    same(flow_grpo(tensor(REWARD), rollout(), std=std), rows(lambda i: whitened(i, std, ddof=0)))
    same(flow_grpo(tensor(REWARD), rollout()), rows(lambda i: whitened(i, "global", ddof=0)))
    same(dance_grpo(tensor(REWARD), rollout()), rows(lambda i: whitened(i, eps=1e-8)))
    same(dr_grpo(tensor(REWARD), rollout()), rows(lambda i: whitened(i, "none")))
    with pytest.raises(UserError, match="eps must not be negative"):
        group(tensor(REWARD), rollout(), eps=-1e-9)


OF_GROUPS = (
    "group flow_grpo dance_grpo gdpo dr_grpo rloo grpo reinforce_pp opo gpg pass_at_k".split()
)


def test_flat_groups_are_dropped_when_asked(subtests):
    for name in OF_GROUPS:
        with subtests.test(name=name):
            every = ADVANTAGES.build(name)(tensor(REWARD), rollout())[:, 0]
            some = ADVANTAGES.build(name, zero_variance_groups="drop")(tensor(REWARD), rollout())[
                :, 0
            ]
            flat = torch.isin(torch.tensor(GROUP), torch.tensor(FLAT))
            assert some[flat].isnan().all() and torch.equal(
                some[~flat].nan_to_num(9.0), every[~flat].nan_to_num(9.0)
            )
            assert torch.equal(every.isnan(), tensor(REWARD).isnan())


def test_the_best_and_the_worst_of_a_group(subtests):
    """Of the groups of more than two: the highest and the lowest; ties by the name of the row."""
    for name in ["group", "flow_grpo", "dance_grpo", "gdpo", "dr_grpo", "rloo", "grpo"]:
        with subtests.test(name=name):
            every = ADVANTAGES.build(name)(tensor(REWARD), rollout())[:, 0]
            some = ADVANTAGES.build(name, best_of=2)(tensor(REWARD), rollout())[:, 0]
            trained_rows = set()
            for g in range(6):
                order = sorted(
                    (i for i in PRESENT if GROUP[i] == g), key=lambda i: (REWARD[i], NAME[i])
                )
                trained_rows |= set(order if len(order) <= 2 else (order[0], order[-1]))
            assert set(some.isfinite().nonzero()[:, 0].tolist()) == trained_rows
            assert torch.equal(some[sorted(trained_rows)], every[sorted(trained_rows)])


def test_several_rewards_are_normalised_apart_and_again():
    """GDPO: of each reward apart, weighted, then divided by the std over the batch."""
    values = {"a": REWARD, "b": [x if i in PRESENT else 0.0 for i, x in enumerate(OTHER)]}
    rewards = Rewards({name: tensor(x) for name, x in values.items()}, {"b": 0.5})

    def apart(i, ddof, eps, floor):
        total = 0.0
        for name, weight in (("a", 1.0), ("b", 0.5)):
            values_of_group = group_rewards(i, values[name])
            std = deviation(values_of_group, ddof)
            if max(values_of_group) > min(values_of_group):
                total += (
                    weight
                    * (values[name][i] - fmean(values_of_group))
                    / (max(std, eps) if floor else std + eps)
                )
        return total

    added = [apart(i, 0, 1e-6, True) for i in PRESENT]
    scale = pstdev(added)
    same(gdpo(rewards, rollout()), rows(lambda i: apart(i, 0, 1e-6, True) / scale))
    added = [apart(i, 1, 0.5, False) for i in PRESENT]
    computed = gdpo(rewards, rollout(), eps=0.5, ddof=1, eps_mode="add")
    same(computed, rows(lambda i: apart(i, 1, 0.5, False) / (stdev(added) + 0.5)))
    same(
        dance_grpo(rewards, rollout(), combine="aggregate"),
        rows(lambda i: apart(i, 1, 1e-8, False)),
    )
    assert gdpo(torch.ones(4), rollout([0, 0, 1, 1], [1] * 4), eps=0.0).abs().max() == 0
    broad = gdpo(rewards, rollout(), eps=10.0)  # no std is as large: the least value counts, twice
    same(broad, rows(lambda i: apart(i, 0, 10.0, True) / 10.0))


def test_rloo_of_few():
    def left_out(i):
        rivals = [REWARD[j] for j in PRESENT if GROUP[j] == GROUP[i] and j != i]
        return REWARD[i] - fmean(rivals) if rivals else 0.0

    same(rloo(tensor(REWARD), rollout()), rows(left_out))


def test_two_rows_alone():
    """Small batches, where a count less one or a bound on it shows."""
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    for std in ("group", "global"):
        same(grpo(tensor([0.0, 1.0]), rollout([0, 0], [1, 1]), std=std), [-half, half])
    alone = statistics(Rewards({"a": tensor([3.0])}), rollout([0], [1]))
    assert (alone["reward/mean"], alone["reward/std"], alone["reward/a/mean"]) == (3.0, 0.0, 3.0)


def test_a_group_whose_sum_is_flat_is_dropped_unless_its_rewards_are_compared_apart():
    rewards = Rewards({"a": tensor([1.0, 0.0, 1.0, 0.0]), "b": tensor([0.0, 1.0, 0.0, 0.0])})
    batch = rollout([0, 0, 1, 1], [1, 1, 1, 1])
    for combine, dropped in (("sum", 2), ("aggregate", 0), ("gdpo", 0)):
        computed = group(rewards, batch, combine=combine, zero_variance_groups="drop")
        assert computed.isnan()[:, 0].tolist() == [True] * dropped + [False] * (4 - dropped)


def test_rewards_of_steps_are_refused_where_whole_samples_are_compared():
    steps = tensor([[1.0, 2.0], [3.0, 4.0]])
    batch = rollout([0, 0], [2, 2])
    for advantage in (DDPO(), Running(), MaxMin()):
        with pytest.raises(UserError, match="gives a number for every step"):
            advantage(Rewards({"steps": steps, "end": tensor([1.0, 2.0])}), batch)
    watched = Rewards({"steps": steps, "end": tensor([1.0, 2.0])}, {"steps": 0.0})
    assert Running(base=dr_grpo, eps=0.5)(watched, batch).flatten().tolist() == [-0.5, 0.5]


# Of answers


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_pp_by_tokens(baseline):
    value = {i: REWARD[i] - fmean(group_rewards(i)) if baseline else REWARD[i] for i in PRESENT}
    tokens = [value[i] for i in PRESENT for _ in range(LENGTH[i])]
    mean = fmean(tokens)
    scale = math.sqrt(stdev(tokens) ** 2 + 1e-8)
    expected = rows(lambda i: 0.0 if baseline and GROUP[i] in FLAT else (value[i] - mean) / scale)
    same(reinforce_pp(tensor(REWARD), rollout(), baseline=baseline), expected)


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_pp_by_rows(baseline):
    value = {i: REWARD[i] - fmean(group_rewards(i)) if baseline else REWARD[i] for i in PRESENT}
    mean = 0.0 if baseline else fmean(value.values())
    expected = rows(
        lambda i: (
            0.0
            if baseline and GROUP[i] in FLAT
            else (value[i] - mean) / (stdev(value.values()) + 1e-4)
        )
    )
    same(reinforce_pp(tensor(REWARD), rollout(), baseline=baseline, weigh="rows"), expected)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0])
def test_reinforce_pp_of_equal_or_nearly_equal_rewards(value):
    equal = [value, value, value, NAN]
    assert reinforce_pp(tensor(equal), rollout([0, 0, 1, 1], [1, 2, 3, 4]))[:3].abs().max() == 0
    near = [value, value + 1e-5, value, NAN]  # tokens 1, 2, 3: the 1e-8 under the root counts
    tokens = [near[0], near[1], near[1], near[2], near[2], near[2]]
    scale = math.sqrt(stdev(tokens) ** 2 + 1e-8)
    expected = [(x - fmean(tokens)) / scale for x in near[:3]]
    same(
        reinforce_pp(tensor(near), rollout([0, 0, 1, 1], [1, 2, 3, 4])),
        [*expected, None],
        atol=1e-9,
    )


def test_reinforce_pp_of_few_tokens():
    """The mean over tokens is that of the only one, whatever answers without tokens earned; none at
    all is harmless."""
    computed = reinforce_pp(tensor([1.0, 2.0]), rollout([0, 0], [1, 0]))
    assert computed[0] == 0 and computed.isfinite().all()
    assert reinforce_pp(tensor([1.0, 2.0]), rollout([0, 0], [0, 0])).isfinite().all()
    half = math.sqrt(0.5)
    same(reinforce_pp(tensor([1.0, 3.0]), rollout([0, 0], [1, 1])), [-half, half], atol=1e-8)


def test_opo_takes_off_the_mean_over_tokens():
    """Also in a group whose answers have no tokens: then the baseline is the mean."""

    def baseline(i):
        tokens = [REWARD[j] for j in PRESENT if GROUP[j] == GROUP[i] for _ in range(LENGTH[j])]
        return fmean(tokens)

    same(opo(tensor(REWARD), rollout()), rows(lambda i: REWARD[i] - baseline(i)))
    empty = opo(tensor([1.0, 4.0, 2.0, 5.0]), rollout([0, 0, 1, 1], [0, 0, 1, 1]))
    same(empty, [-1.5, 1.5, -1.5, 1.5])
    same(opo(tensor([1.0, 3.0]), rollout([0, 0], [1, 0])), [0.0, 2.0])


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("count", ["groups", "rewards"])
def test_gpg_scales_by_the_share_that_teaches(count, scale):
    # the flat group earns nothing
    reward = [0.0 if i in (0, 3, 7, 11) else x for i, x in enumerate(REWARD)]
    teach = [i for i in PRESENT if (GROUP[i] not in FLAT if count == "groups" else reward[i] != 0)]
    alpha = len(PRESENT) / len(teach)
    same(
        gpg(tensor(reward), rollout(), scale=scale, count=count),
        rows(lambda i: alpha * (reward[i] - fmean(group_rewards(i, reward))) / scale),
    )
    same(
        gpg(tensor(reward), rollout()),
        gpg(tensor(reward), rollout(), scale=1.0, count="groups")[:, 0].tolist(),
    )
    assert gpg(torch.zeros(3), rollout([0, 0, 1], [1, 1, 1]), count=count).abs().max() == 0
    with pytest.raises(UserError, match="scale must be greater than 0"):
        gpg(tensor(reward), rollout(), scale=0.0)
    single = gpg(tensor([0.0, 1.0]), rollout([0, 0], [1, 1]), count=count)
    same(single, [-0.5, 0.5] if count == "groups" else [-1.0, 1.0])
    for wrong in (0.0, -1.0):
        with pytest.raises(UserError, match="greater than 0"):
            gpg(tensor(reward), rollout(), scale=wrong)


@pytest.mark.parametrize("eps", [None, 0.25])
def test_only_the_best_answer_of_pass_at_k(eps):
    def lead(i):
        order = sorted(
            (j for j in PRESENT if GROUP[j] == GROUP[i]), key=lambda j: (-REWARD[j], NAME[j])
        )
        if i != order[0] or len(order) < 2:
            return 0.0
        return (REWARD[i] - REWARD[order[1]]) / (stdev(group_rewards(i)) + (eps or 1e-6))

    chosen = {} if eps is None else {"eps": eps}
    same(pass_at_k(tensor(REWARD), rollout(), **chosen), rows(lead))
    two = pass_at_k(tensor([1.0, 1.0, 0.0]), rollout([0, 0, 0], [1, 1, 1]), **chosen)
    assert two.abs().max() == 0, "two are equally good"
    pair = pass_at_k(tensor([1.0, 0.0]), rollout([0, 0], [1, 1]), **chosen)
    same(pair, [1 / (math.sqrt(0.5) + (eps or 1e-6)), 0.0])


def test_ngrpo_adds_answers_with_the_best_reward():
    for virtual, best, eps in ((1, 1.0, 1e-6), (3, 5.0, 0.5)):
        chosen = {} if virtual == 1 else {"virtual": virtual, "best": best, "eps": eps}

        def expected(i, virtual=virtual, best=best, eps=eps):
            every = group_rewards(i) + [best] * virtual
            return (REWARD[i] - fmean(every)) / (stdev(every) + eps)

        same(ngrpo(tensor(REWARD), rollout(), **chosen), rows(expected))


# On top of another


def test_temporal_is_a_parabola_over_the_places():
    base = dr_grpo(tensor(REWARD), rollout())[:, 0]
    for chosen, strength in (({}, 1.0), ({"strength": 0.5}, 0.5)):
        computed = temporal(tensor(REWARD), rollout(), base=dr_grpo, **chosen)
        for i in PRESENT:
            for t in range(LENGTH[i]):
                place = 2 * t / max(LENGTH[i] - 1, 1) - 1
                assert float(computed[i, t]) == pytest.approx(
                    float(base[i]) * (1 + strength * place**2), abs=1e-12
                )


@pytest.mark.parametrize("length", [LENGTH, [5] * 16])
def test_focused_is_the_spread_of_log_probs_at_a_place(length):
    logprob = torch.tensor(
        [[math.cos(7 * i + 3 * t) for t in range(5)] for i in range(16)], dtype=torch.float64
    )
    batch = rollout(length=length).replace(logprob=logprob)
    base = dr_grpo(tensor(REWARD), batch)[:, 0]
    for chosen, most in (({}, 1.5), ({"most": 3.0}, 3.0)):
        computed = focal(tensor(REWARD), batch, base=dr_grpo, **chosen)
        for g in range(5):
            members = [i for i in range(16) if GROUP[i] == g]
            spread = []
            for t in range(5):
                values = [float(logprob[i, t]) for i in members if t < length[i]]
                spread.append(sum((x - fmean(values)) ** 2 for x in values) / len(members))
            low = min(spread)
            high = max(spread)
            for i in members:
                for t in range(5):
                    weight = 1 + (most - 1) * (spread[t] - low) / (high - low + 1e-8)
                    expected = float(base[i]) * weight if i in PRESENT else NAN
                    assert float(computed[i, t]) == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_pairs_weigh_by_likeness_and_compare_tasks_apart():
    likeness = [0.25, 0.5, 1.0, 0.0, 0.09, 1.0]
    task = ["see", "draw", "count", "draw", "see", "draw"]
    prompts = [
        {"text": "x", "similarity": s, "alike": s * s, "task": t} for s, t in zip(likeness, task)
    ]
    batch = rollout().replace(prompts=prompts)
    everything = rows(lambda i: likeness[GROUP[i]] * whitened(i, "global"))

    def of(rewards, batch):
        return grpo(rewards, batch, std="global")

    same(pairs(tensor(REWARD), batch, base=of), everything)
    same(pairs(tensor(REWARD), batch, base=of, key="alike", power=0.5), everything)
    same(pairs(tensor(REWARD), batch, base=of, key="none"), rows(lambda i: whitened(i, "global")))

    def apart(i):
        over = [REWARD[j] for j in PRESENT if task[GROUP[j]] == task[GROUP[i]]]
        mean = fmean(group_rewards(i))
        return likeness[GROUP[i]] * (
            0.0 if GROUP[i] in FLAT else (REWARD[i] - mean) / (stdev(over) + 1e-4)
        )

    same(pairs(tensor(REWARD), batch, base=of, tasks=("draw", "see", "count")), rows(apart))
    with pytest.raises(UserError, match="of task 'see'"):
        pairs(tensor(REWARD), batch, base=of, tasks=("draw", "count"))
    negative = [{**prompt, "similarity": -0.5} for prompt in prompts]
    same(
        pairs(tensor(REWARD), batch.replace(prompts=negative), base=of),
        rows(lambda i: -0.5 * whitened(i, "global")),
    )
    named = [{**prompt, "similarity": "high"} for prompt in prompts]
    with pytest.raises(UserError, match="'similarity' of a prompt must be a number"):
        pairs(tensor(REWARD), batch.replace(prompts=named))
    with pytest.raises(UserError, match="must not be negative"):
        pairs(
            tensor(REWARD), batch.replace(prompts=[negative[0], *prompts[1:]]), base=of, power=2.0
        )


def test_running_moments_over_three_iterations():
    """Decayed mean and mean square, each divided by the decayed count, of every reward apart."""
    decay = 0.75
    mean = 0.0
    square = 0.0
    count = 0.0
    advantage = Running(base=dr_grpo, decay=decay, eps=0.125)
    cut = Running(base=dr_grpo, decay=decay, eps=0.125, limit=0.5)
    for step in range(3):
        reward = [(step + 1) * x / 4 + step for x in REWARD]
        values = [reward[i] for i in PRESENT]
        mean = decay * mean + (1 - decay) * fmean(values)
        square = decay * square + (1 - decay) * fmean([x * x for x in values])
        count = decay * count + (1 - decay)
        std = math.sqrt(square / count - (mean / count) ** 2)
        scaled = [(x - mean / count) / (std + 0.125) for x in reward]
        same(
            advantage(tensor(reward), rollout()),
            rows(lambda i, x=scaled: x[i] - fmean(group_rewards(i, x))),
            atol=1e-10,
        )
        limited = [NAN if math.isnan(x) else min(max(x, -0.5), 0.5) for x in scaled]
        same(
            cut(tensor(reward), rollout()),
            rows(lambda i, x=limited: x[i] - fmean(group_rewards(i, x))),
            atol=1e-10,
        )
    alone = Running(base=dr_grpo, decay=0.0, eps=0.5)
    for reward in ([0.0, 4.0], [1.0, 2.0]):
        same(
            alone(tensor(reward), rollout([0, 0], [1, 1])),
            [x * (reward[1] - reward[0]) / (pstdev(reward) + 0.5) for x in (-0.5, 0.5)],
        )
    fresh = Running()
    assert (fresh.decay, fresh.limit, fresh.eps) == (0.9, None, 1e-6)


def test_maxmin_takes_the_worst_reward_or_follows():
    values = {"a": REWARD, "b": [x - 0.5 for x in OTHER], "c": [x + 0.25 for x in OTHER]}
    weight = {"a": 1.0, "b": 2.0, "c": 4.0}
    rewards = Rewards({name: tensor(x) for name, x in values.items()}, weight)
    mean = {name: weight[name] * fmean([x[i] for i in PRESENT]) for name, x in values.items()}
    assert min(mean, key=mean.get) == "b"
    worst = [weight["b"] * x for x in values["b"]]
    same(
        MaxMin(base=dr_grpo)(rewards, rollout()),
        rows(lambda i: worst[i] - fmean(group_rewards(i, worst))),
    )
    advantage = MaxMin(base=dr_grpo, rate=0.5)
    for step in (1, 2):
        raw = {name: math.exp(-0.5 * step * mean[name]) for name in mean}
        share = {name: x / sum(raw.values()) for name, x in raw.items()}
        total = [
            sum(share[name] * weight[name] * values[name][i] for name in mean) for i in range(16)
        ]
        same(
            advantage(rewards, rollout()),
            rows(lambda i, x=total: x[i] - fmean(group_rewards(i, x))),
        )


def test_maxmin_bears_large_rewards():
    rewards = Rewards({"good": tensor([0.0, 1.0]), "bad": tensor([-2000.0, -2001.0])})
    same(MaxMin(base=dr_grpo, rate=1.0)(rewards, rollout([0, 0], [1, 1])), [0.5, -0.5])


def test_process_rewards_are_normalised_over_the_steps_of_a_group_and_summed_from_behind():
    """Steps without a reward teach nothing by themselves, but a step is worth what comes from it
    on."""
    steps = [
        [math.cos(5 * i + 2 * t) if t < LENGTH[i] else NAN for t in range(5)] for i in range(16)
    ]
    for chosen, eps in (({}, 1e-4), ({"eps": 0.5}, 0.5)):
        computed = process(
            Rewards({"steps": tensor(steps), "end": tensor(REWARD)}, {"steps": 2.0}),
            rollout(),
            **chosen,
        )
        for i in range(16):
            each = [
                2 * steps[j][t] for j in range(16) if GROUP[j] == GROUP[i] for t in range(LENGTH[j])
            ]
            scale = pstdev(each) + eps
            outcome = whitened(i, ddof=0, eps=eps) if i in PRESENT else NAN
            for t in range(5):
                after = sum((2 * steps[i][k] - fmean(each)) / scale for k in range(t, LENGTH[i]))
                expected = NAN if LENGTH[i] == 0 else after + outcome
                assert float(computed[i, t]) == pytest.approx(expected, abs=1e-10, nan_ok=True)
    alone = process(tensor(REWARD), rollout())
    same(alone, rows(lambda i: whitened(i, ddof=0)))


def test_process_rewards_alone_and_watched():
    """Steps without an outcome; a reward of weight 0 of either kind changes nothing; none with a
    weight is refused."""
    steps = tensor([[1.0, 3.0, NAN], [2.0, 2.0, 6.0], [5.0, NAN, NAN]])
    batch = rollout([0, 0, 1], [2, 3, 1])
    each = [1.0, 3.0, 2.0, 2.0, 6.0]
    scale = pstdev(each) + 1e-4
    expected = [
        [(4 - 5.6) / scale, 0.2 / scale, 0.0],
        [1.6 / scale, 2.4 / scale, 3.2 / scale],
        [0.0] * 3,
    ]
    alone = process(Rewards({"steps": steps}), batch)
    torch.testing.assert_close(alone, tensor(expected), atol=1e-12, rtol=0)
    watched = Rewards({"steps": steps, "end": tensor([1.0, 2.0, 3.0])}, {"end": 0.0})
    assert torch.equal(process(watched, batch), alone)
    end = process(Rewards({"steps": steps, "end": tensor([1.0, 2.0, 3.0])}, {"steps": 0.0}), batch)
    same(end, [-0.5 / 0.5001, 0.5 / 0.5001, 0.0])
    with pytest.raises(UserError, match="weight 0"):
        process(
            Rewards({"steps": steps, "end": tensor([1.0, 2.0, 3.0])}, {"steps": 0.0, "end": 0.0}),
            batch,
        )
    with pytest.raises(UserError, match="gives 3 steps for samples of 2 decisions"):
        process(Rewards({"steps": steps}), rollout([0, 0, 1], [2, 2, 1]))


def test_rewards_of_steps_are_compared_step_by_step(subtests):
    for name in OF_GROUPS:
        with subtests.test(name=name):
            steps = [[math.cos(5 * i + 2 * t) for t in range(5)] for i in range(16)]
            advantage = ADVANTAGES.build(name)
            rewards = Rewards({"steps": tensor(steps), "end": tensor(REWARD)}, {"steps": 2.0})
            computed = advantage(rewards, rollout())
            for t in range(5):
                column = Rewards(
                    {"steps": tensor(steps)[:, t], "end": tensor(REWARD)}, {"steps": 2.0}
                )
                assert torch.equal(
                    computed[:, t : t + 1].nan_to_num(9.0),
                    advantage(column, rollout()).nan_to_num(9.0),
                )
            watched = advantage(Rewards(rewards, {"steps": 0.0}), rollout())
            assert torch.equal(
                watched.nan_to_num(9.0), advantage(tensor(REWARD), rollout()).nan_to_num(9.0)
            )
            with pytest.raises(UserError, match="gives 5 steps for samples of 4 decisions"):
                advantage(rewards, rollout(length=[min(n, 4) for n in LENGTH]))


def test_ddpo_compares_with_the_buffer_or_with_everything():
    advantage = DDPO(buffer=4, min_count=4, eps=0.5)
    advantage(tensor(REWARD), rollout())

    def expected(i):
        values_of_group = group_rewards(i)[-4:]
        over = values_of_group if len(values_of_group) == 4 else [REWARD[j] for j in PRESENT]
        return (REWARD[i] - fmean(over)) / (pstdev(over) + 0.5)

    same(DDPO(buffer=4, min_count=4, eps=0.5)(tensor(REWARD), rollout()), rows(expected))
    assert (DDPO().buffer, DDPO().min_count, DDPO().eps, DDPO().key) == (16, 16, 1e-6, "text")
    for wrong in ({"min_count": 0}, {"min_count": 17}, {"eps": 0.0}, {"eps": -1.0}):
        with pytest.raises(UserError, match="ddpo"):
            DDPO(**wrong)
    assert DDPO(buffer=4, min_count=1).min_count == 1
    resumed = DDPO(buffer=4, min_count=1)
    resumed.load_state_dict({"rewards": {"prompt 0": [1.0, 2.0, 3.0]}})
    resumed(tensor([4.0, 5.0]), rollout([0, 0], [1, 1]))
    assert resumed.state_dict() == {"rewards": {"prompt 0": [2.0, 3.0, 4.0, 5.0]}}


# Trees


def tree(splits, factor, steps):
    """One tree, every step stochastic: rows are its leaves, and an edge has the name of its first
    leaf."""
    leaves = factor ** len(splits)
    spans = [leaves // factor ** sum(split <= k for split in splits) for k in range(steps)]
    row = torch.arange(leaves)
    branch = torch.stack([row - row % span for span in spans], 1)
    ones = torch.ones(leaves, steps)
    return make_rollout(
        group=row * 0,
        row_id=row,
        sample=row,
        logprob=0 * ones,
        mask=ones > 0,
        edge_id=branch,
        noise_level=ones,
        prompts=[{"text": "a tree"}],
    )


LEAVES = [0.1, 0.5, 0.9, 0.3, 0.8, 0.2, 0.6, 0.7]


def trained(advantage, rollout, reward):
    """Of every edge depth the rows that are trained on."""
    trained_edges = ~advantage(tensor(reward), rollout).isnan()
    return [column.nonzero()[:, 0].tolist() for column in trained_edges.unbind(1)]


def test_edges_are_compared_with_the_edges_of_their_depth():
    for chosen, ddof, eps in (({}, 1, 1e-8), ({"ddof": 0, "eps": 0.5}, 0, 0.5)):
        computed = Branch(**chosen)(tensor(LEAVES), tree([0, 1, 3], 2, 5))
        for k, span in enumerate((4, 2, 2, 1, 1)):
            edges = [fmean(LEAVES[i : i + span]) for i in range(0, 8, span)]
            expected = [
                (edges[i // span] - fmean(edges)) / (deviation(edges, ddof) + eps) for i in range(8)
            ]
            torch.testing.assert_close(computed[:, k].double(), tensor(expected), atol=1e-6, rtol=0)
    defaults = vars(Branch())
    assert (
        defaults["fusion"],
        defaults["alpha"],
        defaults["prune_depth"],
        defaults["prune_width"],
    ) == (
        "mean",
        1.0,
        (),
        None,
    )
    assert (
        defaults["slide_every"],
        defaults["slide_stop"],
        defaults["keep"],
        defaults["iteration"],
    ) == (
        0,
        1,
        0.5,
        0,
    )


def test_a_leaf_with_an_infinite_reward_is_missing():
    lost = [NAN, *LEAVES[1:]]
    infinite = [math.inf, *LEAVES[1:]]
    batch = tree([0, 1, 3], 2, 5)
    expected = Branch()(tensor(lost), batch)
    assert torch.equal(Branch()(tensor(infinite), batch).nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.parametrize("siblings", [None, False, True])
def test_a_shared_edge_has_the_mean_advantage_of_its_leaves(siblings):
    """Less the mean of the edge before it, where there is one and siblings are compared."""
    batch = tree([0, 1, 3], 2, 5)
    reward = [*LEAVES[:5], NAN, *LEAVES[6:]]
    present = [i for i in range(8) if i != 5]
    mean = fmean([reward[i] for i in present])
    chosen = {} if siblings is None else {"siblings": siblings}
    computed = tree_mean(tensor(reward), batch, base=dr_grpo, **chosen)
    spans = (4, 2, 2, 1, 1)
    above = (None, 4, 4, 2, 2)

    def edge(i, span):
        leaves = [reward[j] - mean for j in present if j // span == i // span]
        return fmean(leaves) if leaves else NAN

    for k in range(5):
        for i in range(8):
            before = edge(i, above[k]) if siblings and above[k] else 0.0
            assert float(computed[i, k]) == pytest.approx(
                edge(i, spans[k]) - before, abs=1e-12, nan_ok=True
            )
    plain = rollout([0, 0], [1, 1])
    assert torch.equal(
        tree_mean(tensor([1.0, 2.0]), plain, base=dr_grpo), dr_grpo(tensor([1.0, 2.0]), plain)
    )


@pytest.mark.parametrize("siblings", [False, True])
def test_shared_edges_of_an_advantage_of_every_step(siblings):
    """The same edge has another mean at each of its steps; what is taken off is the edge before at
    its last step."""
    batch = tree([0, 1, 3], 2, 5)
    each = [[math.cos(3 * i + 2 * k) for k in range(5)] for i in range(8)]
    computed = tree_mean(
        tensor(LEAVES), batch, base=lambda rewards, rollout: tensor(each), siblings=siblings
    )
    # of each step: leaves of an edge, last step of the edge before
    spans = (4, 2, 2, 1, 1)
    above = (None, 0, 0, 2, 2)

    def edge(i, k):
        return fmean([each[j][k] for j in range(8) if j // spans[k] == i // spans[k]])

    for k in range(5):
        for i in range(8):
            before = edge(i, above[k]) if siblings and above[k] is not None else 0.0
            assert float(computed[i, k]) == pytest.approx(edge(i, k) - before, abs=1e-12)


def test_pruned_depths_stay_or_slide_to_the_first_edge():
    batch = tree([0, 1, 3], 2, 5)
    every = list(range(8))

    def pruned(**chosen):
        advantage = Branch(**chosen)
        return [
            [k + 1 for k, rows in enumerate(trained(advantage, batch, LEAVES)) if not rows]
            for _ in range(5)
        ]

    assert pruned(prune_depth=[2]) == [[2]] * 5
    assert pruned(prune_depth=[1], slide_every=1) == [[1]] * 5
    assert pruned(prune_depth=[3], slide_every=1) == [[3], [2], [1], [1], [1]]
    assert pruned(prune_depth=[3, 5], slide_every=2, slide_stop=2) == [
        [3, 5],
        [3, 5],
        [2, 4],
        [2, 4],
        [2, 4],
    ]
    assert pruned(prune_depth=[5, 6]) == [[5]] * 5  # there is no sixth edge
    assert trained(Branch(), batch, LEAVES) == [every] * 5


def test_pruned_width_begins_behind_the_last_split():
    """Of the leaves 0 to 7 in pairs the better one; or of all the best and the worst, the odd one
    among the worst."""
    batch = tree([0, 1, 3], 2, 5)
    every = list(range(8))
    assert trained(Branch(prune_width="siblings"), batch, LEAVES) == [every] * 4 + [[1, 2, 4, 7]]
    ends = trained(Branch(prune_width="extremes"), batch, LEAVES)
    assert ends == [every] * 4 + [[0, 2, 4, 5]]  # 0.9 and 0.8, 0.1 and 0.2
    few = trained(Branch(prune_width="extremes", keep=0.4), batch, LEAVES)
    assert few[4] == [0, 2, 5]  # three: 0.9, and 0.2 and 0.1
    least = trained(Branch(prune_width="extremes", keep=0.1), batch, LEAVES)
    assert least[4] == [0, 2]
    lost = trained(Branch(prune_width="siblings"), batch, [NAN, *LEAVES[1:5], NAN, *LEAVES[6:]])
    assert lost[4] == [1, 2, 4, 7]  # a missing leaf is the worse one
    missing_first = trained(Branch(prune_width="siblings"), batch, [0.1, NAN, *LEAVES[2:]])
    assert missing_first[4] == [0, 2, 4, 7]


def test_pruned_width_of_wide_splits_and_of_one_split():
    wide = tree([0, 1], 4, 3)
    every = list(range(16))
    reward = LEAVES + [x + 0.05 for x in LEAVES]
    best_two = [1, 2, 4, 7, 9, 10, 12, 15]  # of each four
    assert trained(Branch(prune_width="siblings"), wide, reward) == [every, every, best_two]
    best = [2, 4, 10, 12]
    assert trained(Branch(prune_width="siblings", keep=0.2), wide, reward) == [every, every, best]
    once = tree([0], 4, 3)  # all branch at the first step: after it the better half
    assert trained(Branch(prune_width="siblings"), once, LEAVES[:4]) == [
        [0, 1, 2, 3],
        [1, 2],
        [1, 2],
    ]


# For the log


def test_statistics_of_the_batch():
    rewards = Rewards({"a": tensor(REWARD), "b": tensor(OTHER)}, {"b": 0.5})
    total = {i: REWARD[i] + 0.5 * OTHER[i] for i in PRESENT}
    computed = statistics(rewards, rollout())
    inside = [
        (total[i] - fmean([total[j] for j in PRESENT if GROUP[j] == GROUP[i]])) ** 2
        for i in PRESENT
    ]
    expected = {
        "reward/mean": fmean(total.values()),
        "reward/std": pstdev(total.values()),
        "reward/group_std": math.sqrt(fmean(inside)),
        "groups/total": 6,
        "groups/flat": 1,
        "samples/excluded": 2,
        "samples/total": 16,
        "reward/a/mean": fmean([REWARD[i] for i in PRESENT]),
        "reward/a/std": pstdev([REWARD[i] for i in PRESENT]),
        "reward/a/excluded": 2,
        "reward/b/mean": fmean(OTHER),
        "reward/b/std": pstdev(OTHER),
        "reward/b/excluded": 0,
    }
    assert computed == pytest.approx(expected, abs=1e-12)
    assert statistics(tensor(REWARD), rollout())["groups/flat"] == 2
    none = statistics(Rewards({"a": tensor([NAN, NAN])}), rollout([0, 0], [1, 1]))
    assert all(math.isnan(none[name]) for name in none if name.endswith(("mean", "std")))
    assert none["groups/flat"] == 0 and none["groups/total"] == 1 and none["reward/a/excluded"] == 2


def test_statistics_of_rewards_of_steps_are_those_of_their_means():
    steps = tensor([[1.0, 3.0, NAN], [2.0, 2.0, 6.0], [5.0, NAN, NAN]])
    batch = rollout([0, 0, 1], [2, 3, 1])
    plain = statistics({"a": tensor([2.0, 10 / 3, 5.0])}, batch)
    assert (
        statistics(Rewards({"a": steps}), batch) == pytest.approx(plain)
        and plain["reward/mean"] == 31 / 9
    )
    prompts = [{"text": "x", "entry": 3}, {"text": "y", "entry": 4}]
    computed = outcomes(Rewards({"a": steps}), batch.replace(prompts=prompts))
    assert [(outcome.entry, outcome.flat) for outcome in computed] == [(3, False), (4, True)]
    assert [outcome.mean for outcome in computed] == pytest.approx([8 / 3, 5.0])


def test_outcomes_of_prompts_with_an_entry():
    prompts = [{"text": "x", "entry": 10 * g} if g != 1 else {"text": "y"} for g in range(6)]
    computed = outcomes(Rewards({"a": tensor(REWARD)}), rollout().replace(prompts=prompts))
    assert [outcome.entry for outcome in computed] == [0, 20, 30, 40, 50]
    means = [fmean([REWARD[i] for i in PRESENT if GROUP[i] == g]) for g in (0, 2, 3, 4)]
    assert [outcome.mean for outcome in computed[:4]] == pytest.approx(
        means, abs=1e-12
    ) and math.isnan(computed[4].mean)
    assert [outcome.flat for outcome in computed[:4]] == [False, True, False, True]
