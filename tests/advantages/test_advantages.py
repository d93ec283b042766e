"""Advantages: numbers of published code, a contract for everything registered, refusals, two
processes."""

import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mmrl.advantages import dance_grpo, flow_grpo, gdpo, statistics
from mmrl.advantages.group import group
from mmrl.advantages.presets import GROUP_PRESETS
from mmrl.core import registry
from mmrl.core.distributed import all_gather_rows, world
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


# What the published functions return

ABACBA = rollout([0, 1, 0, 2, 1, 0])
SIX = torch.arange(1.0, 7.0)
BOTH = Rewards({"a": R8, "b": R9}, {"b": 0.5})
SQRT = {"eps": 1e-8, "eps_mode": "sqrt"}
FLOOR = {"eps": 1e-6, "eps_mode": "floor"}
PUBLISHED = [  # the first numbers of the batch, from six rewards or from twelve
    # PerPromptStatTracker of Flow-GRPO (Liu et al. 2025) and of DDPO (Black et al. 2023)
    (partial(flow_grpo, std="group"), SIX, [-1.135495, -0.999933, -0.162214, 0, 0.999933]),
    (flow_grpo, SIX, [-1.36618, -0.878259, -0.195169, 0, 0.878259, 1.561349]),
    (DDPO(min_count=2), SIX, [-1.135549, -0.999999, -0.162221, 0.29277, 0.999999, 1.297771]),
    # whole rewards are not cut to whole advantages, as they are in DDPO's code
    (DDPO(min_count=2), SIX.long(), [-1.135549, -0.999999]),
    # DanceGRPO (Xue et al. 2025), GRPO with ddof 0, Flow-GRPO, UniRL (global, ddof 1)
    (dance_grpo, R8, [-1.019049, 0, 1.358732, -0.339683, 0, 0, 0, 0, -1.154878, -0.182349]),
    (partial(group, **SQRT), R8, [-1.176697, 0, 1.568929, -0.392232, 0, 0, 0, 0, -1.333539]),
    (flow_grpo, R8, [-0.708719, 0, 0.944959, -0.23624, 0, 0, 0, 0, -1.122139, -0.17718, 1.240259]),
    (partial(group, std="global", ddof=1, eps=1e-8), R8, [-0.678707, 0, 0.904943, -0.226236]),
    # Flow-Factory's AdvantageProcessor (sum, GDPO), MixGRPO's advantage_aggr (Li et al. 2025)
    (partial(group, **FLOOR), BOTH, [-0.257499, -1.287496, 0.036786, 1.508209]),
    (gdpo, BOTH, [-1.244203, -0.673955, 1.498472, 0.419686, -0.569596, 0.569596, -0.569596]),
    (partial(dance_grpo, combine="aggregate"), BOTH, [-0.945857, -0.512348, 1.139155, 0.319049]),
]


def test_numbers_of_published_code(subtests):
    for advantage, rewards, published in PUBLISHED:
        with subtests.test(advantage=str(advantage), published=published[:2]):
            rows = rollout(G8) if len(rewards) != 6 else ABACBA
            found = advantage(rewards, rows)[: len(published), 0].tolist()
            assert found == pytest.approx(published, abs=2e-6)


# Contract of everything registered

# what they compare, ordinary rows do not have: edges of trees, tokens, a behaviour, records
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
    **dict.fromkeys("group dance_grpo dr_grpo rloo grpo opo pass_at_k".split(), {}),
    "flow_grpo": {"std": "group"},
    "ddpo": {"min_count": 1},
}
RAGGED = torch.tensor([2, 0, 0, 1, 1, 1, 0, 3, 1, 1])  # sizes 3, 5, 1, 1
RAGGED_REWARD = torch.tensor([0.3, 1.5, -0.2, 0.7, 0.1, 0.2, 0.9, 4.0, 0.25, 0.6]).double()
every = pytest.mark.parametrize("name", OWN_FILES)


