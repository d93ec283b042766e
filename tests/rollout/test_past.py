"""Answers of earlier iterations, of every kind of model: what is stored, which are picked, where
they stand, with which ratio, resumed, and on two processes."""

import json
import math
from copy import deepcopy
from itertools import combinations
from statistics import pvariance

import pytest
import torch
from safetensors.torch import load_file

from mmrl import advantages
from mmrl.core.errors import UserError
from mmrl.core.registry import SURROGATES
from mmrl.core.types import LatentPath, MaskTrace, Rewards
from mmrl.experiment import checkpoint, state
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.objectives.terms.importance_sampling import Importance
from mmrl.rollout.collect import rescored
from mmrl.rollout.stages import Drawn, set_apart, sizes_of_all
from mmrl.zoo.models.masked.masked_lm import MaskedLM
from mmrl.zoo.objectives.reward_gradient import Draft
from mmrl.zoo.stages.answer_memory import packed, remembered, unpacked
from mmrl.zoo.stages.replay_buffer import ReplayBuffer
from mmrl.zoo.stages.response_reuse import PICKS, ReusedResponses, stratified
from samplers.noise import Rng
from tests.fixtures import past_worker, toys, warm
from tests.fixtures.stages import met
from tests.fixtures.tiny_masked_lm import folder
from tests.train.test_processes import same
from tests.train.test_trainer import make_trainer

COPIES = 3
KINDS = [*toys.POLICIES, "emerge", "maskgit"]


def made(kind):
    if kind in toys.POLICIES:
        return toys.make(kind)
    return MaskedLM(str(folder()), max_new_tokens=6, block=3, steps=4, sampler=kind)


def drawn(policy, prompts, rewards, iteration=0) -> Drawn:
    with torch.no_grad():
        rollout = policy.rollout(prompts, COPIES, Rng.of("past", iteration))
    return Drawn(rollout, policy.decode(rollout), Rewards({"r": torch.tensor(rewards).float()}))


def exchange(stage, prompts, rewards, iteration):
    fresh = drawn(stage.policy, prompts, rewards, iteration)
    stage.begin(iteration)
    stage.observe(prompts, fresh)
    return (fresh, *stage.groups(fresh, iteration, None))


