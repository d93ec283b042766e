"""Rewards side by side, in parts, of groups and of steps: the same numbers as one after another,
and nothing lost."""

from __future__ import annotations

import threading

import pytest
import torch

from mmrl.advantages import dance_grpo, flow_grpo, gdpo, rloo, statistics
from mmrl.advantages.group import group
from mmrl.advantages.process import process
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.rollout import collect
from mmrl.scoring import Scorer
from mmrl.zoo.advantages.ddpo import DDPO
from rewards.card import card
from samplers.noise import Rng
from tests.fixtures import toys, waiting
from tests.fixtures.records import make_rollout
from tests.fixtures.rounding import assert_to_rounding

B = 12
COPIES = 3
MEDIA = torch.rand(B, 3, 4, 4, generator=torch.Generator().manual_seed(0))
ASKED = [{"text": f"prompt {i // COPIES}"} for i in range(B)]
GROUPS = torch.arange(B) // COPIES


def mean(media, prompts):
    return media.flatten(1).mean(1)


@card(of="group")
def rank(media, prompts):
    """Position inside the group; wants whole groups."""
    values = mean(media, prompts)
    found = torch.zeros(len(media))
    for name in {p["group"] for p in prompts}:
        rows = torch.tensor([i for i, p in enumerate(prompts) if p["group"] == name])
        assert len(rows) == COPIES, "a group was torn apart"
        found[rows] = values[rows].argsort().argsort().float()
    return found


@card(of="step")
def steps(media, prompts):
    return torch.stack([media[:, 0, 0, 0], media[:, 1, 1, 1]], 1)


class Waits:
    """A reward that does not answer before ``ready()`` has returned."""

    def __init__(self, factor=1.0, ready=lambda: None):
        self.factor = factor
        self.ready = ready
        self.seen = []
        self.threads = set()

    def __call__(self, media, prompts):
        self.seen += [p["text"] for p in prompts]
        self.threads.add(threading.current_thread().name)
        self.ready()
        return mean(media, prompts) * self.factor


def one_by_one(rewards, **options):
    return Rewards(
        {n: Scorer({n: r}, **options)(MEDIA, ASKED, GROUPS)[n] for n, r in rewards.items()}
    )


def equal(found, wanted):
    assert list(found) == list(wanted)
    for name in found:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=0, equal_nan=True)


def test_side_by_side_is_what_one_after_another_gives_and_takes_as_long_as_the_slowest():
    """None of the three answers before all three are at work."""
    meeting = threading.Barrier(3)
    slow = [Waits(factor, lambda: meeting.wait(waiting.HANG)) for factor in (1.3, 1.2, 1.25)]
    rewards = {"a": slow[0], "rank": rank, "b": slow[1], "steps": steps, "c": slow[2]}
    found = Scorer(rewards)(MEDIA, ASKED, GROUPS)
    for reward in slow:
        reward.ready = lambda: None
    equal(found, one_by_one(rewards))
    assert rewards["a"].threads != rewards["b"].threads


def test_parts_of_a_batch_give_the_whole_whatever_the_timing():
    """No part is scored before the last has been handed over, which therefore does not wait."""
    all_there = threading.Event()

    def ready():
        assert all_there.wait(waiting.HANG)

    rewards = {"slow": Waits(1.05, ready), "fast": mean, "rank": rank, "steps": steps}
    scorer = Scorer(rewards)
    stream = scorer.stream(B)
    for first in range(0, B, COPIES):
        rows = slice(first, first + COPIES)
        stream.put(MEDIA[rows], ASKED[rows], GROUPS[rows])
    all_there.set()
    equal(stream.result(), one_by_one(rewards))
    assert rewards["slow"].seen[:B] == [p["text"] for p in ASKED]
    equal(scorer(MEDIA, ASKED, GROUPS), one_by_one(rewards))


def test_no_gradient_and_no_autocast_reach_a_reward_in_whatever_thread():
    seen = []

    def look(media, prompts):
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return mean(media, prompts)

    with torch.autocast("cpu", torch.bfloat16):
        Scorer({"a": look})(MEDIA, ASKED)
        Scorer({"a": look, "b": look})(MEDIA, ASKED)
    assert seen == [(False, False)] * 3


