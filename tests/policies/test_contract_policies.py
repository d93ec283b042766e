"""What every registered policy must keep: a new one is tested by being registered, with the options
in SMALLEST of tests/core/test_contract.py."""

from typing import Any

import pytest
import torch
from PIL import Image

from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, options
from mmrl.core.types import LatentPath, Rollout, Transition
from mmrl.experiment import evaluation
from mmrl.objectives.base import frozen
from mmrl.policies import contracts
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.train.minibatches import passes
from samplers.noise import Rng
from tests.core.test_contract import made
from tests.fixtures import toys

registry.load_built_in()

# Options under which a policy must keep the contract too, besides its smallest.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "unified_flow": [{"guidance_scale": 2.0, "lora": 2}],
    "sd3": [
        {
            "lora": 2,
            "guidance_scale": 3.0,
            "sde_type": "dance_sde",
            "noise_level": 0.3,
            "noise_window": "all_but_last",
        },
    ],
    "masked_image_lm": [{"guidance_scale": 2.0, "lora": 2, "temperature": 0.8}],
    "masked_lm": [{"guidance_scale": 2.0, "sampler": "maskgit"}],
    "janus": [{"logprob_guidance": "conditional", "train": "generation"}],
    "janus_unified": [
        {"plan": {"max_new_tokens": 4, "images": 2, "turn": "new"}, "weigh": "segment", "lora": 2}
    ],
    "var": [
        {"lora": 2, "scale_alpha": 0.7, "logprob_guidance": "guided_stopgrad_uncond"},
        {"branch_at": 1},
    ],
    "llamagen": [{"guidance_scale": 1.0, "top_p": 0.9}],
}
TEXTS = ("a red seven", "a blue two", "a green nine")
PICTURE = Image.new("RGB", (32, 32), "red")
PROMPTS = [  # what any policy can answer
    {"text": text, "image": PICTURE, "label": i} for i, text in enumerate(TEXTS)
]
COPIES = 2
CASES = [(name, extra) for name in POLICIES for extra in ({}, *VARIANTS.get(name, []))]
SAMPLES = Rng.of("contract")


def prompts_for(policy):
    """Those that write have other tensors for images than for prompts: tests/policies/vlm."""
    of_text = policy.capabilities.makes == "text" or policy.capabilities.decisions == "mixed"
    return [{"text": text} for text in TEXTS] if of_text else PROMPTS


def roll(policy, rng: Rng = SAMPLES) -> Rollout:
    with torch.no_grad():
        rollout = policy.rollout(prompts_for(policy), COPIES, rng)
    signs = torch.tensor([1.0, -1.0], dtype=rollout.logprob.dtype).repeat(len(PROMPTS))
    return rollout.replace(advantage=signs[:, None])


def a_rollout_is_rows_by_decisions(policy, rollout):
    rows = len(PROMPTS) * COPIES
    decisions = rollout.mask.shape[1]
    assert rollout.group.tolist() == [p for p in range(len(PROMPTS)) for _ in range(COPIES)]
    assert rollout.row_id.tolist() == list(range(rows)) and len(rollout.sample) == rows
    assert prompts_for(policy)[1].items() <= rollout.prompt_per_row()[COPIES].items()
    assert rollout.logprob.shape == rollout.mask.shape == (rows, decisions)
    assert rollout.mask.dtype == torch.bool and rollout.mask.any(1).all()
    assert rollout.logprob[rollout.mask].isfinite().all()
    path = rollout.trajectory
    if type(path) is LatentPath:
        assert path.states.shape == (rows, decisions + 1, *rollout.sample.shape[1:])
        assert path.time.shape == (rows, decisions + 1)
        assert path.noise_level.shape == (rows, decisions)
        assert torch.equal(path.states[:, -1], rollout.sample)
        assert not (rollout.mask & (path.noise_level == 0)).any()


def conditions_are_stored_once_a_prompt(policy, rollout):
    apart = isinstance(rollout.cond, list)  # of prompts that do not fit one tensor
    assert not apart or len(rollout.cond) == len(PROMPTS)
    assert {len(tensor) for tensor in leaves(rollout.cond)} <= ({1} if apart else {1, len(PROMPTS)})


def leaves(nest):
    if isinstance(nest, torch.Tensor):
        return [nest]
    inside = nest.values() if isinstance(nest, dict) else nest
    return [leaf for value in inside for leaf in leaves(value)]


