"""Advantages: published numbers, a contract for everything registered, oracles, two processes."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.advantages import dance_grpo, dr_grpo, flow_grpo, gdpo
from mmrl.advantages.group import group
from mmrl.advantages.presets import GROUP_PRESETS
from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES, describe, options
from mmrl.core.types import Rewards
from mmrl.zoo.advantages import DDPO
from tests.fixtures import warm
from tests.fixtures.records import make_rollout

registry.load_built_in()

NAN = math.nan
R8 = torch.tensor([0.2, 0.5, 0.9, 0.4, 1, 1, 1, 1, -0.3, 0.1, 0.7, 0.2])
R9 = torch.tensor([3.0, 1, 2, 5, 0, 1, 0, 1, 4, 4, 4, 2])
G8 = torch.arange(3).repeat_interleave(4)


def rollout(index, prompts=None):
    index = torch.as_tensor(index)
    prompts = prompts or [{"text": f"prompt {p}"} for p in range(int(index.max()) + 1)]
    zero = torch.zeros(len(index), 1)
    rows = torch.arange(len(index))
    return make_rollout(
        group=index, prompts=prompts, row_id=rows, sample=zero, logprob=zero, mask=zero == 0
    )


def near(advantage, expected, atol=2e-6):
    expected = torch.as_tensor(expected, dtype=torch.float32)
    torch.testing.assert_close(
        advantage[: len(expected), 0].float(), expected, atol=atol, rtol=0, equal_nan=True
    )


# What the published functions return

ABACBA = rollout([0, 1, 0, 2, 1, 0], [{"text": t} for t in "abc"])
ONE_TO_SIX = torch.arange(1.0, 7.0)


def test_per_prompt_statistics_of_flow_grpo_and_ddpo():
    """PerPromptStatTracker of Flow-GRPO (Liu et al. 2025) and of DDPO (Black et al. 2023): prompts
    abacba, rewards 1 to 6."""
    near(
        flow_grpo(ONE_TO_SIX, ABACBA, std="group"),
        [-1.135495, -0.999933, -0.162214, 0, 0.999933, 1.297708],
    )
    near(flow_grpo(ONE_TO_SIX, ABACBA), [-1.36618, -0.878259, -0.195169, 0, 0.878259, 1.561349])
    near(
        DDPO(min_count=2)(ONE_TO_SIX, ABACBA),
        [-1.135549, -0.999999, -0.162221, 0.29277, 0.999999, 1.297771],
    )


def test_integer_rewards_are_not_truncated():
    """As they are in DDPO's published code (Black et al. 2023), whose advantages take the type of
    the rewards."""
    near(DDPO(min_count=2)(ONE_TO_SIX.long(), ABACBA), [-1.135549, -0.999999])


def test_standard_deviations_of_dance_grpo_flow_grpo_and_unirl():
    """DanceGRPO (Xue et al. 2025; ddof 1), GRPO with ddof 0, Flow-GRPO (Liu et al. 2025; global),
    UniRL (global, ddof 1)."""
    rows = rollout(G8)
    near(
        dance_grpo(R8, rows),
        [-1.019049, 0, 1.358732, -0.339683, 0, 0, 0, 0, -1.154878, -0.182349, 1.276444, 0.060783],
    )
    ddof0 = [
        -1.176697,
        0,
        1.568929,
        -0.392232,
        0,
        0,
        0,
        0,
        -1.333539,
        -0.210559,
        1.473911,
        0.070186,
    ]
    near(group(R8, rows, eps=1e-8, eps_mode="sqrt"), ddof0)
    fg = [-0.708719, 0, 0.944959, -0.23624, 0, 0, 0, 0, -1.122139, -0.17718, 1.240259, 0.05906]
    near(flow_grpo(R8, rows), fg)
    near(group(R8, rows, std="global", ddof=1, eps=1e-8), [-0.678707, 0, 0.904943, -0.226236])


def test_several_rewards_of_gdpo_flow_factory_and_mix_grpo():
    """Flow-Factory's AdvantageProcessor (sum, GDPO) and MixGRPO's advantage_aggr (Li et al. 2025),
    weights 1 and 0.5."""
    rewards = Rewards({"a": R8, "b": R9}, {"b": 0.5})
    rows = rollout(G8)
    near(
        group(rewards, rows, eps=1e-6, eps_mode="floor"), [-0.257499, -1.287496, 0.036786, 1.508209]
    )
    first_groups = [
        -1.244203,
        -0.673955,
        1.498472,
        0.419686,
        -0.569596,
        0.569596,
        -0.569596,
        0.569596,
    ]
    near(gdpo(rewards, rows), [*first_groups, -1.190299, 0.08899, 2.007923, -0.906613])
    near(
        dance_grpo(rewards, rows, combine="aggregate"),
        [-0.945857, -0.512348, 1.139155, 0.319049, -0.433013],
    )


# Contract of everything registered

# what they compare, ordinary rows do not have: edges of trees (test_trees.py), tokens, a
# behaviour, what a policy records; they have their own tests
NEEDY = {"branch", "tree_grpo", "gtpo", "gcpo", "edge_grpo", "recorded"}
# rewards of theirs lie between two bounds, so those of the tests are brought to 0..1
BOUNDED = {"bnpo", "single_stream"}
# their own level: the best reward, a threshold, zero, bounds, a share of the mean
WITH_A_LEVEL = {"ngrpo", "soft", "reinforce", "mapo", "noise_aware", "grpo_lead", "drpo"}
WITH_A_LEVEL |= {"unlikeliness"} | BOUNDED
# a group of equal rewards is compared with other groups, or with nothing
BEYOND_GROUPS = {"ngrpo", "reinforce", "asymre"}
OWN_FILES = [
    name
    for name, entry in ADVANTAGES.items()
    if entry.__module__.startswith(("mmrl.advantages", "mmrl.zoo.advantages")) and name not in NEEDY
]
BY_GROUP = {  # options under which only the rows of a group decide its advantages
    "group": {},
    "flow_grpo": {"std": "group"},
    "dance_grpo": {},
    "dr_grpo": {},
    "rloo": {},
    "ddpo": {"min_count": 1},
    "grpo": {},
    "opo": {},
    "pass_at_k": {},
}
RAGGED = torch.tensor([2, 0, 0, 1, 1, 1, 0, 3, 1, 1])  # sizes 3, 5, 1, 1
RAGGED_REWARD = torch.tensor(
    [0.3, 1.5, -0.2, 0.7, 0.1, 0.2, 0.9, 4.0, 0.25, 0.6], dtype=torch.float64
)


def call(name, rewards, rows, **chosen):
    """Built afresh: an advantage with a memory starts without one."""
    return ADVANTAGES.build(name, **chosen)(suited(name, rewards), rows)


def suited(name, rewards):
    """Rewards of the tests within the bounds of an advantage."""
    if name not in BOUNDED:
        return rewards
    if isinstance(rewards, torch.Tensor):
        return rewards if not rewards.is_floating_point() else bounded(rewards)
    return Rewards({key: bounded(x) for key, x in rewards.items()}, rewards.weights)


def bounded(x):
    """Between 0 and 1 in the same order; missing ones stay so."""
    return torch.where(x.isfinite(), torch.sigmoid(x), torch.nan).to(x.dtype)


def test_shape_precision_and_description(subtests):
    for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.long]:
        for name in OWN_FILES:
            with subtests.test(dtype=dtype, name=name):
                scale = 0.3 if name in BOUNDED and dtype == torch.long else 10
                reward = (scale * RAGGED_REWARD).to(dtype)
                advantage = call(name, reward, rollout(RAGGED))
                assert advantage.shape == (10, 1) and advantage.isfinite().all()
                assert advantage.dtype == torch.promote_types(
                    torch.float32, dtype if dtype.is_floating_point else torch.float32
                )
                assert ADVANTAGES[name].__doc__ and isinstance(options(ADVANTAGES[name]), dict)


def test_flat_groups_are_worth_nothing(subtests):
    for value in [0.0, 0.1, 1e6 + 0.1]:
        for name in [name for name in OWN_FILES if name not in BEYOND_GROUPS]:
            with subtests.test(value=value, name=name):
                every = torch.full((7,), value, dtype=torch.float64)
                assert (call(name, every, rollout([0, 1, 1, 1, 2, 2, 2])) == 0).all()


def test_order_of_rows_does_not_matter(subtests):
    for several in [False, True]:
        for name in OWN_FILES:
            with subtests.test(several=several, name=name):
                reward = (
                    Rewards({"a": RAGGED_REWARD, "b": RAGGED_REWARD.cos()}, {"b": 0.3})
                    if several
                    else RAGGED_REWARD
                )
                order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
                moved = (
                    Rewards({k: x[order] for k, x in reward.items()}, reward.weights)
                    if several
                    else reward[order]
                )
                straight = call(name, reward, rollout(RAGGED))
                permuted = call(name, moved, rollout(RAGGED)[order])
                torch.testing.assert_close(permuted, straight[order], atol=1e-12, rtol=0)


def test_a_constant_added_to_every_reward_changes_nothing(subtests):
    for name in [name for name in OWN_FILES if name not in WITH_A_LEVEL]:
        with subtests.test(name=name):
            rows = rollout(RAGGED)
            torch.testing.assert_close(
                call(name, RAGGED_REWARD + 3, rows),
                call(name, RAGGED_REWARD, rows),
                atol=1e-7,
                rtol=0,
            )


def test_missing_samples_are_as_if_never_drawn(subtests):
    for name in OWN_FILES:
        with subtests.test(name=name):
            missing = torch.tensor([1, 5, 7])
            scored = torch.ones(10, dtype=torch.bool).index_fill(0, missing, False)
            reward = RAGGED_REWARD.index_copy(
                0, missing, torch.tensor([NAN, math.inf, NAN], dtype=torch.float64)
            )
            rows = rollout(RAGGED)
            advantage = call(name, reward, rows)
            assert advantage[missing].isnan().all()
            torch.testing.assert_close(
                advantage[scored], call(name, reward[scored], rows[scored]), atol=1e-12, rtol=0
            )


def test_nothing_but_missing_samples(subtests):
    for name in OWN_FILES:
        with subtests.test(name=name):
            assert call(name, torch.full((10,), NAN), rollout(RAGGED)).isnan().all()


def test_rewards_keep_no_gradient_and_are_not_changed(subtests):
    for name in OWN_FILES:
        with subtests.test(name=name):
            reward = RAGGED_REWARD.clone().requires_grad_()
            assert not call(name, reward, rollout(RAGGED)).requires_grad
            assert torch.equal(reward, RAGGED_REWARD)


def test_wrong_number_of_rewards(subtests):
    for name in OWN_FILES:
        with subtests.test(name=name), pytest.raises(ValueError, match="10"):
            call(name, torch.zeros(9), rollout(RAGGED))


def test_ragged_groups_are_separate_computations(subtests):
    for grouped in BY_GROUP:
        with subtests.test(grouped=grouped):
            rows = rollout(RAGGED)
            whole = call(grouped, RAGGED_REWARD, rows, **BY_GROUP[grouped])
            for g in RAGGED.unique():
                members = g == RAGGED
                alone = call(grouped, RAGGED_REWARD[members], rows[members], **BY_GROUP[grouped])
                torch.testing.assert_close(whole[members], alone, atol=1e-12, rtol=0)


def test_a_constant_added_to_one_group_changes_nothing(subtests):
    for grouped in [*BY_GROUP, "gdpo"]:
        with subtests.test(grouped=grouped):
            rows = rollout(RAGGED)
            chosen = BY_GROUP.get(grouped, {})
            moved = RAGGED_REWARD + torch.tensor([0.0, 2.0, -1.0, 5.0])[RAGGED]
            torch.testing.assert_close(
                call(grouped, moved, rows, **chosen),
                call(grouped, RAGGED_REWARD, rows, **chosen),
                atol=1e-7,
                rtol=0,
            )


# Oracles


def naive(rewards, index, std, ddof, eps, mode):
    """One number after the other, in Python."""
    advantages = []
    for reward, g in zip(rewards, index, strict=True):
        members = [r for r, h in zip(rewards, index, strict=True) if h == g]
        mean = sum(members) / len(members)
        over = members if std == "group" else rewards
        middle = sum(over) / len(over)
        variance = sum((r - middle) ** 2 for r in over) / max(len(over) - ddof, 1)
        scales = {
            "add": variance**0.5 + eps,
            "floor": max(variance**0.5, eps),
            "sqrt": (variance + eps) ** 0.5,
        }
        advantages.append(
            0.0
            if max(members) == min(members)
            else (reward - mean) / (1 if std == "none" else scales[mode])
        )
    return advantages


def test_vectorised_equals_a_loop(subtests):
    for std in ["group", "global", "none"]:
        for ddof in [0, 1]:
            for mode in ["add", "floor", "sqrt"]:
                with subtests.test(std=std, ddof=ddof, mode=mode):
                    computed = group(
                        RAGGED_REWARD, rollout(RAGGED), std=std, ddof=ddof, eps=0.01, eps_mode=mode
                    )[:, 0]
                    expected = naive(RAGGED_REWARD.tolist(), RAGGED.tolist(), std, ddof, 0.01, mode)
                    torch.testing.assert_close(
                        computed,
                        torch.tensor(expected, dtype=torch.float64),
                        atol=1e-12,
                        rtol=1e-12,
                    )


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 3)), min_size=1, max_size=12))
def test_vectorised_equals_a_loop_on_anything(pairs):
    index, reward = zip(*pairs, strict=True)
    computed = group(torch.tensor(reward, dtype=torch.float64), rollout(index), ddof=1, eps=1e-3)[
        :, 0
    ]
    expected = torch.tensor(naive(reward, index, "group", 1, 1e-3, "add"), dtype=torch.float64)
    torch.testing.assert_close(computed, expected, atol=1e-12, rtol=1e-12)


def test_rloo_is_unbiased_where_dr_grpo_is_short_by_one_over_n():
    """Exact expectation over all outcomes of groups of three from a Bernoulli policy, gradient of
    the mean reward."""
    p = 0.3
    n = 3
    expected = {"rloo": 0.0, "dr_grpo": 0.0}
    for outcome in range(2**n):
        reward = torch.tensor([float(outcome >> i & 1) for i in range(n)], dtype=torch.float64)
        chance = float(torch.where(reward == 1, p, 1 - p).prod())
        # d log prob / dp; the true gradient of E[r] = p is 1
        score = torch.where(reward == 1, 1 / p, -1 / (1 - p))
        for name in expected:
            expected[name] += chance * float(
                (call(name, reward, rollout([0] * n))[:, 0] * score).mean()
            )
    assert expected == pytest.approx({"rloo": 1.0, "dr_grpo": 1 - 1 / n})


def test_best_of_breaks_ties_by_name_not_by_position():
    rows = rollout([0] * 6)
    reward = torch.tensor([1.0, 0, 1, 0, 1, 0])
    trained = group(reward, rows, best_of=4).isfinite()[:, 0]
    assert trained.tolist() == [False, True, True, True, True, False]
    order = torch.tensor([4, 1, 5, 0, 3, 2])
    assert torch.equal(
        group(reward[order], rows[order], best_of=4).isfinite()[:, 0], trained[order]
    )


def test_best_of_must_be_even(subtests):
    for n in [0, 1, 3, -2]:
        with subtests.test(n=n), pytest.raises(UserError, match="even number"):
            group(R8, rollout(G8), best_of=n)


def test_a_missing_part_makes_the_sample_missing():
    broken = R9.clone().index_fill(0, torch.tensor([2]), NAN)
    for name in OWN_FILES:
        assert call(
            name, Rewards({"a": R8, "b": broken}), rollout(G8)
        ).isnan().nonzero().tolist() == [[2, 0]]


def test_a_reward_of_weight_zero_is_only_watched():
    watched = Rewards({"a": R8, "b": torch.full_like(R9, NAN)}, {"b": 0.0})
    for name in OWN_FILES:
        assert torch.equal(call(name, watched, rollout(G8)), call(name, R8, rollout(G8)))
    with pytest.raises(UserError, match="weight 0"):
        group(Rewards({"a": R8}, {"a": 0.0}), rollout(G8))


# DDPO's memory


def test_ddpo_remembers_and_forgets():
    tracker = DDPO(buffer=4, min_count=2)
    rows = rollout([0, 0])
    tracker(torch.tensor([1.0, 2.0]), rows)
    near(tracker(torch.tensor([3.0, 6.0]), rows), [0.0, 3 / 3.5**0.5], atol=1e-5)  # 1 2 3 6
    tracker(torch.tensor([7.0, NAN]), rows)
    assert tracker.state_dict() == {"rewards": {"prompt 0": [2.0, 3.0, 6.0, 7.0]}}


def test_ddpo_state_goes_through_json():
    first = DDPO(min_count=2)
    rows = rollout(G8)
    first(R8, rows)
    second = DDPO(min_count=2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert torch.equal(first(R9, rows), second(R9, rows))
    assert first.state_dict() == second.state_dict()


def test_ddpo_says_what_it_needs():
    with pytest.raises(UserError, match="min_count"):
        DDPO(buffer=4, min_count=5)
    with pytest.raises(UserError, match="identifies prompts by 'text'"):
        DDPO()(torch.zeros(1), rollout([0], [{"caption": "x"}]))
    assert DDPO(key="caption")(torch.zeros(1), rollout([0], [{"caption": "x"}])).item() == 0


# Logging and several processes


WORKER = """
import json, os, sys, torch, torch.distributed as dist
from mmrl.core import registry
registry.load_built_in()
from mmrl.advantages import statistics
from mmrl.core.distributed import all_gather_rows, all_max, all_sum, world
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards
from tests.advantages.test_advantages import COUNTS, iteration
torch.set_num_threads(1)
if "RANK" in os.environ:
    place = "file://" + sys.argv[1]
    dist.init_process_group("gloo", init_method=place, rank=int(os.environ["RANK"]), world_size=2)