def test_a_reward_that_fails_costs_no_other_one_a_value():
    def broken(media, prompts):
        if any(p["text"] == "prompt 2" for p in prompts):
            raise OSError("the server is gone")
        return mean(media, prompts)

    scorer = Scorer({"broken": broken, "slow": Waits(1.05), "rank": rank}, max_failures=0.25)
    stream = scorer.stream(B)
    for rows in (slice(0, 6), slice(6, 12)):
        stream.put(MEDIA[rows], ASKED[rows], GROUPS[rows])
    found = stream.result()
    assert found["broken"].isnan().tolist() == [g == 2 for g in GROUPS.tolist()]
    assert found["slow"].isfinite().all() and found["rank"].isfinite().all()
    assert (
        scorer.failures["broken"].count == 3
        and "the server is gone" in scorer.failures["broken"].cause
    )
    strict = Scorer({"slow": mean, "broken": broken}, max_failures=0.2)
    with pytest.raises(
        UserError,
        match="'broken' could not score 3 of 12 samples, more than train.max_reward_failure_rate",
    ):
        strict(MEDIA, ASKED, GROUPS)


def test_failures_in_parts_are_counted_against_the_whole_batch():
    def guilty(media, prompts):
        return torch.where(torch.tensor([p["text"] == "prompt 0" for p in prompts]), torch.nan, 1.0)

    stream = Scorer({"guilty": guilty}, max_failures=0.25).stream(B)
    for rows in (slice(0, 3), slice(3, 12)):  # all of the first part, a quarter of the batch
        stream.put(MEDIA[rows], ASKED[rows])
    assert int(stream.result()["guilty"].isnan().sum()) == 3


# ------------------------------------------------------------------------------------------------
# groups and steps


def test_a_group_reward_sees_whole_groups_also_after_a_failure_and_in_any_order():
    @card(of="group")
    def moody(media, prompts):
        if any(p["text"] == "prompt 1" for p in prompts):
            raise RuntimeError("not this one")
        return rank(media, prompts)

    shuffled = torch.tensor([0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11])
    scorer = Scorer({"moody": moody})
    found = scorer(MEDIA[shuffled], [ASKED[i] for i in shuffled], GROUPS[shuffled])["moody"]
    wanted = one_by_one({"rank": rank})["rank"][shuffled].masked_fill(
        GROUPS[shuffled] == 1, torch.nan
    )
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert scorer.failures["moody"].count == COPIES


