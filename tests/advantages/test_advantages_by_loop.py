"""Advantages against loops over rows, in plain Python, as their papers and docstrings write them.

One batch for all: groups of five, four, three, two and one, in mixed order, answers of zero to five
tokens; a group is flat, one sample is missing, one group has nothing but missing ones.
"""

import math
from itertools import product
from statistics import fmean, pstdev, stdev

import pytest
import torch

from mmrl.advantages import dance_grpo, dr_grpo, gdpo, grpo, outcomes, statistics
from mmrl.advantages.group import group
from mmrl.advantages.process import process
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES, load_built_in
from mmrl.core.types import Rewards, TokenOrder
from mmrl.zoo.advantages import (
    DDPO,
    Branch,
    MaxMin,
    Running,
    focal,
    gpg,
    opo,
    pairs,
    pass_at_k,
    reinforce_pp,
    soft,
    temporal,
    tree_mean,
)
from tests.fixtures.records import make_rollout

load_built_in()

NAN = math.nan
GROUP = [0, 1, 0, 2, 1, 0, 3, 2, 0, 1, 4, 2, 3, 0, 1, 5]
REWARD = [0.3, 1.5, -0.2, 0.7, 0.1, 0.9, 4.0, 0.7, 0.3, 0.6, 2.0, 0.7, 1.0, NAN, 0.1, NAN]
OTHER = [math.sin(3 * i) for i in range(16)]
LENGTH = [3, 1, 5, 2, 0, 4, 5, 1, 2, 3, 4, 5, 1, 2, 4, 3]
NAME = [7, 0, 12, 5, 9, 1, 15, 4, 2, 8, 11, 3, 6, 10, 14, 13]
FLAT = [2, 4]  # groups of one reward
PRESENT = [i for i in range(16) if not math.isnan(REWARD[i])]
ORDER = torch.randperm(16, generator=torch.Generator().manual_seed(0))


def wave(shift, size=1.0):
    places = [[shift + size * math.cos(7 * i + 3 * t) for t in range(5)] for i in range(16)]
    return torch.tensor(places, dtype=torch.float64)


LOGPROB = wave(-1, -1.0)
ENTROPY = wave(1.2)


def rollout(group=GROUP, length=LENGTH, name=None, **changes):
    mask = torch.arange(max(length)) < torch.tensor(length)[:, None]
    return make_rollout(
        group=torch.tensor(group),
        row_id=torch.tensor(name or NAME[: len(group)]),
        sample=torch.zeros(len(group), 1),
        prompts=[{"text": f"prompt {p}"} for p in range(max(group) + 1)],
        mask=mask,
        **({"logprob": torch.zeros(mask.shape)} | changes),
    )


def recorded():
    """The batch, with all that a policy can record."""
    order = TokenOrder(commit_step=torch.arange(5).expand(16, 5), self_certainty=ENTROPY.sqrt())
    return rollout(logprob=LOGPROB, entropy=ENTROPY, trajectory=order)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def same(computed, expected, atol=1e-12):
    expected = tensor([NAN if x is None else x for x in expected])
    assert computed.shape == (len(expected), 1)
    torch.testing.assert_close(computed[:, 0], expected, atol=atol, rtol=0, equal_nan=True)


def members(i):
    """Rows of the group of row i that are there."""
    return [j for j in PRESENT if GROUP[j] == GROUP[i]]


def of_group(i, values=REWARD):
    """Rewards of the group of row i that are there."""
    return [values[j] for j in members(i)]


def rows(value_of):
    """One number per row, None where the sample is missing."""
    return [value_of(i) if i in PRESENT else None for i in range(16)]


def deviation(values, ddof):
    return pstdev(values) if ddof == 0 else (stdev(values) if len(values) > 1 else 0.0)


def whitened(i, std="group", ddof=1, eps=1e-4, mode="add", values=REWARD):
    if GROUP[i] in FLAT:
        return 0.0
    lead = values[i] - fmean(of_group(i, values))
    if std == "none":
        return lead
    over = of_group(i, values) if std == "group" else [values[j] for j in PRESENT]
    spread = deviation(over, ddof)
    divisor = {"add": spread + eps, "floor": max(spread, eps), "sqrt": math.hypot(spread, eps**0.5)}
    return lead / divisor[mode]


