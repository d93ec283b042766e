"""Different numbers of samples for different prompts: how they are shared out, and what must not
change by it."""

import itertools

import pytest
import torch

from mmrl.core.registry import DATA
from mmrl.core.types import per_prompt
from mmrl.data.base import Outcome
from mmrl.zoo.curricula.budget import AdaptiveGroupSize, Knapsack, allotted
from mmrl.zoo.curricula.statistics import PromptRecord, PromptStatistics, mean_advantage
from samplers.noise import Rng
from tests.fixtures import toys
from tests.train.test_trainer import make_trainer


class Plain:
    """A data source of a few prompts."""

    def __init__(self, count=4):
        self.train = toys.prompts(count)
        self.held_out = []


def record(*rewards):
    statistics = PromptStatistics()
    statistics.learn([Outcome(0, 0.0, False, rewards)])
    return statistics[0]


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
    source = Knapsack(Plain(), least=2, most=16, decay=0.5)
    data = source.train
    assert data.copies(data[:], 8, 0) == [8, 8, 8, 8], "nothing is known"
    data.learn([Outcome(0, 1.0, True, (1.0,) * 8), Outcome(1, 0.1, False, (0.0,) * 7 + (0.9,))])
    data.learn([Outcome(0, 1.0, True, (1.0,) * 4)])
    assert data.statistics[0].samples == 8.0 and data.statistics[0].mean == 1.0
    rates = [8.5 / 9, 1.5 / 9, 0.5, 0.5]
    expected = allotted([lambda n, p=p: worth(p, n) for p in rates], 32, 2, 16)
    assert data.copies(data[:], 8, 2) == expected and sum(expected) == 32
    assert expected[0] == 2 < expected[2] < expected[1]


def test_rewards_between_0_and_1_count_as_far_as_they_go():
    data = Knapsack(Plain(), threshold=None).train
    data.learn([Outcome(2, 0.0, False, (0.25, 1.5, -1.0, 0.75))])
    assert data.statistics[2].mean == 0.5


def test_groups_grow_where_they_were_flat_and_shrink_where_they_were_not():
    """In the ratio 2.5^k, by a plain loop that gives each sample to the prompt furthest behind."""
    source = AdaptiveGroupSize(Plain(), growth=2.5, least=2, most=32)
    data = source.train
    assert data.copies(data[:], 8, 0) == [8] * 4
    flat = Outcome(0, 1.0, True, (1.0,) * 8)
    mixed = Outcome(1, 0.5, False, (1.0, 0.0) * 4)
    for _ in range(2):
        data.learn([flat, mixed, flat._replace(entry=2), mixed._replace(entry=3)])
    data.learn([mixed._replace(entry=2)])
    again = AdaptiveGroupSize(Plain(), growth=2.5, least=2, most=32).train
    again.load_state_dict(data.state_dict())
    expected = [2] * 4
    for _ in range(24):
        behind = [
            weight / (size + 1) for weight, size in zip([6.25, 1, 1, 1], expected, strict=True)
        ]
        expected[behind.index(max(behind))] += 1
    assert data.copies(data[:], 8, 2) == again.copies(again[:], 8, 2) == expected
    assert sum(expected) == 32 and expected[0] > 3 * expected[1], "flat twice in a row"


def test_statistics_survive_a_checkpoint():
    data = Knapsack(Plain()).train
    data.learn([Outcome(1, 0.5, False, (0.0, 1.0)), Outcome(3, float("nan"), True)])
    again = Knapsack(Plain()).train
    again.load_state_dict(data.state_dict())
    assert again.copies(again[:], 4, 1) == data.copies(data[:], 4, 1)
    assert again.statistics == data.statistics and 3 not in again.statistics.records


def test_moments_of_a_record_are_those_of_its_rewards():
    statistics = PromptStatistics(decay=0.5)
    statistics.learn([Outcome(0, 0.0, False, (1.0, 0.0, 0.5))])
    statistics.learn([Outcome(0, 0.0, False, (0.25, 0.75))])
    weights = torch.tensor([0.5, 0.5, 0.5, 1, 1], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.75], dtype=torch.float64)
    mean = float((weights * rewards).sum() / weights.sum())
    assert statistics[0].mean == pytest.approx(mean, abs=1e-12)
    spread = float((weights * (rewards - mean) ** 2).sum() / weights.sum())
    assert statistics[0].variance == pytest.approx(spread, abs=1e-12)
    assert statistics[0].advantage == mean_advantage((0.25, 0.75)) == pytest.approx(1.0)
    assert record(0.5, 0.5).advantage == 0 and statistics[9] == PromptRecord()


