"""Advantages of what a policy records of its distributions, against their formulas as loops."""

import math
from statistics import fmean

import pytest
import torch

from mmrl.advantages import dr_grpo, grpo
from mmrl.core.errors import UserError
from mmrl.core.types import Rewards, TokenOrder
from mmrl.zoo.advantages import edge_grpo, focal, hapo, recorded
from samplers.noise import Rng
from tests.advantages.test_advantages_by_loop import (
    GROUP,
    LENGTH,
    NAN,
    PRESENT,
    REWARD,
    rollout,
    rows,
    same,
    tensor,
)
from tests.fixtures import toys

ENTROPY = torch.tensor(
    [[1.2 + math.cos(7 * i + 3 * t) for t in range(5)] for i in range(16)], dtype=torch.float64
)
ORDER = torch.randperm(16, generator=torch.Generator().manual_seed(0))


def members(i):
    return [j for j in PRESENT if GROUP[j] == GROUP[i]]


def batch():
    order = TokenOrder(commit_step=torch.arange(5).expand(16, 5), self_certainty=ENTROPY.sqrt())
    return rollout().replace(entropy=ENTROPY, trajectory=order)


def mean_of(values, i):
    return fmean([float(values[i, t]) for t in range(LENGTH[i])] or [0.0])


def mean_entropy(i):
    return mean_of(ENTROPY, i)


def assert_rows_may_move(advantage, **chosen):
    """The same rows in another order."""
    moved = advantage(tensor(REWARD)[ORDER], batch()[ORDER], **chosen)
    wanted = advantage(tensor(REWARD), batch(), **chosen)[ORDER]
    torch.testing.assert_close(moved, wanted, equal_nan=True, atol=1e-12, rtol=0)


@pytest.mark.parametrize("over", ["batch", "group"])
@pytest.mark.parametrize("limit", [None, 1.2])
def test_sure_answers_count_more(over, limit):
    base = dr_grpo(tensor(REWARD), batch())[:, 0]

    def expected(i):
        among = members(i) if over == "group" else PRESENT
        if not LENGTH[i]:
            return float(base[i])
        share = mean_entropy(i) / (fmean([mean_entropy(j) for j in among]) + 1e-8)
        if limit is not None:
            share = min(max(share, 1 / limit), limit)
        return float(base[i]) / (share + 1e-8)

    chosen = {"base": dr_grpo, "over": over, "limit": limit}
    same(edge_grpo(tensor(REWARD), batch(), **chosen), rows(expected), atol=1e-9)
    assert_rows_may_move(edge_grpo, **chosen)
    with pytest.raises(UserError, match="record_entropy"):
        edge_grpo(tensor(REWARD), rollout(), **chosen)


@pytest.mark.parametrize("std", [True, False])
def test_long_answers_count_by_their_length_in_the_mean(std):
    def normed(i):
        tokens = [REWARD[j] for j in members(i) for _ in range(LENGTH[j])]
        mean = fmean(tokens)
        spread = math.sqrt(fmean([(x - mean) ** 2 for x in tokens]))
        if len({REWARD[j] for j in members(i)}) == 1:
            return 0.0
        return (REWARD[i] - mean) / (spread + 1e-6) if std else REWARD[i] - mean

    same(hapo(tensor(REWARD), batch(), std=std, limit=None), rows(normed), atol=1e-9)
    limit = sorted(abs(normed(i)) for i in PRESENT)[-3]  # groups with larger ones fall back
    plain = grpo(tensor(REWARD), batch())[:, 0]

    def limited(i):
        far = any(abs(normed(j)) >= limit for j in members(i))
        return float(plain[i]) if far else normed(i)

    same(hapo(tensor(REWARD), batch(), std=std, limit=limit), rows(limited), atol=1e-9)
    assert_rows_may_move(hapo, std=std, limit=limit)