def check(name, options, formula, rewards=None, atol=1e-9):
    """The advantage of the batch is the formula of every row; its rows may come in any order."""
    rewards = tensor(REWARD) if rewards is None else rewards
    parts = rewards if isinstance(rewards, Rewards) else Rewards({"reward": rewards})
    turned = Rewards({key: x[ORDER] for key, x in parts.items()}, parts.weights)
    same(ADVANTAGES.build(name, **options)(rewards, recorded()), rows(formula), atol)
    moved = ADVANTAGES.build(name, **options)(turned, recorded()[ORDER])[ORDER.argsort()]
    same(moved, rows(formula), atol)


# Of groups and of answers


def left_out(i):
    rivals = [REWARD[j] for j in members(i) if j != i]
    return REWARD[i] - fmean(rivals) if rivals else 0.0


def plus_plus(baseline, weigh):
    """REINFORCE++ by tokens (verl) or by rows (ms-swift)."""
    value = {i: REWARD[i] - fmean(of_group(i)) if baseline else REWARD[i] for i in PRESENT}
    tokens = [value[i] for i in PRESENT for _ in range(LENGTH[i])]
    mean, scale = fmean(tokens), math.sqrt(stdev(tokens) ** 2 + 1e-8)
    if weigh == "rows":
        mean = 0.0 if baseline else fmean(value.values())
        scale = stdev(value.values()) + 1e-4
    return lambda i: 0.0 if baseline and GROUP[i] in FLAT else (value[i] - mean) / scale


def token_baseline(i):
    return REWARD[i] - fmean([REWARD[j] for j in members(i) for _ in range(LENGTH[j])])


ZEROS = [0.0 if i in (0, 3, 7, 11) else x for i, x in enumerate(REWARD)]  # a flat group too


def informative(count, scale):
    teach = [i for i in PRESENT if (GROUP[i] not in FLAT if count == "groups" else ZEROS[i] != 0)]
    alpha = len(PRESENT) / len(teach) / scale
    return lambda i: alpha * (ZEROS[i] - fmean(of_group(i, ZEROS)))


def best_alone(eps):
    def lead(i):
        order = sorted(members(i), key=lambda j: (-REWARD[j], NAME[j]))
        if i != order[0] or len(order) < 2:
            return 0.0
        return (REWARD[i] - REWARD[order[1]]) / (stdev(of_group(i)) + eps)

    return lead


def with_virtual(virtual, best, eps):
    def lead(i):
        every = of_group(i) + [best] * virtual
        return (REWARD[i] - fmean(every)) / (stdev(every) + eps)

    return lead


FORMULAS = [
    ("group", {}, lambda i: whitened(i, ddof=0)),
    ("grpo", {}, whitened),
    ("rloo", {}, left_out),
    ("reinforce", {}, lambda i: REWARD[i]),
    ("opo", {}, token_baseline),
    ("pass_at_k", {}, best_alone(1e-6)),
    ("pass_at_k", {"eps": 0.25}, best_alone(0.25)),
    ("ngrpo", {}, with_virtual(1, 1.0, 1e-6)),
    ("ngrpo", {"virtual": 3, "best": 5.0, "eps": 0.5}, with_virtual(3, 5.0, 0.5)),
    ("asymre", {}, lambda i: whitened(i, "none") + 0.1),
    ("asymre", {"shift": 0.5}, lambda i: whitened(i, "none") - 0.5),
]
FORMULAS += [
    ("group", {"std": std, "ddof": d, "eps": 0.1, "eps_mode": m}, whitened_as)
    for std, d, m in product(["group", "global", "none"], [0, 1], ["add", "floor", "sqrt"])
    for whitened_as in [lambda i, std=std, d=d, m=m: whitened(i, std, d, 0.1, m)]
]
FORMULAS += [
    ("reinforce_pp", {"baseline": b, "weigh": w}, plus_plus(b, w))
    for b, w in product([False, True], ["tokens", "rows"])
]


def test_advantages_are_their_formulas(subtests):
    for name, options, formula in FORMULAS:
        with subtests.test(name=name, options=options):
            check(name, options, formula)
    for count, scale in product(["groups", "rewards"], [1.0, 4.0]):
        options = {"count": count, "scale": scale}
        check("gpg", options, informative(count, scale), tensor(ZEROS))
    check("gpg", {}, informative("groups", 1.0), tensor(ZEROS))


