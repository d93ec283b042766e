"""Routing replay: tokens go to the experts they went to while sampling."""

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.policies.vlm.routing import FREE, weights
from mmrl.train.minibatches import passes
from mmrl.zoo.stages.answer_memory import Remembered, packed, unpacked
from tests.policies.vlm.test_vlm_policy import logprobs, policy_of, prompts, rolled


def experts(**options):
    return policy_of("qwen3_vl_moe", **{"prefix_sharing": "prefix", **options})


@pytest.fixture(scope="module")
def policy():
    return experts(replay_routing=True)


@pytest.fixture(scope="module")
def rollout(policy):
    return rolled(policy, copies=3)


def test_every_token_that_was_read_has_its_experts(policy, rollout):
    plain = rolled(experts(), copies=3)  # recording changes nothing that is sampled
    assert torch.equal(plain.sample, rollout.sample) and plain.tokens.routes is None
    routes = rollout.tokens.routes
    assert routes.shape == (9, 8, policy.net.routing.width) and routes.dtype == torch.int16
    read = rollout.mask & (torch.arange(8) < rollout.mask.sum(1)[:, None] - 1)
    assert (routes[read] != FREE).all() and routes.max() < 6
    for cond in rollout.cond:
        assert cond["routes"].shape == (cond["input_ids"].shape[1], policy.net.routing.width)
        assert (cond["routes"] != FREE).all()


def test_the_first_ratio_is_one(policy, rollout):
    with torch.no_grad():
        for part in passes(policy.path(rollout), 2):  # other neighbours, other padding
            logp = policy.dist(part).log_prob(part.target)
            assert (logp - part.recorded)[part.mask].abs().max() < 1e-5


def test_log_probs_do_not_jump_where_the_routers_would_choose_others(rollout):
    policy = experts(replay_routing=True)
    policy.checked = True  # with other routers
    routing = policy.net.routing
    generator = torch.Generator().manual_seed(0)
    free = rollout.replace(
        cond=[{k: v for k, v in cond.items() if k != "routes"} for cond in rollout.cond],
        trajectory=rollout.tokens.replace(routes=None),
    )
    with torch.no_grad():
        for router in routing.routers:
            noise = torch.randn(router.weight.shape, generator=generator)
            router.weight += 0.02 * noise * router.weight.std()
        gaps = [
            (logprobs(policy, given) - given.logprob)[given.mask].abs() for given in (rollout, free)
        ]
    taken = routing.last().view(9, -1, routing.width)
    recorded = rollout.tokens.routes[:, : taken.shape[1]]
    assert ((taken != recorded) & (recorded != FREE)).any()  # without replay tokens go elsewhere
    assert gaps[0].max() < 0.3 * gaps[1].max()


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


def test_what_cannot_be_replayed_is_refused(policy):
    for family, options, why in (
        ("qwen2_5_vl", {}, "has no experts"),
        ("qwen3_vl_moe", {"prefix_sharing": "none"}, "needs engine own"),
        ("qwen3_vl_moe", {"engine": "hf"}, "needs engine own"),
    ):
        with pytest.raises(UserError, match=f"replay_routing.*{why}"):
            policy_of(family, replay_routing=True, **options)
    with pytest.raises(UserError, match="gradient_checkpointing and policy option replay_routing"):
        policy.enable_gradient_checkpointing()
