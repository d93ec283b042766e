"""Rounds of sampling until a prompt has a signal: which rows are kept, which moments, how many."""

from statistics import fmean, pstdev

import pytest
import torch

from mmrl.advantages import outcomes
from mmrl.advantages.group import group
from mmrl.core.types import Rewards, per_prompt
from mmrl.rollout.stages import Drawn, shaped_moments
from mmrl.zoo.advantages import all_samples
from mmrl.zoo.stages.adaptive_sampling import AdaptiveSampling, balanced
from mmrl.zoo.stages.dynamic_sampling import exchanged
from samplers.noise import Rng
from tests.fixtures.records import make_rollout
from tests.fixtures.stages import met

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


def test_groups_may_differ_in_size_and_exchanged_ones_have_moments_too():
    _, drawn, _ = rounds(asked(0.5, 0.1, 0.6), copies=[2, 6, 4], rounds=10)
    assert drawn.rollout.group.bincount().tolist() == [2, 6, 4]
    assert drawn.rollout.row_id.tolist() == list(range(12))
    assert drawn.rewards["right"][drawn.rollout.group == 1].sum() == 3
    _, drawn, _ = rounds(asked(0.5, 0.0), rounds=2)
    new = bernoulli(asked(0.5), Rng.of("new"), SIZE)
    mixed = exchanged(drawn, new, [1])
    mean = fmean(new.rewards["right"].tolist())
    assert mixed.rollout.all_samples.mean[SIZE:].tolist() == [mean] * SIZE
    assert len(mixed.sampled()[0]) == len(drawn.sampled()[0]) + SIZE, "nothing is lost"