OF_GROUPS = (
    "group flow_grpo dance_grpo gdpo dr_grpo rloo grpo reinforce_pp opo gpg pass_at_k".split()
)
grouped = pytest.mark.parametrize("name", OF_GROUPS)


def equal(one, two):
    return torch.equal(one.nan_to_num(9.0), two.nan_to_num(9.0))


@grouped
def test_flat_groups_are_dropped_when_asked(name):
    every = ADVANTAGES.build(name)(tensor(REWARD), rollout())
    some = ADVANTAGES.build(name, zero_variance_groups="drop")(tensor(REWARD), rollout())
    flat = torch.isin(torch.tensor(GROUP), torch.tensor(FLAT))
    assert some[flat].isnan().all() and equal(some[~flat], every[~flat])
    assert torch.equal(every[:, 0].isnan(), tensor(REWARD).isnan())


@pytest.mark.parametrize("name", ["group", "rloo", "gdpo"])
def test_the_best_and_the_worst_of_a_group(name):
    """Ties by the name of the row; groups of two or fewer stay."""
    every = ADVANTAGES.build(name)(tensor(REWARD), rollout())[:, 0]
    some = ADVANTAGES.build(name, best_of=2)(tensor(REWARD), rollout())[:, 0]
    trained = set()
    for i in PRESENT:
        order = sorted(members(i), key=lambda j: (REWARD[j], NAME[j]))
        trained |= set(order if len(order) <= 2 else (order[0], order[-1]))
    assert set(some.isfinite().nonzero()[:, 0].tolist()) == trained
    assert torch.equal(some[sorted(trained)], every[sorted(trained)])


@grouped
def test_rewards_of_steps_are_compared_step_by_step(name):
    steps = tensor([[math.cos(5 * i + 2 * t) for t in range(5)] for i in range(16)])
    advantage = ADVANTAGES.build(name)
    rewards = Rewards({"steps": steps, "end": tensor(REWARD)}, {"steps": 2.0})
    computed = advantage(rewards, rollout())
    for t in range(5):
        column = Rewards({"steps": steps[:, t], "end": tensor(REWARD)}, {"steps": 2.0})
        assert equal(computed[:, t : t + 1], advantage(column, rollout()))
    watched = advantage(Rewards(rewards, {"steps": 0.0}), rollout())
    assert equal(watched, advantage(tensor(REWARD), rollout()))


def test_several_rewards_are_normalised_apart_and_again():
    """GDPO: of each reward apart, weighted, then divided by the std over the batch."""
    values = {"a": REWARD, "b": [x if i in PRESENT else 0.0 for i, x in enumerate(OTHER)]}
    rewards = Rewards({name: tensor(x) for name, x in values.items()}, {"b": 0.5})

    def apart(i, ddof, eps, floor):
        total = 0.0
        for name, weight in (("a", 1.0), ("b", 0.5)):
            over = of_group(i, values[name])
            std = deviation(over, ddof)
            if max(over) > min(over):
                scale = max(std, eps) if floor else std + eps
                total += weight * (values[name][i] - fmean(over)) / scale
        return total

    scale = pstdev([apart(i, 0, 1e-6, True) for i in PRESENT])
    same(gdpo(rewards, rollout()), rows(lambda i: apart(i, 0, 1e-6, True) / scale))
    spread = stdev([apart(i, 1, 0.5, False) for i in PRESENT]) + 0.5
    computed = gdpo(rewards, rollout(), eps=0.5, ddof=1, eps_mode="add")
    same(computed, rows(lambda i: apart(i, 1, 0.5, False) / spread))
    added = dance_grpo(rewards, rollout(), combine="aggregate")
    same(added, rows(lambda i: apart(i, 1, 1e-8, False)))
    assert gdpo(torch.ones(4), rollout([0, 0, 1, 1], [1] * 4), eps=0.0).abs().max() == 0
    broad = gdpo(rewards, rollout(), eps=10.0)  # no std is as large: the least value counts, twice
    same(broad, rows(lambda i: apart(i, 0, 10.0, True) / 10.0))
    sums = Rewards({"a": tensor([1.0, 0.0, 1.0, 0.0]), "b": tensor([0.0, 1.0, 0.0, 0.0])})
    for combine, dropped in (("sum", 2), ("aggregate", 0), ("gdpo", 0)):  # the first sum is flat
        chosen = {"combine": combine, "zero_variance_groups": "drop"}
        kept = group(sums, rollout([0, 0, 1, 1], [1] * 4), **chosen)
        assert kept.isnan()[:, 0].tolist() == [True] * dropped + [False] * (4 - dropped)


