"""Images that begin with drafts: read in one pass, and drawn on from the first rejected token."""

import pytest
import torch

from mmrl.policies.base import NO_CONTEXT, Drafts
from mmrl.policies.image_tokens.network import spans
from samplers.noise import Rng
from samplers.warp import Anneal
from tests.fixtures import toys
from tests.fixtures.image_tokens import policy_of

RECORDS = {"record_entropy": True, "record_self_certainty": True}
GUIDED = {"guidance_scale": 2.0}
CONDITIONAL = {"guidance_scale": 2.0, "logprob_guidance": "conditional"}
COPIES = 5


KINDS = {
    "llamagen": GUIDED,
    "llamagen-classes": CONDITIONAL | {"anneal": Anneal(1.3, 0.5, 2.0)},
    "var": GUIDED,
    "janus-images": GUIDED,
    "emu3": GUIDED,
    "glm_image": {},
}


def slow(policy, rollout, rng, forced):
    """Token by token, what is known too."""
    hidden, state = policy.read(rollout.cond, rollout.group)
    uniform = rng.uniform(rollout.row_id, (sum(policy.net.turns),))
    scale = policy.scales(policy.guidance_scale)
    columns = []
    for block in spans(policy.net.turns):
        if columns:
            hidden = policy.net("step", columns[-1][0], state)
        known = forced[:, block]
        columns.append(policy.draw_block(hidden, scale[block], uniform[:, block], block, known))
    return [torch.cat(parts, 1) for parts in zip(*columns, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_read_in_one_pass_and_drawn_on_from_what_is_kept(kind):
    """Rows keep 0, 1, 2 ... tokens; tokens, log-probs and quantities are those of writing all of
    them again; no kept block makes a separate pass."""
    size = None if kind == "llamagen" else 4
    policy = policy_of(kind, double=False, vocab=16, **KINDS[kind], **RECORDS)
    policy.pass_sizes.rows = size
    prompts = [prompt | {"label": n} for n, prompt in enumerate(toys.prompts(2))]
    with torch.no_grad():
        old = policy.rollout(prompts, COPIES, Rng.of("old"))
    length = old.sample.shape[1]
    count = torch.arange(2 * COPIES) % (length + 1)
    wanted = torch.arange(length) < count[:, None]
    drafts = Drafts(
        ids=old.sample,
        mask=old.mask,
        logprob=torch.where(wanted, -1e3, 1e3),  # certain to be kept, or not
        lenience=torch.ones(2 * COPIES),
    )
    calls = []
    forward = policy.net.forward

    def counted(work, *inputs):
        calls.append((work, len(inputs[0]) if work == "step" else 0))
        return forward(work, *inputs)

    policy.net.forward = counted
    context = NO_CONTEXT.__class__(drafts=lambda *_: drafts)
    with torch.no_grad():
        fast = policy.rollout(prompts, COPIES, Rng.of("new"), context)
    policy.net.forward = forward
    kept = drafts.accepted[0][:, 0]
    decided = old.mask.all()
    assert torch.equal(kept, count) or not decided
    assert torch.equal(fast.sample[wanted], old.sample[wanted]) or not decided
    rows = 1 + (policy.guidance_scale != 1)
    blocks = len(policy.net.turns)
    parts = -(-2 * COPIES // (size or 2 * COPIES))
    steps = [number for work, number in calls if work == "step"]
    assert [work for work, _ in calls].count("extend") == parts
    assert len(steps) <= parts * (blocks - 1)
    ends = torch.tensor([block.stop for block in spans(policy.net.turns)])
    behind = (blocks - 1 - (kept[:, None] >= ends).sum(1)).clamp(min=0)
    assert sum(steps) == rows * int(behind.sum()), "every row from its own first block"
    forced = torch.where(torch.arange(length) < kept[:, None], old.sample, -1)
    with torch.no_grad():
        ids, logprob, values = slow(policy, fast, Rng.of("new"), forced)
    assert torch.equal(ids, fast.sample)
    torch.testing.assert_close(logprob, fast.logprob, atol=2e-5, rtol=0)
    torch.testing.assert_close(values[..., 0], fast.entropy, atol=2e-4, rtol=0)
    torch.testing.assert_close(values[..., 1], fast.tokens.self_certainty, atol=2e-4, rtol=0)
    (point,) = policy.path(fast)
    with torch.no_grad():
        logp = policy.dist(point).log_prob(point.target)
    torch.testing.assert_close(logp[fast.mask], fast.logprob[fast.mask], atol=1e-4, rtol=0)
