"""More answers than a pass has rows: refilled rows write what each answer would be alone."""

from dataclasses import replace

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.vlm.refill import Queue, Slots, generate_refilled
from samplers.noise import Rng
from tests.policies.vlm.test_vlm_policy import logprobs, policy_of, prompts, quiet, rolled

assert quiet  # a fixture of that file
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
    return policy, rolled(ending(policy, strings=strings), copies=copies, rng=Rng.of("refill"))


@pytest.fixture(scope="module")
def plain():
    return sampled(record_entropy=True)


@pytest.mark.parametrize("width", [1, 4, 7, 40])
@pytest.mark.parametrize("refill", ["rows", "longest", "shortest"])
def test_every_answer_is_what_it_is_alone(plain, refill, width):
    _, wanted = plain
    policy, rollout = sampled(refill, width, record_entropy=True)
    assert torch.equal(rollout.sample, wanted.sample) and torch.equal(rollout.mask, wanted.mask)
    torch.testing.assert_close(rollout.logprob, wanted.logprob, atol=1e-5, rtol=0)
    torch.testing.assert_close(rollout.entropy, wanted.entropy, atol=1e-4, rtol=0)
    assert torch.equal(rollout.row_id, wanted.row_id) and torch.equal(rollout.group, wanted.group)
    assert max(policy.sizes) <= width
    gap = (logprobs(policy, rollout) - rollout.logprob)[rollout.mask].abs().max()
    assert gap < 1e-5


def test_refilled_rows_need_fewer_passes(plain):
    fixed, wanted = sampled(width=6)
    policy, _ = sampled("rows", 6)
    assert len(policy.sizes) < len(fixed.sizes)
    tokens = int(wanted.mask.sum())
    assert tokens / sum(policy.sizes) > tokens / (6 * len(fixed.sizes))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl_moe"])
def test_other_families_too(family):
    options = {"family": family, "copies": 3, "prefix_sharing": "prefix"}
    if family == "qwen3_vl_moe":
        options["replay_routing"] = True
    _, wanted = sampled(**options)
    _, rollout = sampled("longest", 4, **options)
    assert torch.equal(rollout.sample, wanted.sample) and torch.equal(rollout.mask, wanted.mask)
    if family == "qwen3_vl_moe":
        read = rollout.mask & (torch.arange(20) < rollout.mask.sum(1)[:, None] - 1)
        assert torch.equal(rollout.tokens.routes[read], wanted.tokens.routes[read])


def test_strings_end_answers_and_annealed_temperatures_know_their_places():
    from samplers.warp import Anneal

    options = {"anneal": Anneal(highest=1.5, lowest=0.3, decay=8.0), "strings": ("e", "th")}
    _, wanted = sampled(**options)
    _, rollout = sampled("longest", 4, **options)
    assert torch.equal(rollout.sample, wanted.sample) and torch.equal(rollout.mask, wanted.mask)
    assert len(set(rollout.mask.sum(1).tolist())) > 3


@pytest.mark.parametrize("waits", [0, 25])
def test_a_process_that_is_done_makes_the_passes_of_the_others(plain, waits):
    """All processes make equally many; what a finished one computes is thrown away."""
    _, wanted = plain
    policy = ending(policy_of(refill="rows"))
    cond, _ = policy.recall(prompts())
    group = torch.arange(3).repeat_interleave(6)
    inputs, rows = policy._collated(cond, group, each=False)
    further = [waits]

    def busy(working):
        further[0] -= not working
        return working or further[0] >= 0

    answers = generate_refilled(
        policy.net,
        policy.net("read", inputs),
        rows,
        torch.arange(18),
        Rng.of("refill"),
        policy.warp,
        policy.ending,
        Slots(4, "longest", busy),
    )
    assert torch.equal(answers.ids, wanted.sample) and torch.equal(answers.mask, wanted.mask)
    assert further[0] == -1


def test_which_row_is_next():
    rows = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    queue = Queue(rows, "longest")
    assert queue.take(4) == [0, 3, 6, 1]  # a first answer to every prompt
    queue.ended([0, 3], [5, 9])
    assert queue.take(3) == [7, 8, 4]  # prompt 2 is unknown; then the longest
    queue.ended([6], [20])
    assert queue.take(9) == [5, 2] and queue.take(1) == []
    queue = Queue(rows, "shortest")
    queue.take(3)
    queue.ended([0, 3, 6], [5, 9, 2])
    assert queue.take(3) == [7, 8, 1]
    assert Queue(rows, "rows").take(3) == [0, 1, 2]


@pytest.mark.parametrize("options", [{"engine": "hf"}, {"prefix_sharing": "none"}])
def test_what_cannot_be_refilled_is_refused(options):
    with pytest.raises(UserError, match="refill needs engine own"):
        policy_of(refill="rows", **options)