def two(*rewards, length=(1, 1)):
    return tensor(rewards), rollout([0] * len(rewards), list(length))


def test_small_and_equal_batches():
    """Where a count less one, a bound on it, a rounded mean or an answer without tokens shows."""
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    for std in ("group", "global"):
        same(grpo(*two(0.0, 1.0), std=std), [-half, half])
    for value in (0.0, 0.1, -3.0):
        batch = rollout([0, 0, 1, 1], [1, 2, 3, 4])
        assert reinforce_pp(tensor([value] * 3 + [NAN]), batch)[:3].abs().max() == 0
        near = [value, value + 1e-5, value]  # the 1e-8 under the root counts
        tokens = [near[0], *[near[1]] * 2, *[near[2]] * 3]
        scale = math.sqrt(stdev(tokens) ** 2 + 1e-8)
        expected = [(x - fmean(tokens)) / scale for x in near]
        same(reinforce_pp(tensor([*near, NAN]), batch), [*expected, None], atol=1e-9)
    single = reinforce_pp(*two(1.0, 2.0, length=(1, 0)))
    assert single[0] == 0 and single.isfinite().all()
    assert reinforce_pp(*two(1.0, 2.0, length=(0, 0))).isfinite().all()
    root = math.sqrt(0.5)
    same(reinforce_pp(*two(1.0, 3.0)), [-root, root], atol=1e-8)
    empty = opo(tensor([1.0, 4.0, 2.0, 5.0]), rollout([0, 0, 1, 1], [0, 0, 1, 1]))
    same(empty, [-1.5, 1.5, -1.5, 1.5])
    same(opo(*two(1.0, 3.0, length=(1, 0))), [0.0, 2.0])
    for count, expected in (("groups", [-0.5, 0.5]), ("rewards", [-1.0, 1.0])):
        assert gpg(torch.zeros(3), rollout([0, 0, 1], [1, 1, 1]), count=count).abs().max() == 0
        same(gpg(*two(0.0, 1.0), count=count), expected)
    equally_good = pass_at_k(*two(1.0, 1.0, 0.0, length=(1, 1, 1)))
    assert equally_good.abs().max() == 0
    same(pass_at_k(*two(1.0, 0.0)), [1 / (math.sqrt(0.5) + 1e-6), 0.0])


# On top of another


def softened(reward, threshold=0.8, above=0.01, below=1.0):
    if reward >= threshold:
        return threshold + above * math.log(reward - threshold + 1)
    return threshold - math.expm1(below * (threshold - reward)) / math.expm1(below)


@pytest.mark.parametrize("below", [1e-3, 0.3, 4.0, 50.0, 1e4])
def test_soft_is_the_published_transformation(below):
    """Li et al. 2025, TempSamp-R1; no reward is so far that its row is lost. The named reward is
    shaped, then weighted, then the others are added."""
    batch = rollout([0] * 7, [1] * 7)
    if below < 50:
        iou, form = [0.0, 0.1, 0.5, 0.79, 0.8, 0.9, 1.0], [1.0, 0.0] * 3 + [1.0]
        rewards = Rewards({"iou": tensor(iou), "form": tensor(form)}, {"iou": 2.0, "form": 0.5})
        total = [2 * softened(r, below=below) + 0.5 * x for r, x in zip(iou, form)]
        computed = soft(rewards, batch, base=dr_grpo, below=below, reward="iou")
        same(computed, [x - fmean(total) for x in total])
        total = [softened(r, below=below) for r in iou]
        same(soft(tensor(iou), batch, base=dr_grpo, below=below), [x - fmean(total) for x in total])
    far = tensor([-1e6, -2000.0, -800.0, -0.2, -0.19, 1.0, 1e6])
    advantage = soft(far, batch, base=dr_grpo, below=below)[:, 0]
    assert advantage.isfinite().all() and (advantage.diff() >= 0).all()
    assert (advantage[:4].diff() > 0).all()


