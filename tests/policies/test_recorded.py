"""What is recorded of the distribution of every decision while sampling is what scoring finds
there."""

import math

import pytest
import torch

from mmrl.policies.diffusion.trees import Tree
from mmrl.policies.masked.policy import MaskedDiffusion
from mmrl.train.minibatches import passes
from samplers.noise import Rng
from tests.core.test_contract import made
from tests.fixtures import toys
from tests.policies.test_contract_policies import roll

TOYS = {
    "flow": ("flow", {"logprob_reduction": "sum"}),
    "tree": ("flow", {"tree": Tree(splits=[0, 2]), "steps": 4}),
    "diffusion": ("diffusion", {}),
    "causal": ("causal", {}),
    "masked": ("masked", {}),
    "emerge": ("hidden", {"steps": 3}),
    "maskgit": ("hidden", {"steps": 3, "sampler": "maskgit", "temperature": 0.7}),
    "guided": ("hidden", {"steps": 3, "guidance_scale": 3.0, "temperature": 1.3}),
}
MODELS = {
    "masked_lm": {"guidance_scale": 2.0},
    "llamagen": {"top_p": 0.9},
    "var": {"branch_at": 1},
    "vlm": {"temperature": 0.7, "top_k": 9},
}


class ToyHidden(toys.ToyTokens, MaskedDiffusion):
    """Masked diffusion as the library samples it, with an unconditional branch."""

    visible = torch.ones(6, 6)

    def __init__(self, **options):
        super().__init__(toys.seeded(toys.Bag), length=6, mask_id=5, **options)

    def encode(self, prompts):
        cond = super().encode(prompts)
        return cond | {"uncond": {"label": -torch.ones_like(cond["label"][:1])}}


def sampled(name, **options):
    if name in MODELS:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            policy = made("policies", name, extra={**MODELS[name], **options})
        return policy, roll(policy)
    family, extra = TOYS[name]
    policy = (ToyHidden if family == "hidden" else toys.POLICIES[family])(**extra, **options)
    policy.net.double()
    with torch.no_grad():
        return policy, policy.rollout(toys.prompts(3), 4, Rng.of("recorded"))


@pytest.mark.parametrize("name", [*TOYS, *MODELS])
def test_the_entropy_recorded_is_that_of_the_distribution_drawn_from(name):
    policy, rollout = sampled(name, record_entropy=True)
    assert rollout.entropies().shape == rollout.mask.shape
    scored = torch.zeros(len(rollout), dtype=torch.float64)
    with torch.no_grad():
        for point in passes(policy.path(rollout), None):
            entropy = torch.where(point.mask, policy.dist(point).entropy(), 0.0)
            scored.index_add_(0, point.row_id, entropy.double().sum(1))
    recorded = torch.where(rollout.mask, rollout.entropies(), 0.0).double().sum(1)
    tolerance = 1e-9 if name in TOYS else 1e-4
    torch.testing.assert_close(scored, recorded, atol=tolerance, rtol=0)


def test_guidance_left_out_of_the_score_is_not_left_out_of_the_entropy():
    """What is drawn from is guided; the score is not."""
    with pytest.warns(UserWarning, match="guidance"):
        _, apart = sampled("guided", logprob_guidance="conditional", record_entropy=True)
    _, whole = sampled("guided", record_entropy=True)
    assert not torch.equal(apart.logprob, whole.logprob)
    assert torch.equal(apart.entropies(), whole.entropies())


@pytest.mark.parametrize("name", ["causal", "emerge", "guided"])
def test_self_certainty_is_recorded_of_every_token(name):
    policy, rollout = sampled(name, record_self_certainty=True)
    total = torch.zeros(len(rollout), dtype=torch.float64)
    with torch.no_grad():
        for point in policy.path(rollout):
            logits = policy.dist(point).logits * getattr(policy, "temperature", 1.0)
            logits = logits[point.mask] if logits.ndim == 3 else logits  # [N, V]
            rows = point.row_id[point.mask.nonzero()[:, 0]].tolist()
            for row, values in zip(rows, logits.tolist(), strict=True):
                possible = [v for v in values if v > -math.inf]
                top = math.log(sum(map(math.exp, possible)))
                uniform = 1 / len(possible)
                total[row] += sum(uniform * (math.log(uniform) - (v - top)) for v in possible)
    recorded = torch.where(rollout.mask, rollout.tokens.self_certainty, 0.0).double().sum(1)
    torch.testing.assert_close(recorded, total, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["vlm", "llamagen"])
def test_the_divergence_recorded_is_that_of_the_groups_distributions(name):
    """Also where the rows of a group are scored in several passes."""
    policy, rollout = sampled(name, record_divergence=True, top_k=None, top_p=1.0)
    (point,) = policy.path(rollout)
    with torch.no_grad():
        dist = policy.dist(point)
        full = dist._head("full", policy.warp).double().exp()
        parts = policy.with_divergence(rollout, 1).divergence
    table = full.new_full((*rollout.mask.shape, full.shape[-1]), 1 / full.shape[-1])
    table[rollout.mask] = full
    for g in range(len(rollout.prompts)):
        rows = rollout.group == g
        mean = table[rows].mean(0).clamp_min(1e-300)  # 0 of tokens that are suppressed
        wanted = torch.special.xlogy(table[rows], table[rows] / mean).sum(-1).mean(0)
        for row in rollout.divergence[rows]:
            torch.testing.assert_close(row.double(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(parts, rollout.divergence, atol=1e-5, rtol=0)
