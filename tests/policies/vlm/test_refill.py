"""More answers than a pass has rows: refilled rows write what each answer would be alone."""

import json
import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.vlm import cascade, generate, prefix_sharing
from mmrl.policies.vlm.generate import Task
from mmrl.policies.vlm.refill import EPS, Lengths, Queue, Slots, planned
from samplers.noise import Rng
from samplers.warp import Anneal
from tests.policies.vlm.test_vlm_policy import logprobs, policy_of, prompts, rolled

STOPS = tuple(range(0, 300, 9))


def ending(policy, **changes):
    policy.ending = replace(policy.ending, tokens=20, stops=STOPS, **changes)
    return policy


def sampled(refill="none", width=None, copies=6, family="qwen2_5_vl", strings=(), **options):
    policy = policy_of(family, refill=refill, fixed_batch_rows=width, **options)
    policy.sizes = []
    step = policy.net.step

    def counted(ids, *inputs):
        policy.sizes.append(len(ids))
        return step(ids, *inputs)

    policy.net.step = counted
    policy.checked = True  # the comparison with the class would be counted too
    return policy, rolled(ending(policy, strings=strings), copies=copies, rng=Rng.of("refill"))


def assert_same(one, other):
    assert torch.equal(one.sample, other.sample) and torch.equal(one.mask, other.mask)
    torch.testing.assert_close(one.logprob, other.logprob, atol=1e-5, rtol=0)
    torch.testing.assert_close(one.entropy, other.entropy, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def plain():
    return sampled(record_entropy=True)


@pytest.mark.parametrize(
    ("refill", "width"), [("none", 4), ("rows", 4), ("longest", 7), ("shortest", 1), ("plan", 4)]
)
def test_every_answer_is_what_it_is_alone(plain, refill, width):
    _, wanted = plain
    policy, rollout = sampled(refill, width, record_entropy=True)
    assert_same(rollout, wanted)
    assert torch.equal(rollout.row_id, wanted.row_id) and torch.equal(rollout.group, wanted.group)
    assert max(policy.sizes) <= width
    gap = (logprobs(policy, rollout) - rollout.logprob)[rollout.mask].abs().max()
    assert gap < 1e-5


def test_refilled_rows_need_fewer_passes():
    fixed, _ = sampled(width=6)
    policy, _ = sampled("rows", 6)
    assert len(policy.sizes) < len(fixed.sizes)


def test_experts_are_recorded_of_refilled_rows():
    options = {"family": "qwen3_vl_moe", "copies": 3, "prefix_sharing": "prefix"}
    _, wanted = sampled(**options, replay_routing=True)
    _, rollout = sampled("longest", 4, **options, replay_routing=True)
    assert torch.equal(rollout.sample, wanted.sample) and torch.equal(rollout.mask, wanted.mask)
    read = rollout.mask & (torch.arange(20) < rollout.mask.sum(1)[:, None] - 1)
    assert torch.equal(rollout.tokens.routes[read], wanted.tokens.routes[read])


def test_strings_end_answers_and_annealed_temperatures_know_their_places():
    options = {"anneal": Anneal(highest=1.5, lowest=0.3, decay=8.0), "strings": ("e", "th")}
    _, wanted = sampled(**options)
    _, rollout = sampled("longest", 4, **options)
    assert torch.equal(rollout.sample, wanted.sample) and torch.equal(rollout.mask, wanted.mask)
    assert len(set(rollout.mask.sum(1).tolist())) > 3


def test_a_process_that_is_done_makes_the_passes_of_the_others(plain):
    """All processes make equally many; what a finished one computes is thrown away."""
    _, wanted = plain
    policy = ending(policy_of(refill="rows"))
    cond, _ = policy.recall(prompts())
    group = torch.arange(3).repeat_interleave(6)
    inputs, rows = policy.collated(cond, group, each=False)
    further = [25]

    def busy(working):
        further[0] -= not working
        return working or further[0] >= 0

    read, order = policy.net("read", inputs), torch.arange(18)
    task = Task(policy.net, read, rows, order, Rng.of("refill"), policy.warp, policy.ending, busy)
    answers = generate.generate(task, Slots(4, "longest"))
    assert torch.equal(answers.ids, wanted.sample) and torch.equal(answers.mask, wanted.mask)
    assert further[0] == -1


def test_which_row_is_next():
    rows = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    queue = Queue(rows, Slots(4, "longest"))
    assert queue.take(4) == [0, 3, 6, 1]  # a first answer to every prompt
    queue.ended([0, 3], [5, 9])
    assert queue.take(3) == [7, 8, 4]  # prompt 2 is unknown; then the longest
    queue.ended([6], [20])
    assert queue.take(9) == [5, 2] and queue.take(1) == []
    queue = Queue(rows, Slots(4, "shortest"))
    queue.take(3)
    queue.ended([0, 3, 6], [5, 9, 2])
    assert queue.take(3) == [7, 8, 1]
    assert Queue(rows, Slots(4, "rows")).take(3) == [0, 1, 2]


def shortest(lengths, loads):
    """The end of the last slot under the best of all plans."""
    ends = []
    for slots in product(range(len(loads)), repeat=len(lengths)):
        sums = list(loads)
        for length, slot in zip(lengths, slots, strict=True):
            sums[slot] += length
        ends.append(max(sums))
    return min(ends)


@pytest.mark.parametrize(("slots", "eps"), [(2, 0.02), (3, 0.1), (4, 0.5)])
def test_a_plan_is_as_short_as_promised(slots, eps):
    """Against all plans there are; jobs of every kind, beside slots that are at work."""
    rng = random.Random(slots)
    improved = 0
    for trial in range(15):
        count = rng.randrange(1, 9 if slots < 4 else 7)
        kinds = [3.0, 3.0, 2.0, 2.0, 2.0] if trial % 2 else [rng.uniform(1, 50) for _ in range(9)]
        lengths = [rng.choice(kinds) for _ in range(count)]
        loads = [rng.choice([0.0, 0.0, 7.5]) for _ in range(slots)]
        ends = []
        for exact in (True, False):
            plan = planned(lengths, loads, eps, exact)
            assert sorted(job for jobs in plan for job in jobs) == list(range(count))
            assert all(lengths[a] <= lengths[b] for jobs in plan for a, b in zip(jobs, jobs[1:]))
            sums = [sum(lengths[job] for job in jobs) for jobs in plan]
            ends.append(max(load + own for load, own in zip(loads, sums, strict=True)))
        assert ends[0] <= (1 + eps) * shortest(lengths, loads) + 1e-9
        improved += ends[0] < ends[1] - 1e-9
    assert improved or slots == 4
    lengths = [float(1 + n % 7) for n in range(120)]  # a large plan is made in turn
    ends = [sum(lengths[job] for job in jobs) for jobs in planned(lengths, [0.0] * 16)]
    assert max(ends) <= (1 + EPS) * sum(lengths) / 16 and planned([], [0.0, 0.0]) == [[], []]


def test_lengths_are_predicted_from_what_ended():
    """A direction of the hidden state says how long an answer is; the tokens so far count."""
    lengths = Lengths()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, 32, generator=generator)
    left = torch.where(hidden[:, 0] > 0, 40, 5)
    step = torch.arange(200) % 3
    assert lengths.predict(lengths.features(hidden, step)) == [1.0] * 200
    for _ in range(3):
        lengths.observe(lengths.features(hidden, step), left)
        lengths.learn("cpu")
    predicted = torch.tensor(lengths.predict(lengths.features(hidden, step)))
    assert predicted[left == 40].mean() > 1.5 * predicted[left == 5].mean()


