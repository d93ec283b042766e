"""What is recorded of the distribution of every decision while sampling is what scoring finds
there."""

import math

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.policies.diffusion.trees import Tree
from mmrl.policies.masked.policy import MaskedDiffusion
from mmrl.rollout.collect import joined
from mmrl.train.minibatches import passes
from mmrl.zoo.stages.answer_memory import Remembered, packed, unpacked
from samplers.noise import Rng
from tests.core.test_contract import made
from tests.fixtures import toys
from tests.policies.test_contract_policies import roll

TOYS = {
    "flow": ("flow", {}),
    "sum": ("flow", {"logprob_reduction": "sum"}),
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
    "janus_unified": {"plan": {"max_new_tokens": 4, "images": 2, "turn": "new"}},
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


def toy(name, **options):
    family, extra = TOYS[name]
    if family != "hidden":
        return toys.make(family, double=True, **extra, **options)
    policy = ToyHidden(**extra, **options)
    policy.net.double()
    return policy


def sampled(name, **options):
    if name in TOYS:
        policy = toy(name, **options)
        with torch.no_grad():
            return policy, policy.rollout(toys.prompts(3), 4, Rng.of("recorded"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = made("policies", name, extra={**MODELS[name], **options})
    return policy, roll(policy)


def per_row(rollout, values):
    """Sums over the decisions in the mask, by row."""
    sums = {int(row): 0.0 for row in rollout.row_id}
    for row, total in values:
        sums[row] += total
    return sums


@pytest.mark.parametrize("name", [*TOYS, *MODELS])
def test_the_entropy_recorded_is_that_of_the_distribution_drawn_from(name):
    policy, rollout = sampled(name, record_entropy=True)
    assert rollout.entropies().shape == rollout.mask.shape
    scored = []
    with torch.no_grad():
        for point in passes(policy.path(rollout), None):
            entropy = torch.where(point.mask, policy.dist(point).entropy(), 0.0).sum(1)
            scored += zip(point.row_id.tolist(), entropy.tolist(), strict=True)
    recorded = torch.where(rollout.mask, rollout.entropies(), 0.0).sum(1)
    found = zip(rollout.row_id.tolist(), recorded.tolist(), strict=True)
    tolerance = 1e-9 if name in TOYS else 1e-4
    assert per_row(rollout, scored) == pytest.approx(per_row(rollout, found), abs=tolerance)


def test_guidance_left_out_of_the_score_is_not_left_out_of_the_entropy():
    """What is drawn from is guided; the score is not."""
    with pytest.warns(UserWarning, match="guidance"):
        _, apart = sampled("guided", logprob_guidance="conditional", record_entropy=True)
    _, whole = sampled("guided", record_entropy=True)
    assert not torch.equal(apart.logprob, whole.logprob)
    assert torch.equal(apart.entropies(), whole.entropies())


def test_the_entropy_of_a_step_is_that_of_its_noise():
    """In closed form: log std + log(2 pi e) / 2 a dimension."""
    policy, rollout = sampled("flow", record_entropy=True)
    for k, point in enumerate(policy.path(rollout)):
        std = policy.dist(point).std.flatten(1)[:, 0].tolist()
        for row, deviation in enumerate(std):
            wanted = math.log(deviation) + 0.5 * math.log(2 * math.pi * math.e)
            assert float(rollout.entropies()[row, k]) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("name", ["causal", "masked", "emerge", "maskgit", "guided"])
def test_self_certainty_is_recorded_of_every_token(name):
    policy, rollout = sampled(name, record_self_certainty=True)
    total = dict.fromkeys(rollout.row_id.tolist(), 0.0)
    with torch.no_grad():
        for point in policy.path(rollout):
            dist = policy.dist(point)
            logits = dist.logits * getattr(policy, "temperature", 1.0)
            logits = logits[point.mask] if logits.ndim == 3 else logits  # [N, V]
            places = point.mask.nonzero().tolist()
            for (b, _), values in zip(places, logits.tolist(), strict=True):
                possible = [v for v in values if v > -math.inf]
                top = math.log(sum(map(math.exp, possible)))
                uniform = 1 / len(possible)
                certain = sum(uniform * (math.log(uniform) - (v - top)) for v in possible)
                total[int(point.row_id[b])] += certain
    recorded = torch.where(rollout.mask, rollout.tokens.self_certainty, 0.0).sum(1).tolist()
    assert dict(zip(rollout.row_id.tolist(), recorded)) == pytest.approx(total, abs=1e-9)


def test_nothing_is_recorded_unless_it_is_asked_for():
    _, rollout = sampled("causal")
    assert rollout.entropy is None and rollout.tokens.self_certainty is None
    with pytest.raises(UserError, match="record_entropy"):
        rollout.entropies()


@pytest.mark.parametrize("name", ["causal", "maskgit", "tree"])
def test_recording_changes_nothing_that_is_sampled(name):
    _, plain = sampled(name)
    _, recorded = sampled(name, record_entropy=True)
    assert torch.equal(plain.sample, recorded.sample)
    assert torch.equal(plain.logprob, recorded.logprob)


@pytest.mark.parametrize("name", ["causal", "flow"])
def test_parts_of_a_rollout_record_what_the_whole_does(name):
    """Parts that are sampled one after the other, by two processes or in two passes."""
    policy = toy(name, record_entropy=True)
    prompts = toys.prompts(4)
    rng = Rng.of("parts")
    with torch.no_grad():
        whole = policy.rollout(prompts, 3, rng)
        parts = [policy.rollout(prompts[:1], 3, rng)]
        parts.append(policy.rollout(prompts[1:], 3, rng.after(3, 1)))
    torch.testing.assert_close(joined(parts).entropies(), whole.entropies(), atol=1e-12, rtol=0)


def test_answers_that_are_remembered_keep_their_entropy_in_a_checkpoint():
    _, rollout = sampled("causal", record_entropy=True)
    rows = rollout[:4].replace(cond=None)
    entry = Remembered(0, 3, rows, Rewards({"r": torch.ones(4)}))
    (again,) = unpacked(*packed([entry]))
    assert torch.equal(again.rollout.entropies(), rows.entropies())


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
