"""Answers of earlier iterations, of every kind of model: what is stored, which are picked, where
they stand, with which ratio, resumed, and on two processes."""

import json
import math
from dataclasses import replace
from itertools import combinations
from statistics import pvariance

import pytest
import torch
from safetensors.torch import load_file

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import SURROGATES
from mmrl.core.types import Rewards
from mmrl.experiment import checkpoint, state
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.objectives.terms.importance_sampling import Importance
from mmrl.rollout.collect import rescored
from mmrl.rollout.stages import Drawn, Setup, set_apart, sizes_of_all, stages_of
from mmrl.zoo.models.masked.masked_lm import MaskedLM
from mmrl.zoo.stages.answer_memory import marked, packed, remembered, unpacked
from mmrl.zoo.stages.replay_buffer import ReplayBuffer
from mmrl.zoo.stages.response_reuse import PICKS, ReusedResponses, stratified
from samplers.noise import Rng
from tests.fixtures import past_worker, toys, warm
from tests.fixtures.stages import assert_recorded, met
from tests.fixtures.tiny_masked_lm import folder
from tests.policies.vlm.test_vlm_policy import policy_of, quiet  # noqa: F401
from tests.train.test_processes import same

COPIES = 3
KINDS = [*toys.POLICIES, "vlm", "emerge", "maskgit"]


def made(kind):
    if kind in toys.POLICIES:
        return toys.make(kind)
    if kind == "vlm":
        return policy_of(max_new_tokens=5)
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
    entry = remembered(first, torch.tensor([3, 4, 5]), 1, 7)
    tensors, plain = packed([entry])
    (again,) = unpacked(tensors, json.loads(json.dumps(plain)))
    assert type(again.rollout.trajectory) is type(first.rollout.trajectory)
    one, two = entry.rollout.row_tensors(), again.rollout.row_tensors()
    assert set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)
    assert again.rewards["r"].tolist() == [0, 0, 3] and (again.index, again.iteration) == (1, 7)
    assert_recorded(policy, rollout)
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


@pytest.mark.parametrize("place", ["replace", "append"])
@pytest.mark.parametrize("kind", ["flow", "causal", "maskgit"])
def test_the_last_right_answer_joins_an_all_wrong_group(kind, place):
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
    rescored_rows = rescored(policy, rollout, old)[rollout.mask]
    torch.testing.assert_close(rescored_rows, rollout.logprob[rollout.mask], atol=1e-5, rtol=0)
    assert torch.equal(rollout.sample[:5], second.rollout.sample[:5])


def reused(kind):
    """A policy after an update, what it sampled before, and rows of both."""
    policy = made(kind)
    prompts = toys.prompts(2)
    options = ReusedResponses(threshold=None, when="always", place="append", logprob="current")
    stage = met(options, policy, prompts)
    first, _, _ = exchange(stage, prompts, [0, 1, 1, 0, 0, 0.0], 0)
    moved(policy)
    return policy, first, exchange(stage, prompts, [0.0] * 6, 1)[1].rollout


@pytest.mark.parametrize("kind", ["flow", "maskgit"])
def test_log_probs_of_now_stand_beside_those_that_sampled(kind):
    """ReMix: the weight of a reused answer is p_now / p_sampler, before the update."""
    policy, first, rollout = reused(kind)
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
    policy, _, rollout = reused(kind)
    moved(policy)
    additive = Importance(cap=1e9, clip_mode="additive")
    objective = PolicyGradient(clip_range=(0.05, 0.1), importance_sampling=additive)
    assert not list(objective.unfit(policy))
    other = PolicyGradient(surrogate=SURROGATES["cispo"], importance_sampling=additive)
    assert [name for name, _ in other.unfit(policy)] == ["importance_sampling"]
    advantage = torch.linspace(-1, 1, len(rollout))[:, None]
    clipped = 0
    for point in policy.path(rollout.replace(advantage=advantage)):
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


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6, 9])
def test_picks_by_loop(number):
    rewards = [0.5, 0.0, 1.0, 0.25, 1.0, 0.75]
    fresh = drawn(toys.ToyCausal(), toys.prompts(1), rewards[:COPIES])
    entries = [remembered(fresh, torch.tensor([i % COPIES]), 0, i) for i in range(6)]
    for entry, reward in zip(entries, rewards, strict=True):
        entry.rewards["r"] = torch.tensor([reward])
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


