"""Rewards side by side, in parts, of groups and of steps: the same numbers as one after another,
and nothing lost."""

from __future__ import annotations

import threading

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.rollout import collect
from mmrl.scoring import Scorer
from rewards.card import card
from samplers.noise import Rng
from tests.fixtures import toys, waiting
from tests.fixtures.records import make_rollout

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
    for rows in (slice(0, 9), slice(9, 12)):  # a third of the first part: a quarter of the whole
        stream.put(MEDIA[rows], ASKED[rows], GROUPS[rows])
    found = stream.result()
    assert found["broken"].isnan().tolist() == [g == 2 for g in GROUPS.tolist()]
    assert found["slow"].isfinite().all() and found["rank"].isfinite().all()
    failure = scorer.failures["broken"]
    assert failure.count == 3 and "the server is gone" in failure.cause


def test_a_group_reward_sees_whole_groups_also_after_a_failure_and_in_any_order():
    @card(of="group")
    def moody(media, prompts):
        if any(p["text"] == "prompt 1" for p in prompts):
            raise RuntimeError("not this one")
        return rank(media, prompts)

    shuffled = torch.tensor([0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11])
    scorer = Scorer({"moody": moody})
    found = scorer(MEDIA[shuffled], [ASKED[i] for i in shuffled], GROUPS[shuffled])["moody"]
    wanted = one_by_one({"rank": rank})["rank"].masked_fill(GROUPS == 1, torch.nan)[shuffled]
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert scorer.failures["moody"].count == COPIES


def test_a_step_reward_may_leave_steps_out_but_not_a_sample():
    @card(of="step")
    def sparse(media, prompts):
        found = steps(media, prompts)
        found[0::3, 0] = torch.nan
        return found

    @card(of="step")
    def empty(media, prompts):
        last = torch.tensor([[p["text"] == "prompt 3"] for p in prompts])
        return torch.where(last, torch.nan, steps(media, prompts))

    scorer = Scorer({"sparse": sparse, "empty": empty})
    found = scorer(MEDIA, ASKED, GROUPS)
    assert found["sparse"].isnan().sum() == 4 and "sparse" not in scorer.failures
    assert scorer.failures["empty"].count == 3 and found["empty"][9:].isnan().all()
    for values in (torch.ones(B), torch.ones(B, 2, 2), torch.ones(B - 1, 2)):
        mine = card(of="step")(lambda media, prompts, values=values: values)
        with pytest.raises(UserError, match=r"expected \[B, K\] = \[12, K\]"):
            Scorer({"mine": mine})(MEDIA, ASKED)


def rollout(family, parts=1, **options):
    policy = toys.make(family, double=True, **options)
    policy.pass_sizes.rows = 4
    scorer = Scorer({"a": toy})
    found, media, scores = collect.draw(policy, toys.prompts(4), COPIES, Rng.of(3), scorer, parts)
    return found, media, scores()


def toy(media, prompts):
    return toys.reward(media, prompts).float()


@pytest.mark.parametrize("family", sorted(toys.POLICIES))
def test_a_rollout_in_parts_is_the_same_rollout_to_rounding(family):
    """Rows lie at other places of their passes, which some CPUs round in another way."""
    options = {"guidance_scale": 2.0} if family in ("flow", "diffusion", "video") else {}
    whole, media, rewards = rollout(family, **options)
    for parts in (2, 3, 9):
        found, seen, scores = rollout(family, parts, **options)
        tensors = found.row_tensors()
        assert tensors.keys() == whole.row_tensors().keys()
        for name, expected in whole.row_tensors().items():
            torch.testing.assert_close(tensors[name], expected, atol=1e-9, rtol=0)
        torch.testing.assert_close(seen, media, atol=1e-9, rtol=0)
        torch.testing.assert_close(scores["a"], rewards["a"])
        assert found.prompts == whole.prompts


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
    lengths = [[True, True, False, False]] * 2 + [[True] * 4] * 2
    assert found.sample.shape == (4, 4) and found.mask.tolist() == lengths
    assert found.group.tolist() == [0, 0, 1, 1] and [p["text"] for p in found.prompts] == ["2", "4"]
    assert len(found.cond) == 2 and found.cond[1]["ids"].shape == (1, 4)
    edges = found.edge_id.flatten().tolist()
    assert set(edges[:8]).isdisjoint(edges[8:])
    with pytest.raises(UserError, match="reward_overlap_chunks to 1 and leave out dynamic_sampl"):
        collect.conditions([torch.ones(1, 2), torch.ones(1, 3)])
