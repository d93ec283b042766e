"""Routing replay: tokens go to the experts they went to while sampling."""

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.policies.vlm.routing import FREE, weights
from mmrl.train.minibatches import passes
from mmrl.zoo.stages.answer_memory import Remembered, packed, unpacked
from tests.policies.vlm.test_vlm_policy import logprobs, policy_of, prompts, quiet, rolled

assert quiet  # a fixture of that file


def experts(**options):
    return policy_of("qwen3_vl_moe", **{"prefix_sharing": "prefix", **options})


@pytest.fixture(scope="module")
def policy():
    return experts(replay_routing=True)


@pytest.fixture(scope="module")
def rollout(policy):
    return rolled(policy, copies=3)


def test_recording_changes_nothing_that_is_sampled(policy, rollout):
    plain = rolled(experts(), copies=3)
    assert torch.equal(plain.sample, rollout.sample) and plain.tokens.routes is None
    torch.testing.assert_close(plain.logprob, rollout.logprob, atol=1e-6, rtol=0)


def test_every_token_that_was_read_has_its_experts(policy, rollout):
    routes = rollout.tokens.routes
    assert routes.shape == (9, 8, policy.net.routing.width) and routes.dtype == torch.int16
    read = rollout.mask & (torch.arange(8) < rollout.mask.sum(1)[:, None] - 1)
    assert (routes[read] != FREE).all() and routes.max() < 6
    for cond in rollout.cond:
        assert cond["routes"].shape == (cond["input_ids"].shape[1], policy.net.routing.width)
        assert (cond["routes"] != FREE).all()


def test_the_first_ratio_is_one(policy, rollout):
    gap = (logprobs(policy, rollout) - rollout.logprob)[rollout.mask].abs().max()
    assert gap < 1e-5
    with torch.no_grad():
        for part in passes(policy.path(rollout), 2):  # other neighbours, other padding
            logp = policy.dist(part).log_prob(part.target)
            assert (logp - part.recorded)[part.mask].abs().max() < 1e-5


def flipped(policy, rollout, scale):
    """The tokens whose experts a small change of the routers changes, and how far log-probs move,
    with and without replay."""
    gaps = []
    changed = 0
    routers = policy.net.routing.routers
    before = [router.weight.detach().clone() for router in routers]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for router in routers:
            noise = torch.randn(router.weight.shape, generator=generator)
            router.weight += scale * noise * router.weight.std()
        for routes in (rollout.tokens.routes, None):
            cond = rollout.cond
            if routes is None:
                cond = [{k: v for k, v in c.items() if k != "routes"} for c in cond]
            order = rollout.tokens.replace(routes=routes)
            given = rollout.replace(trajectory=order, cond=cond)
            gap = (logprobs(policy, given) - rollout.logprob)[rollout.mask].abs()
            gaps.append(float(gap.max()))
            taken = policy.net.routing.last().view(9, -1, policy.net.routing.width)
            both = rollout.tokens.routes[:, : taken.shape[1]]
            changed = int(((taken != both) & (both != FREE)).any(-1).sum())
        for router, weight in zip(routers, before, strict=True):
            router.weight.copy_(weight)
    return changed, gaps


def test_log_probs_do_not_jump_where_the_routers_would_choose_others(policy, rollout):
    changed, (replayed, free) = flipped(policy, rollout, 0.02)
    assert changed > 0  # without replay tokens go elsewhere
    assert replayed < 0.3 * free


def test_gradients_reach_the_routers_and_the_chosen_experts(policy, rollout):
    policy.net.zero_grad()
    logprobs(policy, rollout)[rollout.mask].sum().backward()
    for router in policy.net.routing.routers:
        assert router.weight.grad is not None and router.weight.grad.abs().sum() > 0
    policy.net.zero_grad()


def test_weights_are_those_of_the_router_at_its_own_choice(policy):
    router = policy.net.routing.routers[0]
    hidden = torch.randn(5, router.hidden_dim, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits, scores, own = router(hidden)
        for token in range(5):
            p = logits[token].softmax(-1)[own[token]]
            torch.testing.assert_close(scores[token], p / p.sum(), atol=1e-6, rtol=0)
        other = (own + 1) % router.num_experts
        with policy.net.routing.replaying(other.repeat(1, policy.net.routing.width // 2)):
            _, moved, chosen = router(hidden)
        assert torch.equal(chosen, other)
        torch.testing.assert_close(moved, weights(router, logits, other), atol=1e-6, rtol=0)


def test_answers_that_are_remembered_keep_their_routes(policy, rollout):
    rows = rollout[:3].replace(cond=None)
    entry = Remembered(0, 3, rows, Rewards({"r": torch.ones(3)}))
    (again,) = unpacked(*packed([entry]))
    assert torch.equal(again.rollout.tokens.routes, rows.tokens.routes)
    cond, _ = policy.recall(prompts()[:1])  # its prompt is re-encoded, by the routers' choice
    replayed = again.rollout.replace(cond=cond, group=torch.zeros_like(rows.group))
    assert (logprobs(policy, replayed) - rows.logprob)[rows.mask].abs().max() < 1e-5


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("qwen2_5_vl", {}, "has no experts"),
        ("qwen3_vl_moe", {"prefix_sharing": "none"}, "needs engine own"),
        ("qwen3_vl_moe", {"engine": "hf"}, "needs engine own"),
    ],
)
def test_what_cannot_be_replayed_is_refused(family, options, why):
    with pytest.raises(UserError, match=f"replay_routing.*{why}"):
        policy_of(family, replay_routing=True, **options)


def test_layers_that_are_computed_again_are_refused(policy):
    with pytest.raises(UserError, match="gradient_checkpointing and policy option replay_routing"):
        policy.enable_gradient_checkpointing()