def test_weights_of_places():
    """AVATAR's parabola; TW-GRPO's spread of the group's log-probs at a place."""
    for length in (LENGTH, [5] * 16):
        batch = rollout(length=length, logprob=LOGPROB)
        base = dr_grpo(tensor(REWARD), batch)[:, 0]
        for most, strength in ((1.5, 1.0), (3.0, 0.5)):
            focused = focal(tensor(REWARD), batch, base=dr_grpo, most=most)
            curved = temporal(tensor(REWARD), batch, base=dr_grpo, strength=strength)
            for i in range(16):
                among = [j for j in range(16) if GROUP[j] == GROUP[i]]
                spread = []
                for t in range(5):
                    values = [float(LOGPROB[j, t]) for j in among if t < length[j]]
                    apart = sum((x - fmean(values)) ** 2 for x in values)
                    spread.append(apart / len(among))
                low, high = min(spread), max(spread)
                for t in range(length[i]):
                    weight = 1 + (most - 1) * (spread[t] - low) / (high - low + 1e-8)
                    place = 1 + strength * (2 * t / max(length[i] - 1, 1) - 1) ** 2
                    lead = float(base[i])
                    near = {"abs": 1e-9, "nan_ok": True}
                    assert float(focused[i, t]) == pytest.approx(lead * weight, **near)
                    assert float(curved[i, t]) == pytest.approx(lead * place, **near)
    for weighed, defaults in ((focal, {"most": 1.5}), (temporal, {"strength": 1.0})):
        assert equal(weighed(tensor(REWARD), batch), weighed(tensor(REWARD), batch, **defaults))


def test_pairs_weigh_by_likeness_and_compare_tasks_apart():
    likeness = [0.25, 0.5, 1.0, 0.0, 0.09, 1.0]
    task = ["see", "draw", "count", "draw", "see", "draw"]
    prompts = [
        {"text": "x", "similarity": s, "alike": s * s, "task": t} for s, t in zip(likeness, task)
    ]

    def of(rewards, batch):
        return grpo(rewards, batch, std="global")

    def found(prompts=prompts, **chosen):
        return pairs(tensor(REWARD), rollout().replace(prompts=prompts), base=of, **chosen)

    def alike(i):
        return likeness[GROUP[i]] * whitened(i, "global")

    def apart(i):
        over = [REWARD[j] for j in PRESENT if task[GROUP[j]] == task[GROUP[i]]]
        lead = 0.0 if GROUP[i] in FLAT else REWARD[i] - fmean(of_group(i))
        return likeness[GROUP[i]] * lead / (stdev(over) + 1e-4)

    same(found(), rows(alike))
    same(found(key="alike", power=0.5), rows(alike))
    same(found(key="none"), rows(lambda i: whitened(i, "global")))
    same(found(tasks=("draw", "see", "count")), rows(apart))
    negative = [{**prompt, "similarity": -0.5} for prompt in prompts]
    same(found(negative), rows(lambda i: -0.5 * whitened(i, "global")))
    for wrong, chosen, says in (
        (prompts, {"tasks": ("draw", "count")}, "of task 'see'"),
        ([{**p, "similarity": "high"} for p in prompts], {}, "'similarity' of a prompt must be a"),
        ([negative[0], *prompts[1:]], {"power": 2.0}, "must not be negative"),
    ):
        with pytest.raises(UserError, match=says):
            found(wrong, **chosen)


def test_running_moments_over_three_iterations():
    """Decayed mean and mean square, each divided by the decayed count, of every reward apart."""
    decay, mean, square, count = 0.75, 0.0, 0.0, 0.0
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
        limited = [NAN if math.isnan(x) else min(max(x, -0.5), 0.5) for x in scaled]
        for running, x in ((advantage, scaled), (cut, limited)):
            found = running(tensor(reward), rollout())
            same(found, rows(lambda i, x=x: x[i] - fmean(of_group(i, x))), atol=1e-10)
    alone = Running(base=dr_grpo, decay=0.0, eps=0.5)
    for reward in ([0.0, 4.0], [1.0, 2.0]):
        step = (reward[1] - reward[0]) / (pstdev(reward) + 0.5)
        same(alone(*two(*reward)), [-step / 2, step / 2])
    watched = Rewards({"steps": torch.ones(2, 2), "end": tensor([1.0, 2.0])}, {"steps": 0.0})
    batch = rollout([0, 0], [2, 2])
    same(Running(base=dr_grpo, decay=0.0, eps=0.5)(watched, batch), [-0.5, 0.5])


