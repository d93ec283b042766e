"""Speculative rollouts: what is kept, exact in distribution by enumeration, resumed."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from mmrl import config
from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.core.types import Rewards
from mmrl.policies.base import NO_CONTEXT, Drafts
from mmrl.policies.draft_verification import all_logprobs
from mmrl.policies.vlm.generate import Task, generate
from mmrl.rollout.stages import Drawn
from mmrl.zoo.models.image_tokens.llamagen import LlamaGen
from mmrl.zoo.models.image_tokens.var import VAR
from mmrl.zoo.stages.speculative import SpeculativeRollouts
from samplers.noise import Rng
from samplers.warp import Anneal
from tests.experiment.test_resume import resumes
from tests.fixtures import image_tokens, toys
from tests.fixtures.stages import assert_recorded, met
from tests.policies.vlm.test_vlm_policy import policy_of, quiet  # noqa: F401
from tests.rollout.test_past import moved
from tests.rollout.test_written_answers import asked
from tests.train.test_trainer import make_trainer

ROWS = 20_000
LENGTH = 2


class Short(toys.ToyCausal):
    """Two tokens of five, so that all answers can be listed."""

    def __init__(self):
        super().__init__()
        self.length = LENGTH

    def logits(self, ids, cond):
        padded = torch.nn.functional.pad(ids, (0, 6 - LENGTH), value=self.mask_id)
        return 2 * super().logits(padded, cond)[:, :LENGTH]


def drafts_of(policy, rollout, full, lenience=1.0):
    table = all_logprobs(policy, rollout, len(rollout)) if full else None
    return Drafts(
        ids=rollout.sample,
        mask=rollout.mask,
        logprob=rollout.logprob,
        full=table,
        lenience=torch.full((len(rollout),), lenience),
    )


def answer(policy, prompts, copies, rng, drafts):
    with torch.no_grad():
        context = replace(NO_CONTEXT, drafts=lambda *_: drafts)
        return policy.rollout(prompts, copies, rng, context)


def probabilities(policy):
    """Of every answer to the first prompt."""
    every = torch.tensor(list(product(range(5), repeat=LENGTH)))
    rows = policy.rollout(toys.prompts(1), len(every), Rng.of(0))
    (point,) = policy.path(rows.replace(sample=every))
    return policy.dist(point).log_prob(every).sum(1).exp().detach()


@pytest.mark.parametrize("full", [True, False])
def test_answers_are_those_of_the_policy_by_enumeration(full):
    """With the residual of every token, p exactly; as published, after a rejection the token is one
    of p, which makes the first min(p, q) + (1 - sum min(p, q)) p."""
    policy = Short()
    prompts = toys.prompts(1)
    with torch.no_grad():
        old = policy.rollout(prompts, ROWS, Rng.of("old"))
        drafts = drafts_of(policy, old, full)
        q = probabilities(policy).view(5, 5).sum(1)
    moved(policy, 0.3)
    p = probabilities(policy)
    rows = answer(policy, prompts, ROWS, Rng.of("new"), drafts)
    counts = torch.bincount(rows.sample[:, 0] * 5 + rows.sample[:, 1], minlength=25) / ROWS
    first = p.view(5, 5).sum(1)
    kept = torch.minimum(first, q)
    assert (first - q).abs().sum() > 0.1, "the policy has moved"
    published = kept + (1 - kept.sum()) * first
    assert (published - first).abs().max() > 0.02
    if full:
        assert ((counts - p).abs() < 4 * (p * (1 - p) / ROWS).sqrt() + 1e-4).all()
    expected = first if full else published
    close = (counts.view(5, 5).sum(1) - expected).abs() < 4 * (expected / ROWS).sqrt()
    assert close.all()
    (lengths,) = drafts.accepted
    assert lengths[:, 1].eq(2).all() and 0.1 < (lengths[:, 0] == 2).float().mean() < 0.95
    assert_recorded(policy, rows)


def of_folder(kind, name):
    return kind(str(image_tokens.folder(name)), guidance_scale=2.0)


KINDS = {
    "causal": (toys.ToyCausal, toys.prompts),
    "llamagen": (partial(of_folder, LlamaGen, "llamagen-classes"), toys.prompts),
    "vlm": (partial(policy_of, max_new_tokens=6), asked),
    "var": (partial(of_folder, VAR, "var"), toys.prompts),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_of_the_same_weights_is_kept_whole_and_of_others_in_part(kind):
    make, prompts = KINDS[kind]
    policy, prompts = make(), prompts(2)
    with torch.no_grad():
        old = policy.rollout(prompts, 3, Rng.of("old"))
    drafts = drafts_of(policy, old, True)
    # rounding may reject a token whose ratio is 1 but for the last digits
    lenient = replace(drafts, lenience=drafts.lenience * 1.01)
    same = answer(policy, prompts, 3, Rng.of("new"), lenient)
    assert torch.equal(same.sample, old.sample) and torch.equal(same.mask, old.mask)
    inside = same.mask
    torch.testing.assert_close(same.logprob[inside], old.logprob[inside], atol=1e-4, rtol=0)
    assert set(same.row_tensors()) == set(old.row_tensors())
    moved(policy, 0.2 if kind == "causal" else 0.02)
    other = answer(policy, prompts, 3, Rng.of("new"), drafts)
    assert_recorded(policy, other, atol=1e-4)
    kept = drafts.accepted[-1]
    for row in range(len(old)):
        count = int(kept[row, 0])
        assert torch.equal(other.sample[row, :count], old.sample[row, :count])


@pytest.mark.parametrize(
    ("strings", "anneal"),
    [((), None), (("e", "th"), Anneal(highest=1.3, lowest=0.5, decay=8.0))],
)
def test_a_draft_is_read_in_one_pass_and_sampling_goes_on_from_it(strings, anneal):
    """Tokens, log-probs and entropies are those of writing the kept tokens again, one by one; the
    passes are one and those of the tokens after the first rejected one."""
    policy = policy_of(max_new_tokens=14, record_entropy=True, record_self_certainty=True)
    policy.anneal = anneal
    policy.ending = replace(
        policy.ending, stops=tuple(range(0, 300, 9)), strings=strings, tokens=14
    )
    prompts = asked(3)
    with torch.no_grad():
        old = policy.rollout(prompts, 5, Rng.of("old"))
    drafts = drafts_of(policy, old, True)
    moved(policy, 0.02)
    passes = []
    step = policy.net.step

    def counted(ids, *inputs):
        passes.append(tuple(ids.shape))
        return step(ids, *inputs)

    policy.net.step = counted
    fast = answer(policy, prompts, 5, Rng.of("new"), drafts)
    (kept,) = drafts.accepted
    lengths = fast.mask.sum(1)
    partly = (kept[:, 0] > 0) & (kept[:, 0] < kept[:, 1])
    assert partly.any() and (kept[:, 0] == kept[:, 1]).any()
    assert passes[0] == (15, int(kept[:, 1].max().clamp(max=13))), "all drafts at once"
    # a token at the end of an answer makes no pass; where strings may end it, one is drawn again
    behind = (lengths - kept[:, 0] - 1 + bool(strings)).max()
    assert {width for _, width in passes[1:]} <= {1} and len(passes) - 1 <= int(behind.clamp(min=0))
    cond, _ = policy.recall(prompts)
    inputs, rows = policy.collated(cond, fast.group, each=False)
    known = torch.arange(14) < kept[:, :1]
    forced = torch.where(known, drafts.ids, -1)
    rejected = (kept[:, 0] < kept[:, 1]).nonzero()[:, 0]
    # the token that replaces a rejected one
    forced[rejected, kept[rejected, 0]] = fast.sample[rejected, kept[rejected, 0]]
    inside = drafts.mask & (old.mask.sum(1, keepdim=True) > 0)
    recorded = drafts.full.gather(-1, drafts.ids[..., None])[..., 0]
    torch.testing.assert_close(recorded[inside], old.logprob[inside], atol=1e-4, rtol=0)
    task = Task(
        policy.net,
        policy.net("read", inputs),
        rows,
        fast.row_id,
        Rng.of("new"),
        policy.warp,
        replace(policy.ending, forced=forced),
    )
    slow = generate(task)
    assert torch.equal(slow.ids, fast.sample) and torch.equal(slow.mask, fast.mask)
    torch.testing.assert_close(slow.logprob, fast.logprob, atol=2e-5, rtol=0)
    torch.testing.assert_close(slow.values[..., 0], fast.entropy, atol=2e-4, rtol=0)
    certainty = fast.tokens.self_certainty
    torch.testing.assert_close(slow.values[..., 1], certainty, atol=2e-4, rtol=0)
    assert_recorded(policy, fast, atol=1e-4)


def test_what_is_kept_is_the_published_rule_by_loop():
    """min(1, lenience p / q) of one uniform number a token, up to the first rejection."""
    policy = toys.ToyCausal()
    prompts = toys.prompts(2)
    with torch.no_grad():
        old = policy.rollout(prompts, 4, Rng.of("old"))
    drafts = drafts_of(policy, old, False, lenience=1.5)
    moved(policy, 0.2)
    rng = Rng.of("new")
    answer(policy, prompts, 4, rng, drafts)
    (point,) = policy.path(old)
    p = policy.dist(point).log_prob(old.sample).exp().tolist()
    q = old.logprob.exp().tolist()
    u = rng.fold("verify").uniform(old.row_id, (6,)).tolist()
    for row in range(8):
        count = 0
        while count < 6 and u[row][count] <= min(1.0, 1.5 * p[row][count] / q[row][count]):
            count += 1
        assert drafts.accepted[0][row].tolist() == [count, 6]


def test_a_prompt_gets_its_own_last_answers_once():
    policy = toys.ToyCausal()
    prompts = toys.prompts(3)
    stage = met(SpeculativeRollouts(exact=False, age=2, size=2), policy, prompts)
    stage.begin(0)
    assert stage.drafts(prompts, 2) is None
    with torch.no_grad():
        rollout = policy.rollout(prompts, 2, Rng.of(1))
    stage.observe(prompts, Drawn(rollout, rollout.sample, Rewards({"r": torch.zeros(6)})))
    assert stage.drafts(prompts, 2) is None, "answers of this iteration"
    stage.begin(1)
    drafts = stage.drafts([prompts[2], prompts[0], dict(prompts[1]), prompts[2]], [3, 1, 1, 2])
    assert drafts.mask.any(1).tolist() == [True, True, False, False, False, False, False]
    assert torch.equal(drafts.ids[:2], rollout.sample[4:])
    stage.begin(3)
    assert stage.drafts(prompts, 2) is None and not stage.memory.entries


def test_a_run_keeps_most_of_its_answers_and_goes_on_from_a_checkpoint(tmp_path):
    sizes = {"prompts_per_iteration": 8, "group_size": 4, "lr": 1e-3}
    made = partial(make_trainer, "causal", stages=(SpeculativeRollouts(),), **sizes)
    one = made()
    metrics = [one.iterate() for _ in range(3)]
    assert metrics[0]["speculative/drafts"] == 0 and metrics[2]["speculative/drafts"] == 32
    assert metrics[2]["speculative/accepted"] > 0.5
    resumes(made, tmp_path)


def test_what_cannot_begin_with_a_draft_is_refused():
    with pytest.raises(UserError, match="train.stages.speculative: ToyMasked cannot begin"):
        make_trainer("masked", stages=(SpeculativeRollouts(),))
    load_built_in()
    chosen = ["policy.refill=longest", "train.stages=[speculative]"]
    with pytest.raises(UserError, match="speculative: answers that begin with an earlier"):
        config.check(config.load("configs/vlm/counting.yaml", chosen))