def scoring_repeats_sampling_to_the_bit(policy, rollout):
    """Or up to rounding, where tokens are sampled one by one and scored in one pass."""
    for point in passes(policy.path(rollout), policy.pass_sizes.rows):
        mixed = policy.capabilities.decisions == "mixed"
        written = policy.keep_groups_together or (mixed and point.step is None)
        logp = policy.dist(point).log_prob(point.target)
        assert logp.shape == point.mask.shape == point.logprob.shape
        ratio = (logp - point.logprob).exp()[point.mask]
        near = {"atol": 1e-5 if written else 0, "rtol": 0}
        torch.testing.assert_close(ratio, torch.ones_like(ratio), **near)


def the_path_covers_the_mask_once(policy, rollout):
    points = list(policy.path(rollout))
    seen = torch.zeros(len(rollout), dtype=torch.long)
    for point in points:
        seen.index_add_(0, point.row_id, point.mask.sum(1))
    assert seen.tolist() == rollout.mask.sum(1).tolist()
    one = rollout.replace(mask=rollout.mask & (torch.arange(len(rollout)) == 1)[:, None])
    left = [row for point in policy.path(one) for row in point.row_id[point.mask.any(1)].tolist()]
    assert set(left) == {1}
    for point in points:
        kept = point.mask.any(1)
        assert (point.num_decisions[kept] == rollout.mask.sum(1)[point.row_id[kept]]).all()


def a_distribution_is_differentiable_in_the_trainable_weights_only(policy, rollout):
    point = next(iter(policy.path(rollout)))
    dist = policy.dist(point)
    assert (dist.kl(dist)[point.mask] == 0).all() and dist.entropy().shape == point.mask.shape
    policy.net.zero_grad()
    dist.log_prob(point.target)[point.mask].sum().backward()
    grads = {name: p.grad for name, p in policy.weights.parameters().items()}
    assert any(g is not None and g.abs().sum() > 0 for g in grads.values())
    assert all(p.grad is None for p in policy.net.parameters() if not p.requires_grad)
    policy.net.zero_grad()


def renoised_states_are_new_reproducible_and_scored(policy, rollout):
    rng = Rng.of("renoise")
    one, two, other = (list(policy.renoise(rollout, r)) for r in (rng, rng, rng.fold("other")))
    assert len(one) == len(two) > 0
    for point, again in zip(one, two, strict=True):
        assert torch.equal(point.state, again.state) and point.logprob is None
        assert not isinstance(point.step, Transition)
        logp = policy.dist(point).log_prob(point.target)
        assert logp.shape == point.mask.shape and logp.isfinite().all()
        assert len(point.advantage) == len(point.num_decisions) == len(point)
    if isinstance(rollout.trajectory, LatentPath):
        assert not torch.equal(one[-1].state, other[-1].state)


def pictures_lie_between_0_and_1(policy, rollout):
    media = policy.decode(rollout)
    assert len(media) == len(rollout)
    if isinstance(media, torch.Tensor) and media.is_floating_point():
        assert media.ndim in (4, 5) and media.shape[-3] == 3 and not media.requires_grad
        assert media.min() >= 0 and media.max() <= 1
        assert torch.equal(policy.decode(rollout[:2]), media[:2]) or policy.pass_sizes.rows is None


def a_sample_depends_on_its_name_only(policy, rollout):
    with torch.no_grad():
        later = policy.rollout(prompts_for(policy)[1:], COPIES, Rng(SAMPLES.key, offset=1))
    assert later.row_id.tolist() == list(range(COPIES, len(PROMPTS) * COPIES))
    torch.testing.assert_close(later.sample, rollout.sample[COPIES:], atol=1e-5, rtol=1e-5)
    assert not torch.equal(roll(policy, Rng.of("other")).sample, rollout.sample)


def evaluation_explores_nothing_and_leaves_no_trace(policy, rollout):
    with policy.evaluating(), torch.no_grad():
        asked = prompts_for(policy)[:1]
        shown = policy.rollout(asked, COPIES, Rng.of("evaluation"))
        assert not isinstance(policy, FlowPolicy) or not shown.mask.any()
    assert torch.equal(roll(policy).sample, rollout.sample)


def replays(policy, rollout):
    cond, shown = policy.recall(prompts_for(policy))
    torch.testing.assert_close(leaves(cond), leaves(rollout.cond))
    assert [prompt["text"] for prompt in shown] == [prompt["text"] for prompt in rollout.prompts]
    assert len(policy.prompt_states(prompts_for(policy))) == len(PROMPTS)


def demonstrates(policy, rollout):
    nothing = policy.demonstrate(prompts_for(policy), [None] * len(PROMPTS), SAMPLES, score=False)
    assert len(nothing) == len(PROMPTS) and not nothing.mask.any()
    assert nothing.trainable is not None and not nothing.trainable.any()