def call(name, rewards, rows, **chosen):
    """Built each time: an advantage with a memory starts without one."""
    rewards = rewards if isinstance(rewards, Rewards) else Rewards({"reward": rewards})
    if name in BOUNDED:
        rewards = Rewards({key: bounded(x) for key, x in rewards.items()}, rewards.weights)
    return ADVANTAGES.build(name, **chosen)(rewards, rows)


def bounded(x):
    """Between 0 and 1 in the same order; missing ones stay so."""
    return torch.where(x.isfinite(), torch.sigmoid(x.double()), torch.nan).to(x.dtype)


def assert_same(one, two, atol=1e-12):
    torch.testing.assert_close(one, two, atol=atol, rtol=0, equal_nan=True)


@every
def test_shape_precision_and_no_gradient(name):
    for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.long]:
        reward = (10 * RAGGED_REWARD).to(dtype).requires_grad_(dtype.is_floating_point)
        advantage = call(name, reward, rollout(RAGGED))
        assert advantage.shape == (10, 1) and advantage.isfinite().all()
        assert not advantage.requires_grad
        at_least = torch.float64 if dtype == torch.float64 else torch.float32
        assert advantage.dtype == at_least
        assert torch.equal(reward.detach(), (10 * RAGGED_REWARD).to(dtype)), "left as they were"
    with pytest.raises(ValueError, match="10"):
        call(name, torch.zeros(9), rollout(RAGGED))


@pytest.mark.parametrize("name", [name for name in OWN_FILES if name not in BEYOND_GROUPS])
def test_flat_groups_are_worth_nothing(name):
    for value in [0.0, 0.1, 1e6 + 0.1]:
        every = torch.full((7,), value, dtype=torch.float64)
        assert (call(name, every, rollout([0, 1, 1, 1, 2, 2, 2])) == 0).all()


@every
def test_the_order_of_rows_and_the_numbers_of_groups_do_not_matter(name):
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1))
    number = torch.tensor([3, 0, 2, 1])
    prompts = [{"text": f"prompt {p}"} for p in number.argsort().tolist()]
    moved = rollout(number[RAGGED], prompts)[order]
    for parts in ({"a": RAGGED_REWARD}, {"a": RAGGED_REWARD, "b": RAGGED_REWARD.cos()}):
        rewards = Rewards(parts, {"b": 0.3} if len(parts) > 1 else None)
        mixed = Rewards({key: x[order] for key, x in parts.items()}, rewards.weights)
        assert_same(call(name, mixed, moved), call(name, rewards, rollout(RAGGED))[order])


@pytest.mark.parametrize("name", [name for name in OWN_FILES if name not in WITH_A_LEVEL])
def test_a_constant_added_to_every_reward_changes_nothing(name):
    plain = call(name, RAGGED_REWARD, rollout(RAGGED))
    assert_same(call(name, RAGGED_REWARD + 3, rollout(RAGGED)), plain, atol=1e-7)


@every
def test_missing_samples_are_as_if_never_drawn(name):
    missing = torch.tensor([1, 5, 7])
    scored = torch.ones(10, dtype=torch.bool).index_fill(0, missing, False)
    reward = RAGGED_REWARD.index_copy(0, missing, torch.tensor([NAN, math.inf, NAN]).double())
    rows = rollout(RAGGED)
    advantage = call(name, reward, rows)
    assert advantage[missing].isnan().all()
    assert_same(advantage[scored], call(name, reward[scored], rows[scored]))
    assert call(name, torch.full((10,), NAN), rows).isnan().all()
    part = Rewards({"a": R8, "b": R9.index_fill(0, torch.tensor([2]), NAN)})
    assert call(name, part, rollout(G8)).isnan().nonzero().tolist() == [[2, 0]]
    watched = Rewards({"a": R8, "b": torch.full_like(R9, NAN)}, {"b": 0.0})
    assert torch.equal(call(name, watched, rollout(G8)), call(name, R8, rollout(G8)))