def test_a_policy_answers_every_prompt_as_often_as_it_is_told(subtests):
    """Rows have the names that follow; equal numbers draw what one number draws, and the rows of a
    later process are those of the whole."""
    for family in toys.POLICIES:
        with subtests.test(family=family):
            policy = toys.make(family, double=True)
            sizes = [1, 4, 2]
            with torch.no_grad():
                whole = policy.rollout(toys.prompts(3), sizes, Rng.of("uneven"))
                later = policy.rollout(
                    toys.prompts(3)[2:], sizes[2:], Rng.of("uneven").after(sizes, 2)
                )
                even = policy.rollout(toys.prompts(3), [2, 2, 2], Rng.of("uneven"))
                same = policy.rollout(toys.prompts(3), 2, Rng.of("uneven"))
            assert whole.group.tolist() == [0, 1, 1, 1, 1, 2, 2]
            assert whole.row_id.tolist() == list(range(7))
            assert torch.equal(even.sample, same.sample) and torch.equal(even.row_id, same.row_id)
            torch.testing.assert_close(whole.sample[5:], later.sample, atol=1e-10, rtol=0)
            assert later.row_id.tolist() == [5, 6]
            assert per_prompt(3, 2) == [3, 3] and per_prompt([1, 2], 2) == [1, 2]


class Uneven(DATA["knapsack"]):
    """Gives the prompts 2, 4, 2, 8 samples ... whatever they earned."""

    def copies(self, prompts, group_size, iteration):
        return [(2, 4, 2, 8)[i % 4] for i in range(len(prompts))]


def test_micro_batches_change_nothing_with_groups_of_different_sizes(subtests):
    for family in ("flow", "causal"):
        with subtests.test(family=family):
            runs = []
            for micro in (3, 16):
                trainer = make_trainer(
                    family,
                    kl=0.1,
                    group_size=4,
                    train_batch_size=16,
                    micro_batch_size=micro,
                    policy=toys.make(family, double=True),
                )
                trainer.prompts = Uneven(Plain(16), least=2, most=8).train
                metrics = [trainer.iterate() for _ in range(3)][-1]
                assert metrics["decisions"] > 0 and metrics["samples/total"] == 32
                runs.append(trainer.policy.weights.full())
            for name in runs[0]:
                torch.testing.assert_close(runs[0][name], runs[1][name], atol=1e-9, rtol=0)


@pytest.mark.parametrize("family", ["flow", "causal"])
def test_groups_of_other_sizes_can_be_replaced_by_new_ones_and_by_old_ones(family):
    """Dynamic sampling asks for as many samples as the group had that it replaces."""

    def reward(media, prompts):
        plain = toys.reward(media, prompts)
        flat = torch.tensor([prompt["label"] == 0 for prompt in prompts])
        return torch.where(flat, torch.zeros_like(plain), plain)

    trainer = make_trainer(
        family, reward=reward, group_size=4, train_batch_size=16, dynamic_sampling_rounds=3
    )
    trainer.prompts = Uneven(Plain(16), least=2, most=8).train
    for stage in trainer.stages:
        stage.prompts = trainer.prompts
    batch = trainer.collect()
    assert batch.group_sizes == (2, 4, 2, 8) * 2
    sizes = batch.rollout.group.unique(return_counts=True)[1]
    assert sorted(sizes.tolist()) == sorted(batch.group_sizes)
    assert batch.rollout.row_id.tolist() == list(range(32))
    assert batch.metrics["resample/groups"] > 0
    assert torch.isfinite(torch.tensor(trainer.update.run(batch)["loss"]))


def test_a_training_learns_its_budget(monkeypatch):
    trainer = make_trainer("flow", group_size=4, train_batch_size=16)
    trainer.prompts = Knapsack(Plain(16), threshold=-0.9, most=12).train
    sizes = []
    plain = trainer.collect
    monkeypatch.setattr(trainer, "collect", lambda: sizes.append((b := plain()).group_sizes) or b)
    for _ in range(6):
        trainer.iterate()
    assert sizes[0] == (4,) * 8 and all(sum(each) == 32 for each in sizes)
    assert any(len(set(each)) > 1 for each in sizes[2:])