def limits_length(policy, rollout):
    before = policy.most_new_tokens()
    policy.set_max_new_tokens(2)
    assert policy.most_new_tokens() == 2 and roll(policy).mask.sum(1).max() <= 2
    policy.set_max_new_tokens(before)


def remasks(policy, rollout):
    hide = torch.zeros_like(rollout.sample, dtype=torch.bool)
    hide[:, 0] = True
    point = policy.at(rollout, hide)
    assert not (point.mask & ~hide).any()
    assert torch.equal(point.state[~hide], rollout.sample[~hide])
    assert policy.rates[0] == 1 and policy.rates[-1] == 0


def guided(policy, rollout):
    before = policy.guidance_scale
    (point, *_) = policy.path(rollout)
    conditional = policy.logprob_guidance == "conditional"
    assert policy.scored_guidance(point) == (1.0 if conditional else before)
    assert policy.scored_guidance(point.replace(guidance=2.5)) == 2.5
    with policy.untempered(), policy.evaluating(3.0):
        pass
    assert policy.guidance_scale == before


# what a policy must do that keeps one of mmrl/policies/contracts.py; others are tested by family
KEPT = {
    contracts.Replays: replays,
    contracts.Demonstrates: demonstrates,
    contracts.LimitsLength: limits_length,
    contracts.Remasks: remasks,
    contracts.Guided: guided,
}


def a_policy_keeps_its_contracts(policy, rollout):
    for contract, keeps in KEPT.items():
        if isinstance(policy, contract):
            with torch.no_grad():
                keeps(policy, rollout)


def candidates_differ_in_evaluation(policy, rollout):
    """For `mmrl sample --best-of`, also where answers are the likeliest otherwise."""
    evaluation.sample_in_evaluation(policy)
    media, _ = evaluation.sample(policy, prompts_for(policy)[:2], 4, seed=3)
    different = [str(one.tolist() if isinstance(one, torch.Tensor) else one) for one in media]
    assert len(set(different[:4])) > 1 < len(set(different[4:]))


# in this order: after the last one the policy samples in evaluation
EVERY = (
    a_rollout_is_rows_by_decisions,
    conditions_are_stored_once_a_prompt,
    scoring_repeats_sampling_to_the_bit,
    the_path_covers_the_mask_once,
    a_distribution_is_differentiable_in_the_trainable_weights_only,
    renoised_states_are_new_reproducible_and_scored,
    pictures_lie_between_0_and_1,
    a_sample_depends_on_its_name_only,
    evaluation_explores_nothing_and_leaves_no_trace,
    a_policy_keeps_its_contracts,
    candidates_differ_in_evaluation,
)
IDS = ["-".join([name, *map(str, extra.values())]) for name, extra in CASES]


@pytest.mark.parametrize(("name", "extra"), CASES, ids=IDS)
def test_a_policy_keeps_what_all_must(name, extra):
    with torch.random.fork_rng():
        torch.manual_seed(0)  # new adapters draw their first weights
        policy = made("policies", name, extra=extra)
    generator = torch.get_rng_state()
    rollout = roll(policy)
    for check in EVERY:
        check(policy, rollout)
        assert torch.equal(torch.get_rng_state(), generator), "drew from the global generator"


TRUNCATED = {"top_k": 2, "top_p": 0.9}
OF_PLANS = {"janus_unified": {"plan": {"max_new_tokens": 4, **TRUNCATED}}}
TRUNCATE = [name for name, entry in POLICIES.items() if set(TRUNCATED) <= set(options(entry))]


@pytest.mark.parametrize("name", TRUNCATE)
def test_truncation_never_reaches_a_closed_form(name):
    """A KL over the vocabulary is that of the policy without top-k and top-p, and finite."""
    sampler, whole = (
        made("policies", name, extra=extra)
        for extra in (TRUNCATED | OF_PLANS.get(name, {}), {"top_k": None, "top_p": 1.0})
    )
    rollout = roll(sampler)
    distances = []
    for policy in (sampler, whole):
        policy.weights.keep("before")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in policy.weights.parameters().values():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)
            points = [p for p in policy.path(rollout) if not isinstance(p.step, Transition)]
            kl = [policy.dist(p).kl(frozen(policy, "before", p))[p.mask] for p in points]
        distances.append(torch.cat(kl))
    assert distances[0].isfinite().all() and (distances[0] > 0).any()
    torch.testing.assert_close(*distances, atol=1e-4, rtol=1e-3)


def test_who_does_not_keep_a_contract_is_refused_by_name():
    policy = toys.make("flow")
    assert contracts.Replays.of(policy) is policy
    for contract in contracts.Contract.__subclasses__():
        with pytest.raises(UserError, match=f"^ToyBare {contract.lack}$"):
            contract.of(toys.ToyBare())