@pytest.mark.parametrize(("name", "chosen"), BY_GROUP.items())
def test_groups_are_separate_computations(name, chosen):
    rows = rollout(RAGGED)
    whole = call(name, RAGGED_REWARD, rows, **chosen)
    for g in RAGGED.unique():
        members = g == RAGGED
        assert_same(call(name, RAGGED_REWARD[members], rows[members], **chosen), whole[members])
    moved = RAGGED_REWARD + torch.tensor([0.0, 2.0, -1.0, 5.0])[RAGGED]
    assert_same(call(name, moved, rows, **chosen), whole, atol=1e-7)


@pytest.mark.parametrize("name", GROUP_PRESETS)
def test_a_preset_of_group_is_group_with_its_settings_and_says_so(name):
    """Every option of ``group`` may be changed, and the settings are the defaults."""
    preset = ADVANTAGES[name]
    chosen = GROUP_PRESETS[name].settings
    defaults = {key: option.default for key, option in options(group).items()}
    assert {key: option.default for key, option in options(preset).items()} == defaults | chosen
    assert all(f"{key}: {value}" in describe(preset) for key, value in chosen.items())
    changed = {"eps": 0.5, "zero_variance_groups": "drop"}
    for more in ({}, changed):
        assert_same(preset(R8, rollout(G8), **more), group(R8, rollout(G8), **chosen | more), 0)


STEPS = Rewards({"steps": torch.ones(12, 2), "end": R8})
HALF = Rewards({"right": (R8 > 0.5).float(), "other": R8})
REFUSED = [  # advantage, options, rewards, what is said
    ("group", {"eps": -1e-9}, R8, "eps must not be negative"),
    *[("group", {"best_of": n}, R8, "even number") for n in (0, 1, 3, -2)],
    ("group", {}, Rewards({"a": R8}, {"a": 0.0}), "weight 0"),
    *[(name, {}, STEPS, "gives a number for every step") for name in ("ddpo", "running", "maxmin")],
    *[(name, {}, STEPS, "gives 2 steps for samples of 1") for name in ("gpg", "gdpo", "process")],
    ("process", {}, Rewards({"a": R8}, {"a": 0.0}), "weight 0"),
    ("gpg", {"scale": 0.0}, R8, "scale must be greater than 0"),
    ("gpg", {"scale": -1.0}, R8, "scale must be greater than 0"),
    ("ddpo", {"min_count": 0}, R8, "ddpo: min_count must lie between 1 and buffer = 16"),
    ("ddpo", {"min_count": 17}, R8, "ddpo: min_count must lie between 1 and buffer = 16"),
    ("ddpo", {"eps": 0.0}, R8, "ddpo: eps must be greater than 0"),
    ("ddpo", {"key": "caption"}, R8, "ddpo identifies prompts by 'caption'"),
    ("soft", {"reward": "rigth"}, HALF, "reward is 'rigth'.*did you mean 'right'"),
    ("bnpo", {}, R8, "bnpo needs rewards between low = 0.0 and high = 1.0"),
    ("bnpo", {"low": 1.0}, R8, "must be less than high"),
    ("drpo", {"reward": "wright"}, HALF, "drpo: reward is 'wright'.*did you mean 'right'"),
    ("copo", {"frequency": "vote"}, R8, "neither a reward nor a quantity"),
    ("filtered", {"by": "lenght"}, R8, "by is 'lenght'.*did you mean 'length'"),
    ("filtered", {"by": "self_certainty"}, R8, "which this policy does not record"),
    ("filtered", {"keep": []}, R8, "empty list"),
    ("filtered", {"actual": "right"}, HALF, "say with keep how many"),
    ("pvpo", {"rate": 0.3, "refresh": 2}, R8, "leave out file, field and refresh, or rate"),
    ("pvpo", {"field": "value"}, R8, "every prompt needs a number 'value'"),
    ("pvpo", {"file": Path("no"), "field": "value"}, R8, "not both"),
    ("aapo", {"low": 1.0, "high": 0.0}, R8, "must not be above"),
    ("single_stream", {}, R8, "between low = 0.0 and high = 1.0"),
    ("single_stream", {"forget_min": 0.97}, R8, "must not be above forget_max"),
    ("single_stream", {"low": -9.0}, Rewards({"a": R8}, {"a": -1.0}), "negative weight"),
    ("single_stream", {"key": "name", "low": -1.0}, R8, "identifies prompts by 'name'"),
    ("riskpo", {"low": 0.8, "high": 0.2}, R8, "must be less than high"),
    ("gtpo", {}, R8, "policies that write tokens"),
    ("gcpo", {"behaviour": "rigth"}, HALF, "behaviour is 'rigth'.*did you mean 'right'"),
    ("gcpo", {"behaviour": "a"}, Rewards({"a": R8}), "is the only reward"),
    ("strata", {"shares": {"a": -1.0}}, R8, "share of 'a' is -1"),
    ("branch", {}, R8, "compares the edges of a tree"),
    ("tree_grpo", {}, R8, "compares the samples of a tree"),
    ("edge_grpo", {}, R8, "record_entropy"),
    ("recorded", {"which": "entropy"}, R8, "record_entropy"),
    ("recorded", {}, R8, "record_self_certainty"),
    ("focal", {"spread": "distributions"}, R8, "record_divergence"),
]