def test_maxmin_takes_the_worst_reward_or_follows():
    values = {"a": REWARD, "b": [x - 0.5 for x in OTHER], "c": [x + 0.25 for x in OTHER]}
    weight = {"a": 1.0, "b": 2.0, "c": 4.0}
    rewards = Rewards({name: tensor(x) for name, x in values.items()}, weight)
    mean = {name: weight[name] * fmean([x[i] for i in PRESENT]) for name, x in values.items()}
    assert min(mean, key=mean.get) == "b"
    advantage = MaxMin(base=dr_grpo, rate=0.5)
    for step in (0, 1, 2):
        raw = {name: math.exp(-0.5 * step * mean[name]) for name in mean}
        share = {name: x / sum(raw.values()) for name, x in raw.items()} if step else {"b": 1.0}
        total = [sum(s * weight[n] * values[n][i] for n, s in share.items()) for i in range(16)]
        computed = (advantage if step else MaxMin(base=dr_grpo))(rewards, rollout())
        same(computed, rows(lambda i, x=total: x[i] - fmean(of_group(i, x))))
    large = Rewards({"good": tensor([0.0, 1.0]), "bad": tensor([-2000.0, -2001.0])})
    same(MaxMin(base=dr_grpo, rate=1.0)(large, two(0.0, 0.0)[1]), [0.5, -0.5])


def test_process_rewards_are_normalised_over_the_steps_of_a_group_and_summed_from_behind():
    """Steps without a reward teach nothing by themselves, but a step is worth what comes from it
    on. A reward of weight 0 of either kind changes nothing."""
    steps = [
        [math.cos(5 * i + 2 * t) if t < LENGTH[i] else NAN for t in range(5)] for i in range(16)
    ]

    def of(chosen, **weights):
        parts = {"steps": tensor(steps), "end": tensor(REWARD)}
        return process(Rewards(parts, {"steps": 2.0} | weights), rollout(), **chosen)

    for chosen, eps in (({}, 1e-4), ({"eps": 0.5}, 0.5)):
        computed, alone = of(chosen), of(chosen, end=0.0)
        for i in range(16):
            among = [j for j in range(16) if GROUP[j] == GROUP[i]]
            each = [2 * steps[j][t] for j in among for t in range(LENGTH[j])]
            scale = pstdev(each) + eps
            outcome = whitened(i, ddof=0, eps=eps) if i in PRESENT else NAN
            for t in range(5):
                after = sum((2 * steps[i][k] - fmean(each)) / scale for k in range(t, LENGTH[i]))
                after = NAN if LENGTH[i] == 0 else after
                near = {"abs": 1e-10, "nan_ok": True}
                assert float(computed[i, t]) == pytest.approx(after + outcome, **near)
                assert float(alone[i, t]) == pytest.approx(after, **near)
    for outcome in (process(tensor(REWARD), rollout()), of({}, steps=0.0)):
        same(outcome, rows(lambda i: whitened(i, ddof=0)))


def test_ddpo_compares_with_the_buffer_or_with_everything():
    def expected(i):
        latest = of_group(i)[-4:]
        over = latest if len(latest) == 4 else [REWARD[j] for j in PRESENT]
        return (REWARD[i] - fmean(over)) / (pstdev(over) + 0.5)

    same(DDPO(buffer=4, min_count=4, eps=0.5)(tensor(REWARD), rollout()), rows(expected))
    assert (DDPO().buffer, DDPO().min_count, DDPO().eps, DDPO().key) == (16, 16, 1e-6, "text")
    tracker = DDPO(buffer=4, min_count=1)
    tracker.load_state_dict({"rewards": {"prompt 0": [1.0, 2.0, 3.0]}})
    std = pstdev([2.0, 3.0, 4.0, 5.0])
    same(tracker(*two(4.0, 5.0)), [0.5 / std, 1.5 / std], atol=1e-5)
    tracker(*two(7.0, NAN))
    assert tracker.state_dict() == {"rewards": {"prompt 0": [3.0, 4.0, 5.0, 7.0]}}


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
TREE = tree([0, 1, 3], 2, 5)
SPANS = (4, 2, 2, 1, 1)  # leaves below an edge of each step


