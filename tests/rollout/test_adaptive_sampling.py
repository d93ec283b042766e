"""Rounds of sampling until a prompt has a signal: which rows are kept, which moments, how many."""

import threading
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
import torch

from mmrl.advantages import outcomes
from mmrl.advantages.group import group
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.types import Rewards, per_prompt
from mmrl.rollout.stages import Drawn, shaped_moments
from mmrl.zoo.advantages import all_samples
from mmrl.zoo.stages.adaptive_sampling import AdaptiveSampling, balanced, chosen
from mmrl.zoo.stages.dynamic_sampling import exchanged
from samplers.noise import Rng
from tests.fixtures import toys, waiting
from tests.fixtures.records import make_rollout
from tests.fixtures.stages import met
from tests.train.test_trainer import make_trainer

SIZE = 4


def bernoulli(prompts, rng, copies):
    """Samples are uniform numbers; a sample is right with the prompt's probability."""
    sizes = per_prompt(copies, len(prompts))
    rows = rng.rows(len(prompts), copies)
    u = rng.uniform(rows)
    group = torch.arange(len(prompts)).repeat_interleave(torch.tensor(sizes))
    p = torch.tensor([prompt["p"] for prompt in prompts], dtype=torch.float64)[group]
    rollout = make_rollout(
        group=group,
        row_id=rows,
        prompts=tuple(dict(prompt) for prompt in prompts),
        sample=u[:, None],
        mask=torch.ones(len(rows), 1, dtype=torch.bool),
        logprob=torch.zeros(len(rows), 1, dtype=torch.float64),
    )
    return Drawn(rollout, u[:, None], Rewards({"right": (u < p).double()}))


def asked(*rates):
    return [{"text": str(i), "entry": i, "p": p} for i, p in enumerate(rates)]


def rounds(prompts, copies=SIZE, iteration=0, rng=None, log=None, **options):
    """The first samples and what the stage makes of them."""
    stage = met(AdaptiveSampling(**options))
    stage.begin(iteration)

    def sample(round_prompts, rng, copies):
        drawn = bernoulli(round_prompts, rng, copies)
        stage.observe(round_prompts, drawn)
        if log is not None:
            log.append((round_prompts, drawn))
        return drawn

    first = sample(prompts, rng or Rng.of("first"), copies)
    return first, *stage.groups(first, iteration, sample)