def test_what_means_nothing_is_refused(subtests):
    for name, chosen, rewards, says in REFUSED:
        with subtests.test(name=name, chosen=chosen), pytest.raises(UserError, match=says):
            ADVANTAGES.build(name, **chosen)(rewards, rollout(G8))


# Several processes

PLAIN = (
    "flow_grpo dance_grpo rloo dr_grpo gdpo process running opo gpg pass_at_k reinforce "
    "reinforce_pp ngrpo soft temporal focal hapo pairs tree_mean all_samples mapo "
    "noise_aware asymre unlikeliness brpo aapo"
)
SHARED = dict.fromkeys(PLAIN.split(), {}) | {
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
    """Groups of 3, 5, 1 and 1 rows in order; one sample missing; prompts 0 and 3 are the same."""
    order = torch.sort(RAGGED, stable=True)[1]
    reward = (RAGGED_REWARD + step)[order].index_fill(0, torch.tensor([4]), NAN)
    prompts = [{"text": t} for t in ["é\u2028a", "b", "c", "é\u2028a"]]
    return Rewards({"a": reward, "b": reward.sin()}, {"b": 0.5}), rollout(RAGGED[order], prompts)


def two_iterations():
    """What every advantage and the statistics are over two iterations, a part on each process."""
    rank, size = world()
    groups = torch.tensor([0, 1, 2, 3] if size == 1 else [[0], [1, 2, 3]][rank])
    found = {}
    for name, chosen in SHARED.items():
        built, parts = ADVANTAGES.build(name, **chosen), []
        for step in range(2):
            rewards, rows = iteration(step)
            own = torch.isin(rows.group, groups)
            kept = Rewards({k: x[own] for k, x in rewards.items()}, rewards.weights)
            parts.append(all_gather_rows(built(kept, rows[own])))
        found[name] = torch.cat(parts)[:, 0].tolist()
    return found, statistics(kept, rows[own])


@pytest.mark.slow
def test_two_processes_find_the_same_as_one(tmp_path):
    assert set(OWN_FILES) == set(SHARED), "every registered advantage"
    done = warm.ranks(["-m", "tests.advantages.test_advantages", tmp_path / "two.json"])
    assert done.returncode == 0, done.stderr
    found, summary = json.loads((tmp_path / "two.json").read_text())
    alone, of_one = two_iterations()
    assert summary == pytest.approx(of_one, abs=1e-10)
    for name in SHARED:
        assert found[name] == pytest.approx(alone[name], abs=1e-10, nan_ok=True), name
    assert sum(map(math.isnan, alone["group"])) == 2


if __name__ == "__main__":
    dist.init_process_group("gloo")
    outcome = json.dumps(two_iterations())
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(outcome)
    dist.barrier()
    dist.destroy_process_group()