rank, size = world()
result = {}
for name in COUNTS:
    built, parts = ADVANTAGES.build(name, **COUNTS[name]), []
    for step in range(2):
        rewards, rows = iteration(step)
        groups = [[0, 1, 2, 3]] if size == 1 else [[0], [1, 2, 3]][rank]
        own = torch.isin(rows.group, torch.tensor(groups))
        kept = Rewards({k: x[own] for k, x in rewards.items()}, rewards.weights)
        parts.append(all_gather_rows(built(kept, rows[own])))
        result["statistics"] = statistics(kept, rows[own])
    result[name] = torch.cat(parts).tolist()
x = torch.tensor([1.0, 2.0]) + rank
assert all_sum(x).tolist() == ([3.0, 5.0] if size == 2 else [1.0, 2.0])
assert x.tolist() == [1.0 + rank, 2.0 + rank]
assert all_max(x).tolist() == [float(size), size + 1.0]
assert all_gather_rows(torch.zeros(3 * rank, 2, dtype=torch.bool)).shape == (3 * (size - 1), 2)
if rank == 0:
    json.dump(result, open(sys.argv[2], "w"))
if size == 2:
    dist.barrier()
    dist.destroy_process_group()
"""
WITHOUT_OPTIONS = (
    "flow_grpo dance_grpo rloo dr_grpo gdpo process running opo gpg pass_at_k reinforce "
    "reinforce_pp ngrpo soft temporal focal hapo pairs tree_mean all_samples mapo "
    "noise_aware asymre unlikeliness brpo aapo"
).split()
COUNTS = dict.fromkeys(WITHOUT_OPTIONS, {}) | {
    "group": {"std": "global", "ddof": 1},
    "maxmin": {"rate": 0.5},
    "ddpo": {"buffer": 6, "min_count": 4},
    "grpo": {"std": "global"},
    "bnpo": {"low": -4.0, "high": 12.0},
    "grpo_lead": {"length": 0.1},
    "drpo": {"reward": "a"},
    "strata": {"shares": {"": 2.0}},
    "copo": {"width": 0.5},
    "filtered": {"keep": [3, 2], "drop_groups": ["flat"], "outside": "zero"},
    "riskpo": {"bundle": 3},
    "pvpo": {"refresh": 1, "scale": "batch"},
    "single_stream": {"low": -4.0, "high": 12.0},
}


def iteration(step):
    """Groups of 3, 5, 1 and 1 rows in order; one sample missing; prompts 0 and 3 have the same
    text."""
    order = torch.sort(RAGGED, stable=True)[1]
    reward = (RAGGED_REWARD + step)[order].index_fill(0, torch.tensor([4]), NAN)
    prompts = [{"text": t} for t in ["é\u2028a", "b", "c", "é\u2028a"]]
    return Rewards({"a": reward, "b": reward.sin()}, {"b": 0.5}), rollout(RAGGED[order], prompts)


@pytest.mark.slow
def test_two_processes_find_the_same_as_one(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    runs = []
    for number, rank in enumerate([{}, {"RANK": "0"}, {"RANK": "1"}]):
        words = ["worker.py", tmp_path / "meet", f"{min(number, 1)}.json"]
        runs.append(warm.start(words, tmp_path, **rank))
    for run in runs:
        assert run.wait() == 0, run.stderr
    one_process, two_processes = (
        json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)
    )
    assert one_process.keys() == two_processes.keys()
    for name in one_process:
        if name == "statistics":
            assert two_processes[name] == pytest.approx(one_process[name], abs=1e-10)
        else:
            shared, alone = (
                torch.tensor(x[name], dtype=torch.float64) for x in (two_processes, one_process)
            )
            torch.testing.assert_close(shared, alone, atol=1e-10, rtol=0, equal_nan=True)
    assert sum(map(math.isnan, (x for row in one_process["group"] for x in row))) == 2


def test_every_registered_advantage_is_compared_across_processes():
    assert set(OWN_FILES) == set(COUNTS)


# Transformations


# On top of another


def published_soft(reward, threshold=0.8, above=0.01, below=1.0):
    """Li et al. 2025, TempSamp-R1, one number after the other."""
    if reward >= threshold:
        return threshold + above * math.log(reward - threshold + 1)
    return threshold - (math.exp(below * (threshold - reward)) - 1) / (math.exp(below) - 1)


@pytest.mark.parametrize("below", [0.3, 1.0, 4.0])
def test_soft_is_the_published_transformation(below):
    reward = torch.tensor([0.0, 0.1, 0.5, 0.79, 0.8, 0.9, 1.0], dtype=torch.float64)
    advantage = call("soft", reward, rollout([0] * 7), base=dr_grpo, below=below)[:, 0]
    shaped = torch.tensor(
        [published_soft(r, below=below) for r in reward.tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(advantage, shaped - shaped.mean(), atol=1e-12, rtol=0)
    assert (advantage.diff() > 0).all() and advantage[1] - advantage[0] > advantage[6] - advantage[
        5
    ]


def test_soft_changes_the_named_reward_alone():
    """The IoU is shaped, then weighted, then the format is added."""
    iou = torch.tensor([0.1, 0.9, 1.0]).double()
    form = torch.tensor([1.0, 0.0, 1.0]).double()
    rewards = Rewards({"temporal": iou, "format": form}, {"temporal": 2.0, "format": 0.5})
    advantage = call("soft", rewards, rollout([0] * 3), base=dr_grpo, reward="temporal")[:, 0]
    shaped = (
        torch.tensor([2 * published_soft(r) for r in iou.tolist()], dtype=torch.float64)
        + 0.5 * form
    )
    torch.testing.assert_close(advantage, shaped - shaped.mean(), atol=1e-12, rtol=0)
    with pytest.raises(UserError, match="reward is 'temporl'.*did you mean 'temporal'"):
        call("soft", rewards, rollout([0] * 3), reward="temporl")
    broken = Rewards({"temporal": iou, "format": form.index_fill(0, torch.tensor([1]), NAN)})
    assert call("soft", broken, rollout([0] * 3), reward="temporal").isnan()[:, 0].tolist() == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("below", [1e-3, 1.0, 50.0, 1e4])
def test_soft_drops_no_row_however_far_its_reward(below):
    reward = torch.tensor(
        [-1e6, -2000.0, -800.0, -0.2, -0.19, 0.2, 0.8, 1.0, 1e6], dtype=torch.float64
    )
    advantage = call("soft", reward, rollout([0] * 9), base=dr_grpo, below=below)[:, 0]
    assert (
        advantage.isfinite().all()
        and (advantage[:4].diff() > 0).all()
        and (advantage.diff() >= 0).all()
    )


def of_tokens(mask, logprob=None, prompts=None):
    mask = torch.as_tensor(mask, dtype=torch.bool)
    rows = rollout([0] * len(mask), prompts)
    return rows.replace(
        mask=mask, logprob=torch.zeros(mask.shape) if logprob is None else torch.as_tensor(logprob)
    )


def test_a_preset_of_group_is_group_with_its_settings_and_says_so(subtests):
    """Every option of ``group`` may be changed, and the settings are the defaults."""
    for name in GROUP_PRESETS:
        with subtests.test(name=name):
            preset = ADVANTAGES[name]
            chosen = GROUP_PRESETS[name].settings
            defaults = {key: option.default for key, option in options(group).items()}
            assert {
                key: option.default for key, option in options(preset).items()
            } == defaults | chosen
            assert all(f"{key}: {value}" in describe(preset) for key, value in chosen.items())
            rows = rollout(G8)
            assert torch.equal(preset(R8, rows), group(R8, rows, **chosen))
            changed = {"eps": 0.5, "zero_variance_groups": "drop"}
            both = (preset(R8, rows, **changed), group(R8, rows, **chosen | changed))
            torch.testing.assert_close(*both, equal_nan=True, rtol=0, atol=0)