def test_a_plan_by_lengths_begins_with_what_takes_longest():
    queue = Queue([0, 0, 1, 1, 2, 2], Slots(2, "plan"))
    queue.predicted = [9.0, 9.0, 2.0, 2.0, 4.0, 4.0]
    # 9 + 4 + 2 on each of two places, the shortest first
    assert sorted(queue.take(2)) == [2, 3]
    assert len(queue.take(6)) == 4 and queue.take(1) == []


def test_what_was_learnt_is_in_checkpoints_and_changes_no_answer():
    policy, first = sampled("plan", 5, copies=5)
    assert policy.lengths.products.any()
    again = rolled(policy, copies=5, rng=Rng.of("refill"))
    assert torch.equal(again.sample, first.sample) and torch.equal(again.mask, first.mask)
    resumed = policy_of(refill="plan")
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert torch.equal(resumed.lengths.products, policy.lengths.products)
    assert policy_of().state_dict() == {}


def test_what_cannot_be_refilled_is_refused():
    for options in ({"engine": "hf"}, {"prefix_sharing": "none"}):
        with pytest.raises(UserError, match="refill needs engine own"):
            policy_of(refill="rows", **options)


def test_answers_of_a_group_attend_to_their_prompt_together(monkeypatch):
    """But not where it would not help or would round."""
    calls = []
    attend = cascade.Cascade.attend
    counting = lambda self, *given: calls.append(1) or attend(self, *given)  # noqa: E731
    monkeypatch.setattr(cascade.Cascade, "attend", counting)
    sampled(copies=1), sampled(dtype="bfloat16")
    assert not calls
    _, together = sampled("longest", 4, record_entropy=True)
    assert calls
    monkeypatch.setattr(prefix_sharing, "fits", lambda *_: False)
    calls.clear()
    assert_same(sampled("longest", 4, record_entropy=True)[1], together)
    assert not calls


def test_looking_seldom_at_the_device_changes_no_answer(plain, monkeypatch):
    looks = []
    going = generate.Ending.going
    watched = lambda self, ids, alive, n: looks.append(n) or going(self, ids, alive, n)  # noqa: E731
    monkeypatch.setattr(generate.Ending, "going", watched)
    monkeypatch.setattr(generate, "interval", lambda device: generate.LOOK)
    assert_same(sampled(record_entropy=True)[1], plain[1])
    assert sum(looks) <= len(looks) / generate.LOOK + 1