def moved(policy, size=0.05):
    """The policy after an update."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.net.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_is_what_was_sampled(kind):
    policy = made(kind)
    fresh = drawn(policy, toys.prompts(2), [0, 1, 2, 3, 4, 5.0])
    entry = remembered(fresh, torch.tensor([3, 4, 5]), 1, 7)
    tensors, plain = packed([entry])
    (again,) = unpacked(tensors, json.loads(json.dumps(plain)))
    assert type(again.rollout.trajectory) is type(fresh.rollout.trajectory)
    one, two = entry.rollout.row_tensors(), again.rollout.row_tensors()
    assert set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)
    assert again.rewards["r"].tolist() == [3, 4, 5] and (again.index, again.iteration) == (1, 7)
    kinds = {"flow": LatentPath, "maskgit": MaskTrace}
    assert isinstance(again.rollout.trajectory, kinds.get(kind, object))


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_groups_have_the_ratio_to_the_weights_that_sampled(kind):
    policy = made(kind)
    prompts = toys.prompts(4)
    buffer = met(ReplayBuffer(share=1.0), policy, prompts)
    first, _, _ = exchange(buffer, prompts[2:], [0, 0, 1, 0, 0, 3.0], 0)
    _, mixed, counts = exchange(buffer, prompts[:2], [1, 1, 1, 0, 1, 0.0], 1)
    rollout = mixed.rollout
    old = rollout.provenance.is_replayed
    assert counts["reuse/groups"] == 1 and old.tolist() == [True] * 3 + [False] * 3
    assert torch.equal(rollout.sample[old], first.rollout.sample[3:])
    if kind in toys.POLICIES:
        assert torch.equal(mixed.media[:3], first.media[3:])
    every = torch.ones_like(old)
    torch.testing.assert_close(
        torch.where(rollout.mask, rescored(policy, rollout, every), 0.0),
        torch.where(rollout.mask, rollout.logprob, 0.0),
        atol=1e-5,
        rtol=0,
    )
    moved(policy)
    ratios = []
    objective = PolicyGradient()
    for point in policy.path(rollout.replace(advantage=torch.ones(len(rollout), 1))):
        point = point.replace(on_policy=True)
        logp = policy.dist(point).log_prob(point.target).detach()
        gap = (logp - point.old(logp, point.recorded))[point.mask]
        stale = point.provenance.is_replayed[:, None].expand_as(point.mask)[point.mask]
        assert (gap[~stale] == 0).all()
        ratios += gap[stale].tolist()
        assert objective.loss(policy, point).isfinite()[point.mask].all()
    assert max(map(abs, ratios)) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_right_answer_joins_an_all_wrong_group(kind):
    for place in ("replace", "append"):
        joins(kind, place)


def joins(kind, place):
    policy = made(kind)
    prompts = toys.prompts(3)
    stage = met(ReusedResponses(place=place), policy, prompts)
    first, _, _ = exchange(stage, prompts, [0, 1, 1, 0, 0, 0, 0, 0, 1.0], 0)
    second, mixed, counts = exchange(stage, [prompts[1], prompts[0]], [0.0] * 6, 2)
    assert counts["response_reuse/groups"] == 1 and counts["response_reuse/age"] == 2
    rollout = mixed.rollout
    old = rollout.provenance.is_replayed
    length = 6 if place == "replace" else 7
    assert old.tolist() == [False] * (length - 1) + [True]
    assert rollout.row_id.tolist() == list(range(length)) and rollout.group[-1] == 1
    assert mixed.rewards["r"].tolist() == [0.0] * (length - 1) + [1]
    assert torch.equal(rollout.sample[-1], first.rollout.sample[1])
    assert sizes_of_all(rollout) == [3, length - 3]
    torch.testing.assert_close(
        torch.where(rollout.mask, rescored(policy, rollout, old), 0.0),
        torch.where(rollout.mask, rollout.logprob, 0.0),
        atol=1e-5,
        rtol=0,
    )
    assert torch.equal(rollout.sample[:5], second.rollout.sample[:5])


@pytest.mark.parametrize("kind", ["flow", "maskgit"])
def test_log_probs_of_now_stand_beside_those_that_sampled(kind):
    """ReMix: the weight of a reused answer is p_now / p_sampler, before the update."""
    policy = made(kind)
    prompts = toys.prompts(2)
    options = ReusedResponses(threshold=None, when="always", place="append", logprob="current")
    stage = met(options, policy, prompts)
    first, _, _ = exchange(stage, prompts, [0, 1, 1, 0, 0, 0.0], 0)
    moved(policy)
    _, mixed, _ = exchange(stage, prompts, [0.0] * 6, 1)
    rollout = mixed.rollout
    old = rollout.provenance.is_replayed
    sampler = rollout.provenance.sampler_logprob
    assert old.tolist() == ([False] * 3 + [True]) * 2
    assert torch.equal(sampler[old], first.rollout.logprob[[0, 3]])
    assert torch.equal(sampler[~old], rollout.logprob[~old])
    assert ((rollout.logprob - sampler)[old].abs().amax(1) > 1e-3).all()
    objective = PolicyGradient(importance_sampling=Importance(cap=100.0))
    assert not list(objective.unfit(policy))
    for point in policy.path(rollout.replace(advantage=torch.ones(len(rollout), 1))):
        weight = (point.recorded - point.provenance.sampler_logprob).exp()
        logp = policy.dist(point).log_prob(point.target)
        expected = -weight * (logp - logp.detach()).exp()
        loss = objective.loss(policy, point.replace(on_policy=True))
        torch.testing.assert_close(loss[point.mask], expected[point.mask], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["causal", "maskgit"])
def test_the_clip_of_remix_is_as_wide_for_old_answers_as_for_new_ones(kind):
    """max(-r A, -clip(r, w - low, w + high) A), r = p / p_sampler and w = p_before / p_sampler."""
    policy = made(kind)
    prompts = toys.prompts(2)
    options = ReusedResponses(threshold=None, when="always", place="append", logprob="current")
    stage = met(options, policy, prompts)
    exchange(stage, prompts, [0, 1, 1, 0, 0, 0.0], 0)
    moved(policy)
    _, mixed, _ = exchange(stage, prompts, [0.0] * 6, 1)
    moved(policy)
    additive = Importance(cap=1e9, clip_mode="additive")
    objective = PolicyGradient(clip_range=(0.05, 0.1), importance_sampling=additive)
    assert not list(objective.unfit(policy))
    other = PolicyGradient(surrogate=SURROGATES["cispo"], importance_sampling=additive)
    assert [name for name, _ in other.unfit(policy)] == ["importance_sampling"]
    advantage = torch.linspace(-1, 1, len(mixed.rollout))[:, None]
    clipped = 0
    for point in policy.path(mixed.rollout.replace(advantage=advantage)):
        loss = objective.loss(policy, point).detach()
        logp = policy.dist(point).log_prob(point.target).detach()
        sampler = point.provenance.sampler_logprob
        for i, k in point.mask.nonzero().tolist():
            ratio = math.exp(float(logp[i, k] - sampler[i, k]))
            middle = math.exp(float(point.recorded[i, k] - sampler[i, k]))
            held = min(max(ratio, middle - 0.05), middle + 0.1)
            a = float(point.advantage[i, 0])
            expected = max(-a * ratio, -a * held)
            clipped += expected != -a * ratio
            assert float(loss[i, k]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert clipped > 0


def entries_of(policy, rewards):
    fresh = drawn(policy, toys.prompts(1), rewards[:COPIES])
    parts = []
    for number, reward in enumerate(rewards):
        entry = remembered(fresh, torch.tensor([number % COPIES]), 0, number)
        entry.rewards["r"] = torch.tensor([reward])
        parts.append(entry)
    return parts


def test_picks_by_loop():
    for number in (1, 2, 3, 4, 6, 9):
        picks(number)


def picks(number):
    rewards = [0.5, 0.0, 1.0, 0.25, 1.0, 0.75]
    entries = entries_of(toys.ToyCausal(), rewards)
    picked = {
        name: [entry.iteration for entry in pick(entries, number, Rng.of(3))]
        for name, pick in PICKS.items()
    }
    assert picked["recency"] == list(range(6))[-number:]
    assert picked["full_scope"] == list(range(6))
    assert picked["reward"] == [4, 2, 5, 0, 3, 1][:number], "the newest of equals first"
    assert len(set(picked["random"])) == min(number, 6)
    subsets = combinations(range(6), min(number, 6))
    largest = max(pvariance([rewards[i] for i in subset]) for subset in subsets)
    assert pvariance([rewards[i] for i in picked["variance"]]) == pytest.approx(largest, abs=1e-9)


def test_answers_of_a_prompt_leave_by_number_and_age():
    policy = toys.ToyCausal()
    prompts = toys.prompts(2)
    stage = met(ReusedResponses(threshold=None, when="always", per_prompt=4), policy, prompts)
    for iteration in range(3):
        exchange(stage, prompts[:1], [0, 1, float("nan")], iteration)
    assert [entry.iteration for entry in stage.memory.by_prompt()[0]] == [1, 1, 2, 2]
    stage.age, stage.until = 3, 5
    assert exchange(stage, prompts[1:], [0, 1, 0.0], 5)[2]["response_reuse/remembered"] == 2
    assert list(stage.memory.by_prompt()) == [0], (
        "from iteration `until` on nothing is used or remembered"
    )


def test_old_and_new_answers_are_compared_apart():
    """RePO: each side has its own mean and standard deviation."""
    policy = toys.ToyCausal()
    prompts = toys.prompts(2)
    options = ReusedResponses(
        threshold=None, when="always", number=3, per_prompt=3, place="append", own_baseline=True
    )
    stage = met(options, policy, prompts)
    exchange(stage, prompts, [0, 1, 5, 2, 2, 8.0], 0)
    _, mixed, _ = exchange(stage, prompts, [3, 1, 1, 0, 1, 0.0], 1)
    rewards = mixed.rewards["r"].tolist()
    assert rewards == [3, 1, 1, 0, 1, 5, 0, 1, 0, 2, 2, 8]
    assert stage.own_baseline and stage.grows
    compared = set_apart(mixed.rollout, stage.baseline_of)
    advantage = advantages.dr_grpo(mixed.rewards, compared)[:, 0].tolist()
    for first in range(0, 12, 3):
        mean = sum(rewards[first : first + 3]) / 3
        for row in range(first, first + 3):
            assert advantage[row] == pytest.approx(rewards[row] - mean, abs=1e-6)


def test_a_threshold_is_needed_to_tell_wrong_groups():
    with pytest.raises(UserError, match="response_reuse: when: all_wrong needs a threshold"):
        ReusedResponses(threshold=None)


@pytest.mark.parametrize("case", sorted(past_worker.CASES))
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(case, tmp_path):
    one, two = past_worker.trainer_of(case), past_worker.trainer_of(case)
    for _ in range(3):
        one.iterate()
    checkpoint.save(tmp_path, 3, *state.capture(one))
    state.restore(two, *checkpoint.load(checkpoint.latest(tmp_path)))
    reused = 0
    for _ in range(2):
        metrics = [each.iterate() for each in (one, two)]
        reused += metrics[0][past_worker.COUNTS[case]]
        for name in ("reward/mean", "loss", past_worker.COUNTS[case]):
            assert metrics[0].get(name) == metrics[1].get(name)
    assert reused
    weights = [each.policy.weights.full() for each in (one, two)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_run_begins_with_the_verified_answers_of_another(tmp_path):
    """RLEP: the pool is what a first run remembered; later answers are not added to it."""
    first = past_worker.trainer_of("reuse-causal")
    for _ in range(2):
        first.iterate()
    checkpoint.save(tmp_path / "checkpoints", 2, *state.capture(first))
    pool = first.stages[0].memory.by_prompt()
    options = ReusedResponses(
        threshold=0.2,
        when="always",
        number=2,
        strategy="random",
        place="append",
        logprob="current",
        per_prompt=9,
        age=1,
        start=tmp_path,
        learn=False,
    )
    second = past_worker.trainer_of("reuse-causal", stages=(options,))
    known = second.stages[0].memory.by_prompt()
    assert {i: len(v) for i, v in known.items()} == {i: len(v) for i, v in pool.items()} and known
    before = deepcopy(known)
    metrics = [second.iterate() for _ in range(3)]
    assert sum(m["response_reuse/groups"] for m in metrics) > 0
    assert known == {} or set(second.stages[0].memory.by_prompt()) == set(before), (
        "the pool never ages"
    )
    with pytest.raises(UserError, match="has no checkpoint with remembered answers"):
        past_worker.trainer_of("reuse-causal", stages=(ReusedResponses(start=tmp_path / "x"),))


@pytest.mark.slow
def test_two_processes_equal_one_and_both_remember_after_a_resume(tmp_path):
    for name, start in {"one": warm.run, "two": warm.ranks}.items():
        (tmp_path / name).mkdir()
        done = start(["-m", "tests.fixtures.past_worker", tmp_path / name])
        assert done.returncode == 0, done.stderr[-4000:]
    for case in past_worker.PAIRED:
        one, two = (load_file(tmp_path / name / f"{case}.safetensors") for name in ("one", "two"))
        resumed = {name: two.pop(name) for name in list(two) if name.startswith("resumed/")}
        same({f"resumed/{name}": two[name] for name in two}, resumed, f"{case}, resumed", 0.0)
        assert two["reused"] > 0
        if case.startswith("reuse"):
            same({n: v for n, v in one.items() if not n.startswith("resumed/")}, two, case)


def test_strata_of_difficulty_by_loop():
    """AVATAR: the lowest mean rewards are hard, the highest easy; each has its part of the
    memory."""
    levels = {index: (7 * index % 20) / 20 for index in range(20)}
    strata = stratified(levels, (0.25, 0.35, 0.4))
    for index, level in levels.items():
        lower = sum(other < level for other in levels.values())
        assert strata[index] == (2 if lower < 8 else 1 if lower < 15 else 0)
    policy = toys.ToyCausal()
    prompts = toys.prompts(8)
    options = ReusedResponses(
        threshold=None, when="always", size=4, strata=(0.25, 0.25, 0.5), rate=0.5, per_prompt=1
    )
    stage = met(options, policy, prompts)
    rewards = [r for i in range(8) for r in (i, i, i + 0.3)]
    exchange(stage, prompts, rewards, 0)
    assert stage.levels[3] == pytest.approx(3.1)
    exchange(stage, prompts[3:4], [1, 1, 1.0], 1)
    assert stage.levels[3] == pytest.approx(3.1 + 0.5 * (1 - 3.1))
    kept = stratified(stage.levels, options.strata)
    assert sorted(kept[index] for index in stage.memory.by_prompt()) == [0, 1, 2, 2]
    again = met(options, policy, prompts)
    tensors, plain = stage.state_dict()
    again.load_state_dict(tensors, json.loads(json.dumps(plain)))
    assert again.levels == stage.levels
    assert [e.index for e in again.memory.entries] == [e.index for e in stage.memory.entries]
    with pytest.raises(UserError, match="strata .* must add up to 1"):
        ReusedResponses(strata=(0.5, 0.5, 0.5))


def test_objectives_that_draw_the_noise_of_a_path_again_are_refused():
    with pytest.raises(UserError, match="replay_buffer: this objective draws the noise"):
        make_trainer("flow", objective=Draft(), stages=(ReplayBuffer(),))