@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], [2, 5, 3, 6]])
def test_rows_are_chosen_as_by_a_plain_loop(sizes):
    rng = Rng.of("labels").uniform(torch.arange(60), (2,))
    groups = (rng[:, 0] * 4).long()
    label = (rng[:, 1] * 3).long().clamp(max=2)
    label[(groups == 1) & (label == 0)] = 1  # no negative
    keep = balanced(label, groups, torch.tensor(sizes))
    for g, size in enumerate(sizes):
        rows = [i for i in range(60) if groups[i] == g]
        positive, negative, missing = ([i for i in rows if label[i] == k] for k in (1, 0, 2))
        best = None
        scored = min(size, len(positive) + len(negative))
        for many in range(scored + 1):  # the choice nearest to half and half
            fits = many <= len(positive) and scored - many <= len(negative)
            if fits and (best is None or abs(many - scored // 2) < abs(best - scored // 2)):
                best = many
        expected = positive[:best] + negative[: scored - best] + missing[: size - scored]
        assert sorted(expected) == [i for i in rows if keep[i]]


def test_a_prompt_is_sampled_until_half_are_right_and_half_are_wrong():
    log = []
    prompts = asked(0.5, 0.1, 0.9, 0.0)
    first, drawn, counts = rounds(prompts, rounds=12, log=log)
    rows = {i: [] for i in range(4)}  # rewards of all samples of every prompt
    for round_prompts, part in log:
        for row, g in enumerate(part.rollout.group.tolist()):
            rows[round_prompts[g]["entry"]].append(float(part.rewards["right"][row]))
    assert counts["adaptive/rounds"] == 12 and counts["adaptive/left"] == 1, (
        "0.0 never has a signal"
    )
    assert counts["adaptive/samples"] == sum(map(len, rows.values())) - 16
    kept = drawn.rewards["right"].view(4, SIZE).sum(1).tolist()
    assert kept == [2, 2, 2, 0]
    assert drawn.rollout.row_id.tolist() == list(range(16))
    assert torch.equal(drawn.rollout.sample, drawn.media), "media follow their rows"
    assert torch.equal(drawn.rollout.group, first.rollout.group)
    for i, rewards in rows.items():
        moments = drawn.rollout.all_samples
        assert moments.mean[SIZE * i] == pytest.approx(fmean(rewards), abs=1e-12)
        assert moments.std[SIZE * i] == pytest.approx(pstdev(rewards), abs=1e-12)
    for outcome in outcomes(*reversed(drawn.sampled())):
        assert sorted(outcome.rewards) == sorted(rows[outcome.entry]), "statistics are of all"


def test_one_right_answer_is_enough_for_ar3po():
    _, drawn, counts = rounds(asked(0.2, 1.0, 0.1), rounds=20, until="positive")
    right = drawn.rewards["right"].view(3, SIZE).sum(1)
    assert (right[[0, 2]] >= 1).all() and right[1] == SIZE and counts["adaptive/left"] == 0


def test_the_advantage_compares_with_all_samples():
    _, drawn, _ = rounds(asked(0.5, 0.15, 0.0), rounds=6)
    moments = drawn.rollout.all_samples
    advantage = all_samples(drawn.rewards, drawn.rollout, eps=1e-6)
    for i, reward in enumerate(drawn.rewards["right"].tolist()):
        gap = reward - float(moments.mean[i])
        expected = gap / (float(moments.std[i]) + 1e-6) if moments.std[i] > 0 else 0.0
        assert float(advantage[i]) == pytest.approx(expected, abs=1e-9)
    assert not torch.allclose(advantage, group(drawn.rewards, drawn.rollout, eps=1e-6))
    plain = all_samples(drawn.rewards, drawn.rollout, std="none")
    torch.testing.assert_close(plain[:, 0], drawn.rewards["right"] - moments.mean)
    bare = drawn.rollout.replace(all_samples=None)
    torch.testing.assert_close(
        all_samples(drawn.rewards, bare), group(drawn.rewards, bare, eps=1e-6), atol=1e-9, rtol=0
    )
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    shuffled = Rewards({"right": drawn.rewards["right"][order]})
    torch.testing.assert_close(all_samples(shuffled, drawn.rollout[order]), advantage[order])


def test_shaped_rewards_are_compared_with_shaped_means():
    """The KL of the samples that are not trained on is taken as that of the others."""
    _, drawn, _ = rounds(asked(0.5, 0.15, 0.0), rounds=6)
    kl = torch.linspace(0, 1, len(drawn.rollout)).double()
    plain = drawn.rewards
    shaped = Rewards({**plain, "kl": kl}, {**plain.weights, "kl": -0.3})
    moved = shaped_moments(drawn.rollout, plain, shaped)
    assert shaped_moments(drawn.rollout, plain, plain) is drawn.rollout
    advantage = all_samples(shaped, moved, std="none")
    for i, reward in enumerate(plain["right"].tolist()):
        group = [float(kl[j]) for j in range(len(kl)) if j // SIZE == i // SIZE]
        mean = float(drawn.rollout.all_samples.mean[i]) - 0.3 * fmean(group)
        assert float(advantage[i]) == pytest.approx(reward - 0.3 * float(kl[i]) - mean, abs=1e-9)
    assert torch.equal(moved.all_samples.std, drawn.rollout.all_samples.std)


def test_groups_may_differ_in_size_and_unscored_samples_are_the_last_choice():
    _, drawn, _ = rounds(asked(0.5, 0.1, 0.6), copies=[2, 6, 4], rounds=10)
    assert drawn.rollout.group.bincount().tolist() == [2, 6, 4]
    assert drawn.rollout.row_id.tolist() == list(range(12))
    assert drawn.rewards["right"][drawn.rollout.group == 1].sum() == 3


def test_rows_keep_their_names_and_groups_in_any_order():
    plain = bernoulli(asked(0.5, 0.5), Rng.of("order"), SIZE)
    order = torch.tensor([6, 1, 4, 3, 0, 7, 2, 5])
    group = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0])  # of the names 0 to 7
    rollout = plain.rollout.replace(group=group)[order]
    rewards = Rewards({"right": plain.rewards["right"][order]})
    shuffled = replace(plain, rollout=rollout, media=plain.media[order], rewards=rewards)
    label = rewards["right"].long()
    same = chosen(shuffled, shuffled, label, torch.tensor([SIZE, SIZE]))
    assert same.rollout.row_id.tolist() == list(range(8)) and not same.unused
    assert torch.equal(same.rollout.group, group)
    for g in range(2):
        rows = same.rollout.group == g
        assert torch.equal(same.rollout.sample[rows].sort(0)[0], plain.media[rows].sort(0)[0])
        assert torch.equal(same.media[rows], same.rollout.sample[rows])


def test_groups_that_are_exchanged_afterwards_have_moments_too():
    _, drawn, _ = rounds(asked(0.5, 0.0), rounds=2)
    new = bernoulli(asked(0.5), Rng.of("new"), SIZE)
    mixed = exchanged(drawn, new, [1])
    rewards = new.rewards["right"].tolist()
    assert mixed.rollout.all_samples.mean[SIZE:].tolist() == [fmean(rewards)] * SIZE
    assert len(mixed.sampled()[0]) == len(drawn.sampled()[0]) + SIZE, "nothing is lost"


def side_by_side(run, ranks, monkeypatch):
    """Runs ``run(rank)`` for every rank, with collectives between the threads."""
    local = threading.local()
    barrier = threading.Barrier(ranks)
    parts = {}

    def gather(rows):
        parts[local.rank] = rows
        barrier.wait()
        whole = torch.cat([parts[rank] for rank in range(ranks)])
        barrier.wait()
        return whole

    monkeypatch.setattr(distributed, "world", lambda: (local.rank, ranks))
    monkeypatch.setattr(distributed, "all_gather_rows", gather)
    monkeypatch.setattr(distributed, "all_sum", lambda x: gather(x[None]).sum(0))
    results = {}

    def work(rank):
        local.rank = rank
        results[rank] = run(rank)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(waiting.HANG)
    return [results[rank] for rank in range(ranks)]


def test_two_processes_keep_what_one_keeps(monkeypatch):
    prompts = asked(0.5, 0.1, 0.8, 0.3, 0.05, 0.9)
    _, whole, counts = rounds(prompts, rounds=3)

    def run(rank):
        local = prompts[3 * rank : 3 * rank + 3]
        return rounds(local, rounds=3, rng=replace(Rng.of("first"), offset=3 * rank))

    parts = side_by_side(run, 2, monkeypatch)
    assert torch.equal(
        torch.cat([part.rollout.sample for _, part, _ in parts]), whole.rollout.sample
    )
    assert torch.cat([part.rollout.row_id for _, part, _ in parts]).tolist() == list(range(24))
    moments = torch.cat([part.rollout.all_samples.mean for _, part, _ in parts])
    torch.testing.assert_close(moments, whole.rollout.all_samples.mean)
    assert all(each == counts for _, _, each in parts)


def test_more_groups_have_a_signal_than_with_one_round():
    """Hard prompts: 4 samples at p = 0.1 are flat two times in three."""
    prompts = asked(*[0.1] * 60)
    first, drawn, _ = rounds(prompts, rounds=5)
    signal = [
        len(set(part.rewards["right"].view(60, SIZE)[i].tolist())) > 1
        for part in (first, drawn)
        for i in range(60)
    ]
    assert sum(signal[:60]) < 30 and sum(signal[60:]) > 50


@pytest.mark.parametrize("family", ["flow", "causal"])
def test_every_family_trains_on_chosen_rows(family):
    runs = []
    for micro in (5, 16):
        trainer = make_trainer(
            family,
            group_size=4,
            train_batch_size=16,
            micro_batch_size=micro,
            policy=toys.make(family, double=True),
            advantage=all_samples,
            stages=(AdaptiveSampling(rounds=2, threshold=0.2 if "a" in family else -1.0),),
            dynamic_sampling_rounds=1,
        )
        batch = trainer.collect()
        assert batch.group_sizes == (4,) * 8 and batch.rollout.row_id.tolist() == list(range(32))
        assert len(batch.sampled[0]) == batch.metrics["samples/total"] >= 32
        metrics = [trainer.iterate() for _ in range(2)][-1]
        assert metrics["decisions"] > 0 and metrics["adaptive/samples"] > 0
        runs.append(trainer.policy.weights.full())
    for name in runs[0]:
        torch.testing.assert_close(runs[0][name], runs[1][name], atol=1e-9, rtol=0)


def test_rows_of_trees_are_refused():
    first, *_ = rounds(asked(0.5))
    tree = replace(first, rollout=first.rollout.replace(edge_id=torch.zeros(4, 1).long()))
    with pytest.raises(UserError, match="sample without policy.tree"):
        met(AdaptiveSampling()).groups(tree, 0, bernoulli)