def test_without_numbers_neighbours_with_one_prompt_are_a_group():
    assert (
        Scorer({"rank": rank})(MEDIA, ASKED)["rank"].tolist()
        == one_by_one({"rank": rank})["rank"].tolist()
    )
    arrays = [{"text": "q", "image": torch.full((2, 2), float(i // COPIES))} for i in range(B)]
    # one object a group, which cannot be compared by value
    held = [arrays[i // COPIES * COPIES] for i in range(B)]
    assert (
        Scorer({"rank": rank})(MEDIA, held)["rank"].tolist()
        == one_by_one({"rank": rank})["rank"].tolist()
    )


def test_a_step_reward_may_leave_steps_out_but_not_a_sample():
    @card(of="step")
    def sparse(media, prompts):
        found = steps(media, prompts)
        found[0::3, 0] = torch.nan
        return found

    @card(of="step")
    def empty(media, prompts):
        return torch.where(
            torch.tensor([[p["text"] == "prompt 3"] for p in prompts]),
            torch.nan,
            steps(media, prompts),
        )

    scorer = Scorer({"sparse": sparse, "empty": empty})
    found = scorer(MEDIA, ASKED, GROUPS)
    assert found["sparse"].isnan().sum() == 4 and "sparse" not in scorer.failures
    assert scorer.failures["empty"].count == 3 and found["empty"][9:].isnan().all()


def test_a_step_reward_of_another_shape_is_refused():
    for values in (torch.ones(B), torch.ones(B, 2, 2), torch.ones(B - 1, 2)):
        mine = card(of="step")(lambda media, prompts, values=values: values)
        with pytest.raises(UserError, match=r"expected \[B, K\] = \[12, K\]"):
            Scorer({"mine": mine})(MEDIA, ASKED)


def rollout(family="flow", parts=1, scorer=None, **options):
    policy = toys.make(family, **options)
    policy.pass_sizes.rows = 4
    found, media, scores = collect.draw(
        policy, toys.prompts(4), COPIES, Rng.of(3), scorer or Scorer({"a": toy}), parts
    )
    return found, media, scores()


def toy(media, prompts):
    return toys.reward(media, prompts).float()


def test_step_rewards_give_step_advantages():
    rows, _, _ = rollout()
    K = rows.mask.shape[1]
    each = torch.rand(B, K, generator=torch.Generator().manual_seed(1))
    whole = torch.rand(B, generator=torch.Generator().manual_seed(2))
    for advantage in (group, flow_grpo, dance_grpo, rloo, gdpo):
        found = advantage(Rewards({"each": each}), rows)
        assert found.shape == (B, K)
        for k in range(K):
            torch.testing.assert_close(found[:, k : k + 1], advantage(each[:, k], rows))
    mixed = group(
        Rewards({"each": each, "whole": whole}, {"each": 1.0, "whole": 2.0}), rows, std="none"
    )
    torch.testing.assert_close(
        mixed, group(Rewards({"x": each + 2 * whole[:, None]}), rows, std="none")
    )
    hole = each.clone()
    hole[4, 1] = torch.nan
    assert group(Rewards({"each": hole}), rows).isnan().nonzero().tolist() == [[4, 1]]
    found = statistics(Rewards({"each": each, "whole": whole}), rows)
    assert found["reward/each/mean"] == pytest.approx(float(each.mean()), rel=1e-6)


def test_process_advantages_are_rewards_to_go_of_normalised_steps():
    rows, _, _ = rollout()
    K = rows.mask.shape[1]
    each = torch.rand(B, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    each[5, 2] = torch.nan
    wanted = torch.zeros(B, K, dtype=torch.float64)
    for g in range(4):
        mine = each[rows.group == g]
        known = mine[~mine.isnan()]
        z = ((mine - known.mean()) / (known.std(unbiased=False) + 1e-4)).nan_to_num(0.0)
        wanted[rows.group == g] = torch.stack([z[:, k:].sum(1) for k in range(K)], 1)
    torch.testing.assert_close(process(Rewards({"each": each}), rows), wanted)
    outcome = torch.rand(B, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    both = process(Rewards({"each": each, "outcome": outcome}), rows)
    torch.testing.assert_close(both, wanted + group(outcome, rows))
    torch.testing.assert_close(process(outcome, rows), group(outcome, rows))


def test_steps_that_do_not_fit_are_refused():
    rows, _, _ = rollout()
    with pytest.raises(UserError, match="'each' gives 2 steps for samples of 6 decisions"):
        group(Rewards({"each": torch.rand(B, 2)}), rows)
    with pytest.raises(
        UserError, match="compares whole samples; use one that knows steps, such as process"
    ):
        DDPO()(Rewards({"each": torch.rand(B, 6)}), rows)


# --------------------------------------------------------------------------------------------------
# overlap


def slope_of(dist, target):
    """How much a unit in the last place of a Gaussian's mean moves its log-prob, at most; 0 of
    other distributions."""
    if not hasattr(dist, "mean"):
        return 0.0
    return float(
        dist.mean.detach().abs().max() * ((target - dist.mean) / dist.std**2).detach().abs().max()
    )


@pytest.mark.parametrize("family", sorted(toys.POLICIES))
def test_a_rollout_in_parts_is_the_same_rollout_to_rounding(family):
    """The same rows, prompts, noise and decisions. Rows lie at other places of their passes, which
    some CPUs round in another way (Intel's with AVX2 or AVX-512: up to 5 units in the last place),
    so no further than that."""
    options = {"guidance_scale": 2.0} if family in ("flow", "diffusion", "video") else {}
    whole, media, rewards = rollout(family, **options)
    for parts in (2, 3, 9):
        found, seen, scores = rollout(family, parts, **options)
        tensors = found.row_tensors()
        assert (
            tensors.keys() == whole.row_tensors().keys() >= {"row_id", "sample", "logprob", "mask"}
        )
        for name, expected in whole.row_tensors().items():
            assert_to_rounding(tensors[name], expected)
        assert_to_rounding(seen, media)
        assert_to_rounding(scores["a"], rewards["a"])
        assert found.prompts == whole.prompts
        policy = toys.make(family, **options)
        policy.pass_sizes.rows = 4
        for one, other in zip(policy.path(found), policy.path(whole), strict=True):
            found_logp, whole_logp = (
                policy.dist(point).log_prob(point.target) for point in (one, other)
            )
            assert_to_rounding(
                found_logp, whole_logp, slope=slope_of(policy.dist(other), other.target)
            )


def test_sampling_goes_on_while_a_slow_reward_works():
    """The reward of a part answers when the next part is being sampled, and not before."""
    begun = [threading.Event() for _ in range(4)]
    scored = []

    class Announced(toys.ToyFlow):
        def rollout(self, prompts, copies, rng, context):
            begun[rng.offset].set()
            return super().rollout(prompts, copies, rng, context)

    def slow(media, prompts):
        scored.append(len(prompts))
        assert begun[min(len(scored), 3)].wait(waiting.HANG)
        return toy(media, prompts)

    _, _, scores = collect.draw(
        Announced(), toys.prompts(4), COPIES, Rng.of(3), Scorer({"a": slow}), 4
    )
    assert scores()["a"].isfinite().all() and scored == [COPIES] * 4


def test_answers_of_different_length_are_padded_and_conditions_joined():
    parts = []
    for length in (2, 4):
        ones = torch.ones(2, length)
        parts.append(
            make_rollout(
                group=torch.zeros(2, dtype=torch.long),
                row_id=torch.arange(2),
                sample=ones.long(),
                logprob=ones,
                mask=ones.bool(),
                prompts=({"text": str(length)},),
                cond=[{"ids": torch.ones(1, length)}],
                edge_id=torch.arange(2)[:, None].expand(2, length).contiguous(),
            )
        )
    found = collect.joined(parts)
    assert (
        found.sample.shape == (4, 4)
        and found.mask.tolist() == [[True, True, False, False]] * 2 + [[True] * 4] * 2
    )
    assert found.group.tolist() == [0, 0, 1, 1] and [p["text"] for p in found.prompts] == ["2", "4"]
    assert len(found.cond) == 2 and found.cond[1]["ids"].shape == (1, 4)
    assert set(found.edge_id[:2].flatten().tolist()).isdisjoint(
        found.edge_id[2:].flatten().tolist()
    )
    with pytest.raises(
        UserError, match="reward_overlap_chunks to 1 and leave out dynamic_sampling"
    ):
        collect.conditions([torch.ones(1, 2), torch.ones(1, 3)])


def test_training_in_parts_is_the_same_training():
    from mmrl.objectives import PolicyGradient
    from mmrl.train.trainer import Trainer

    def run(parts):
        options = TrainOptions(
            prompts_per_iteration=4,
            group_size=4,
            train_batch_size=8,
            iterations=1,
            reward_overlap_chunks=parts,
            micro_batch_size=4,
        )
        policy = toys.make("flow")
        trainer = Trainer(
            policy,
            toys.prompts(4),
            Scorer({"a": toy, "b": lambda m, p: -toy(m, p)}, {"b": 0.3}),
            flow_grpo,
            PolicyGradient(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            options,
        )
        trainer.iterate()
        return torch.cat([p.flatten() for p in policy.net.parameters()])

    assert_to_rounding(run(1), run(3), ulps=64)  # a gradient is a sum over all rows