def test_groups_are_forgotten_by_age_use_and_size():
    prompts = toys.prompts(4)
    stage = met(ReplayBuffer(share=0.5, size=3, age=2), toys.ToyCausal(), prompts)
    exchange(stage, prompts, [0, 0, 1, 0, 0, 2, 0, 0, 3, 0, 0, 4.0], 0)
    assert [one.index for one in stage.memory.entries] == [3, 2, 1]
    _, mixed, counts = exchange(stage, prompts, [1.0] * 12, 1)
    assert counts["reuse/groups"] == 2, "half of the groups at most"
    assert mixed.rollout.provenance.is_replayed.sum() == 6
    assert [one.index for one in stage.memory.entries] == [1], "used once"
    assert exchange(stage, prompts, [1.0] * 12, 3)[2]["reuse/groups"] == 0, "too old"


@pytest.mark.parametrize("kind", [ReplayBuffer, ReusedResponses])
def test_what_is_not_of_the_data_or_not_scored_is_not_remembered(kind):
    prompts = toys.prompts(2)
    stage = met(kind(), toys.ToyCausal(), prompts)
    exchange(stage, [dict(prompts[0]), prompts[1]], [0, 0, 1, 0, 0, float("nan")], 0)
    assert not stage.memory.entries, "a changed prompt, and no reward that is right"
    old = drawn(stage.policy, prompts[:1], [0, 0, 1.0])
    stage.observe(prompts[:1], replace(old, rollout=marked(old.rollout, True)))
    assert kind is ReplayBuffer or not stage.memory.entries, "an answer that was replayed"


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        (ReplayBuffer(), "train.stages.replay_buffer: ToyBare"),
        (ReusedResponses(), "response_reuse: ToyBare cannot be shown old"),
    ],
)
def test_families_that_cannot_be_shown_old_answers_are_refused(stage, sentence):
    options = TrainOptions(1, 2, 2, 1, stages=(stage,))
    with pytest.raises(UserError, match=sentence):
        stages_of(Setup(options, toys.ToyBare(), [], {}))
    with pytest.raises(UserError, match="response_reuse: when: all_wrong needs a threshold"):
        ReusedResponses(threshold=None)


# the others are resumed below
@pytest.mark.parametrize("case", sorted({*past_worker.CASES} - {*past_worker.PAIRED}))
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(case, tmp_path):
    one, two = past_worker.trainer_of(case), past_worker.trainer_of(case)
    for _ in range(2):
        one.iterate()
    path = checkpoint.save(tmp_path, 2, *state.capture(one))
    state.restore(two, *checkpoint.load(path))
    for _ in range(2):
        metrics = [each.iterate() for each in (one, two)]
        for name in ("reward/mean", "loss", past_worker.COUNTS[case]):
            assert metrics[0].get(name) == metrics[1].get(name)
    assert metrics[0][past_worker.COUNTS[case]]
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
        when="always", place="append", per_prompt=9, age=1, start=tmp_path, learn=False
    )
    second = past_worker.trainer_of("reuse-causal", stages=(options,))
    memory = second.stages[0].memory
    known = {i: len(entries) for i, entries in memory.by_prompt().items()}
    assert known == {i: len(entries) for i, entries in pool.items()} and known
    metrics = [second.iterate() for _ in range(3)]
    assert sum(m["response_reuse/groups"] for m in metrics) > 0
    assert set(memory.by_prompt()) == set(known), "the pool never ages"
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
            same(one, two, case)


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