def trained(advantage, rollout=TREE, reward=LEAVES):
    """Of every edge depth the rows that are trained on."""
    trained_edges = ~advantage(tensor(reward), rollout).isnan()
    return [column.nonzero()[:, 0].tolist() for column in trained_edges.unbind(1)]


def test_edges_are_compared_with_the_edges_of_their_depth():
    for chosen, ddof, eps in (({}, 1, 1e-8), ({"ddof": 0, "eps": 0.5}, 0, 0.5)):
        computed = Branch(**chosen)(tensor(LEAVES), TREE)
        for k, span in enumerate(SPANS):
            edges = [fmean(LEAVES[i : i + span]) for i in range(0, 8, span)]
            scale = deviation(edges, ddof) + eps
            expected = [(edges[i // span] - fmean(edges)) / scale for i in range(8)]
            assert computed[:, k].tolist() == pytest.approx(expected, abs=1e-6)
    lost, infinite = (Branch()(tensor([x, *LEAVES[1:]]), TREE) for x in (NAN, math.inf))
    assert equal(lost, infinite)


@pytest.mark.parametrize("siblings", [None, False, True])
@pytest.mark.parametrize("by_step", [False, True])
def test_a_shared_edge_has_the_mean_advantage_of_its_leaves(siblings, by_step):
    """Less that of the edge before it at its last step, where siblings are compared. One leaf is
    missing; the advantage of leaves may differ from step to step."""
    present = [i for i in range(8) if i != 5]
    lead = [math.cos(3 * i) if i in present else NAN for i in range(8)]
    each = [[x + by_step * math.sin(i + 2 * k) for k in range(5)] for i, x in enumerate(lead)]

    def base(rewards, rollout):
        return tensor(each) if by_step else tensor(lead)[:, None]

    chosen = {} if siblings is None else {"siblings": siblings}
    computed = tree_mean(tensor(LEAVES), TREE, base=base, **chosen)

    def edge(i, k):
        leaves = [each[j][k] for j in present if j // SPANS[k] == i // SPANS[k]]
        return fmean(leaves) if leaves else NAN

    for k, above in enumerate((None, 0, 0, 2, 2)):
        for i in range(8):
            before = edge(i, above) if siblings and above is not None else 0.0
            expected = pytest.approx(edge(i, k) - before, abs=1e-12, nan_ok=True)
            assert float(computed[i, k]) == expected
    plain = two(1.0, 2.0)
    assert torch.equal(tree_mean(*plain, base=dr_grpo), dr_grpo(*plain))


PRUNED = [  # options, the depths without training in each of five iterations
    ({"prune_depth": [2]}, [[2]] * 5),
    ({"prune_depth": [1], "slide_every": 1}, [[1]] * 5),
    ({"prune_depth": [3], "slide_every": 1}, [[3], [2], [1], [1], [1]]),
    (
        {"prune_depth": [3, 5], "slide_every": 2, "slide_stop": 2},
        [[3, 5], [3, 5], [2, 4], [2, 4], [2, 4]],
    ),
    ({"prune_depth": [5, 6]}, [[5]] * 5),  # there is no sixth edge
]
EVERY = list(range(8))
ONCE = tree([0], 4, 3)  # all branch at the first step
WIDE = tree([0, 1], 4, 3)
WIDE_LEAVES = LEAVES + [x + 0.05 for x in LEAVES]
SIBLINGS = {"prune_width": "siblings"}
ENDS = {"prune_width": "extremes"}
NARROWED = [  # options, tree, rewards, the rows that are trained on at the last step
    (SIBLINGS, TREE, LEAVES, [1, 2, 4, 7]),  # of pairs the better one
    (SIBLINGS, TREE, [NAN, *LEAVES[1:5], NAN, *LEAVES[6:]], [1, 2, 4, 7]),  # missing: the worse one
    (SIBLINGS, TREE, [0.1, NAN, *LEAVES[2:]], [0, 2, 4, 7]),
    (ENDS, TREE, LEAVES, [0, 2, 4, 5]),  # 0.9 and 0.8, 0.1 and 0.2
    (ENDS | {"keep": 0.4}, TREE, LEAVES, [0, 2, 5]),  # the odd one among the worst
    (ENDS | {"keep": 0.1}, TREE, LEAVES, [0, 2]),
    (SIBLINGS, WIDE, WIDE_LEAVES, [1, 2, 4, 7, 9, 10, 12, 15]),  # two of each four
    (SIBLINGS | {"keep": 0.2}, WIDE, WIDE_LEAVES, [2, 4, 10, 12]),
]


def test_edges_that_are_pruned(subtests):
    assert trained(Branch()) == [EVERY] * 5
    for chosen, depths in PRUNED:
        with subtests.test(chosen=chosen):
            advantage = Branch(**chosen)
            for pruned in depths:
                assert [k + 1 for k, rows in enumerate(trained(advantage)) if not rows] == pruned
    for chosen, batch, reward, rows in NARROWED:
        with subtests.test(chosen=chosen, reward=reward):
            assert trained(Branch(**chosen), batch, reward)[-1] == rows
    # behind the last split
    assert trained(Branch(**SIBLINGS))[:4] == trained(Branch(**ENDS))[:4] == [EVERY] * 4
    assert trained(Branch(**SIBLINGS), ONCE, LEAVES[:4]) == [[0, 1, 2, 3], [1, 2], [1, 2]]


# For the log


def test_statistics_of_the_batch():
    rewards = Rewards({"a": tensor(REWARD), "b": tensor(OTHER)}, {"b": 0.5})
    total = {i: REWARD[i] + 0.5 * OTHER[i] for i in PRESENT}
    inside = [(total[i] - fmean([total[j] for j in members(i)])) ** 2 for i in PRESENT]
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
    assert statistics(rewards, rollout()) == pytest.approx(expected, abs=1e-12)
    assert statistics(tensor(REWARD), rollout())["groups/flat"] == 2
    none = statistics(Rewards({"a": tensor([NAN, NAN])}), rollout([0, 0], [1, 1]))
    assert all(math.isnan(none[name]) for name in none if name.endswith(("mean", "std")))
    assert none["groups/flat"] == 0 and none["groups/total"] == 1 and none["reward/a/excluded"] == 2
    alone = statistics(Rewards({"a": tensor([3.0])}), rollout([0], [1]))
    assert (alone["reward/mean"], alone["reward/std"], alone["reward/a/mean"]) == (3.0, 0.0, 3.0)


def test_outcomes_of_prompts_with_an_entry():
    """Rewards of steps count by their mean, here and in the statistics."""
    prompts = [{"text": "x", "entry": 10 * g} if g != 1 else {"text": "y"} for g in range(6)]
    computed = outcomes(Rewards({"a": tensor(REWARD)}), rollout().replace(prompts=prompts))
    assert [outcome.entry for outcome in computed] == [0, 20, 30, 40, 50]
    means = [fmean([REWARD[i] for i in PRESENT if GROUP[i] == g]) for g in (0, 2, 3, 4)]
    found = [outcome.mean for outcome in computed]
    assert found == pytest.approx([*means, NAN], abs=1e-12, nan_ok=True)
    assert [outcome.flat for outcome in computed[:4]] == [False, True, False, True]
    steps = Rewards({"a": tensor([[1.0, 3.0, NAN], [2.0, 2.0, 6.0], [5.0, NAN, NAN]])})
    batch = rollout([0, 0, 1], [2, 3, 1]).replace(prompts=[{"entry": 3}, {"entry": 4}])
    plain = statistics({"a": tensor([2.0, 10 / 3, 5.0])}, batch)
    assert statistics(steps, batch) == pytest.approx(plain) and plain["reward/mean"] == 31 / 9
    found = [(outcome.entry, outcome.flat, outcome.mean) for outcome in outcomes(steps, batch)]
    assert found == [(3, False, pytest.approx(8 / 3)), (4, True, 5.0)]