@pytest.mark.parametrize("which", ["self_certainty", "entropy"])
def test_what_was_recorded_is_a_reward(which):
    values = ENTROPY.sqrt() if which == "self_certainty" else ENTROPY

    def total(i):
        return REWARD[i] + 0.5 * mean_of(values, i)

    def expected(i):
        return total(i) - fmean([total(j) for j in members(i)])

    chosen = {"which": which, "weight": 0.5, "base": dr_grpo}
    same(recorded(tensor(REWARD), batch(), **chosen), rows(expected), atol=1e-9)
    assert_rows_may_move(recorded, **chosen)
    with pytest.raises(UserError, match=f"record_{which}"):
        recorded(tensor(REWARD), rollout(), **chosen)


def test_what_was_recorded_may_be_the_only_reward():
    """Intuitor: rewards of weight 0 are watched."""
    watched = Rewards({"watched": tensor([0.0, 1.0, NAN] + [0.5] * 13)}, {"watched": 0.0})
    values = recorded(watched, batch(), base=dr_grpo)[:, 0]

    def certain(i):
        return mean_of(ENTROPY.sqrt(), i)

    for i in range(16):
        among = [j for j in range(16) if GROUP[j] == GROUP[i] and j != 2]
        wanted = NAN if i == 2 else certain(i) - fmean([certain(j) for j in among])
        assert float(values[i]) == pytest.approx(wanted, abs=1e-9, nan_ok=True)


def divergence(rows_of_group, where):
    """The mean of KL(p_i || mean of the p_j) at each place, of lists of probabilities."""
    spreads = []
    for t in range(len(where[0])):
        at = []
        for distribution, there in zip(rows_of_group, where, strict=True):
            p = distribution[t]
            at.append(p if there[t] else [1 / len(p)] * len(p))
        mean = [fmean(column) for column in zip(*at, strict=True)]
        kls = [sum(x * math.log(x / m) for x, m in zip(p, mean, strict=True) if x) for p in at]
        spreads.append(fmean(kls))
    return spreads


def test_the_divergence_of_a_group_is_that_of_whole_distributions():
    policy = toys.make("causal", double=True, record_divergence=True)
    with torch.no_grad():
        sampled = policy.rollout(toys.prompts(3), 4, Rng.of("divergence"))
        (point,) = policy.path(sampled)
        p = policy.dist(point).logits.softmax(-1)
        ended = sampled.mask & (torch.arange(6) < 2 + sampled.row_id[:, None] % 5)
        cut = policy.with_divergence(sampled.replace(mask=ended), 3)
    for found in (sampled, cut):
        for g in range(3):
            among = (found.group == g).nonzero()[:, 0]
            wanted = divergence(p[among].tolist(), found.mask[among].tolist())
            for row in among.tolist():
                assert found.divergence[row].tolist() == pytest.approx(wanted, abs=1e-9)


def test_places_at_which_whole_distributions_differ_count_more():
    """Scaled over the places that the group's longest answer reaches."""
    spread = torch.rand(6, 5, generator=torch.Generator().manual_seed(2)).double()
    given = batch().replace(divergence=spread[torch.tensor(GROUP)])
    base = dr_grpo(tensor(REWARD), given)[:, 0]
    computed = focal(tensor(REWARD), given, base=dr_grpo, spread="distributions", most=2.0)
    for i in range(16):
        longest = max(LENGTH[j] for j in range(16) if GROUP[j] == GROUP[i])
        among = spread[GROUP[i], :longest].tolist()
        for t in range(LENGTH[i]):
            scaled = (among[t] - min(among)) / (max(among) - min(among) + 1e-8)
            expected = float(base[i]) * (1 + scaled) if i in PRESENT else NAN
            assert float(computed[i, t]) == pytest.approx(expected, abs=1e-9, nan_ok=True)
    with pytest.raises(UserError, match="record_divergence"):
        focal(tensor(REWARD), batch(), spread="distributions")
