"""Different numbers of samples for prompts: how they are shared out, what must not change."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from mmrl.core.registry import DATA
from mmrl.data.base import Outcome
from mmrl.zoo.curricula.budget import AdaptiveGroupSize, Knapsack, allotted
from samplers.noise import Rng
from tests.fixtures import toys
from tests.train.test_trainer import make_trainer


def plain(count=4):
    return SimpleNamespace(train=toys.prompts(count), held_out=[])


def worth(p, n):
    return (1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2


def test_shares_are_the_best_of_all_allotments():
    """By trying every way to share 16 samples among 4 prompts."""
    rates = [0.05, 0.3, 0.5, 0.9]
    chosen = allotted([lambda n, p=p: worth(p, n) for p in rates], 16, 2, 10)
    ways = [w for w in itertools.product(range(2, 11), repeat=4) if sum(w) == 16]
    best = max(ways, key=lambda way: sum(worth(p, n) for p, n in zip(rates, way, strict=True)))
    assert tuple(chosen) == best and sum(chosen) == 16


def test_rates_come_from_the_prompts_own_answers():
    """(successes + 1/2) / (answers + 1), decayed at every visit; the budget is kept."""
    data = Knapsack(plain(), least=2, most=16, decay=0.5).train
    assert data.copies(data[:], 8, 0) == [8, 8, 8, 8], "nothing is known"
    data.learn([Outcome(0, 1.0, True, (1.0,) * 8), Outcome(1, 0.1, False, (0.0,) * 7 + (0.9,))])
    data.learn([Outcome(0, 1.0, True, (1.0,) * 4)])
    assert data.statistics[0].samples == 8.0 and data.statistics[0].mean == 1.0
    rates = [8.5 / 9, 1.5 / 9, 0.5, 0.5]
    expected = allotted([lambda n, p=p: worth(p, n) for p in rates], 32, 2, 16)
    assert data.copies(data[:], 8, 2) == expected and sum(expected) == 32
    assert expected[0] == 2 < expected[2] < expected[1]
    again = Knapsack(plain(), least=2, most=16, decay=0.5).train
    again.load_state_dict(data.state_dict())
    assert again.copies(again[:], 8, 2) == expected and again.statistics == data.statistics


def test_groups_grow_where_they_were_flat_and_shrink_where_they_were_not():
    """In the ratio 2.5^k, by a plain loop that gives each sample to the prompt furthest behind."""
    data = AdaptiveGroupSize(plain(), growth=2.5, least=2, most=32).train
    assert data.copies(data[:], 8, 0) == [8] * 4
    flat = Outcome(0, 1.0, True, (1.0,) * 8)
    mixed = Outcome(1, 0.5, False, (1.0, 0.0) * 4)
    for _ in range(2):
        data.learn([flat, mixed, flat._replace(entry=2), mixed._replace(entry=3)])
    data.learn([mixed._replace(entry=2)])
    again = AdaptiveGroupSize(plain(), growth=2.5, least=2, most=32).train
    again.load_state_dict(data.state_dict())
    expected = [2] * 4
    for _ in range(24):
        weights = [6.25, 1, 1, 1]
        behind = [w / (size + 1) for w, size in zip(weights, expected, strict=True)]
        expected[behind.index(max(behind))] += 1
    assert data.copies(data[:], 8, 2) == again.copies(again[:], 8, 2) == expected
    assert sum(expected) == 32 and expected[0] > 3 * expected[1], "flat twice in a row"


@pytest.mark.parametrize("family", toys.POLICIES)
def test_a_policy_answers_every_prompt_as_often_as_it_is_told(family):
    """Rows have the names that follow; equal numbers draw what one number draws, and the rows of a
    later process are those of the whole."""
    policy = toys.make(family, double=True)
    prompts, sizes, rng = toys.prompts(3), [1, 4, 2], Rng.of("uneven")
    with torch.no_grad():
        whole = policy.rollout(prompts, sizes, rng)
        later = policy.rollout(prompts[2:], sizes[2:], rng.after(sizes, 2))
        even, same = (policy.rollout(prompts, copies, rng) for copies in ([2, 2, 2], 2))
    assert whole.group.tolist() == [0, 1, 1, 1, 1, 2, 2]
    assert whole.row_id.tolist() == list(range(7))
    assert torch.equal(even.sample, same.sample) and torch.equal(even.row_id, same.row_id)
    torch.testing.assert_close(whole.sample[5:], later.sample, atol=1e-10, rtol=0)
    assert later.row_id.tolist() == [5, 6]


class Uneven(DATA["knapsack"]):
    """Gives the prompts 2, 4, 2, 8 samples ... whatever they earned."""

    def copies(self, prompts, group_size, iteration):
        return [(2, 4, 2, 8)[i % 4] for i in range(len(prompts))]


def of_uneven(family, **options):
    prompts = Uneven(plain(16), least=2, most=8).train
    return make_trainer(family, prompts=prompts, group_size=4, train_batch_size=16, **options)


@pytest.mark.parametrize("family", ["flow", "causal"])
def test_micro_batches_change_nothing_with_groups_of_different_sizes(family):
    runs = []
    for micro in (3, 16):
        policy = toys.make(family, double=True)
        trainer = of_uneven(family, kl=0.1, micro_batch_size=micro, policy=policy)
        metrics = [trainer.iterate() for _ in range(2)][-1]
        assert metrics["decisions"] > 0 and metrics["samples/total"] == 32
        runs.append(trainer.policy.weights.full())
    torch.testing.assert_close(*runs, atol=1e-9, rtol=0)


def test_groups_of_other_sizes_can_be_replaced_by_new_ones_and_by_old_ones():
    """Dynamic sampling asks for as many samples as the group had that it replaces."""

    def reward(media, prompts):
        flat = torch.tensor([prompt["label"] == 0 for prompt in prompts])
        return toys.reward(media, prompts).masked_fill(flat, 0)

    trainer = of_uneven("causal", reward=reward, dynamic_sampling_rounds=3)
    batch = trainer.collect()
    assert batch.group_sizes == (2, 4, 2, 8) * 2
    sizes = batch.rollout.group.unique(return_counts=True)[1]
    assert sorted(sizes.tolist()) == sorted(batch.group_sizes)
    assert batch.metrics["resample/groups"] > 0
