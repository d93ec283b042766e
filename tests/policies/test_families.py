"""What must hold for every family of policies, tried on the toys."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from mmrl import advantages
from mmrl.core.errors import UserError
from mmrl.experiment.evaluation import sample
from mmrl.objectives import PolicyGradient
from mmrl.policies.diffusion.trees import Tree
from mmrl.policies.lora import Lora
from mmrl.train.minibatches import loss_total, loss_weights, passes
from samplers.kernels import dance_sde
from samplers.noise import Rng
from samplers.solvers import dpm
from samplers.windows import window
from tests.fixtures import toys

FAMILIES = list(toys.POLICIES)
GUIDED = ("guided", "guided_stopgrad_uncond", "conditional")
CASES = [(family, {}) for family in FAMILIES]
CASES += [("flow", {"guidance_scale": 3.0, "logprob_guidance": d}) for d in GUIDED]
CASES += [
    ("flow", {"sde_type": dance_sde, "noise_level": 0.3}),
    ("flow", {"lora": Lora(2, targets=["0", "2"])}),
    ("video", {"same_initial_noise": True}),
    ("flow", {"trajectory_dtype": "bfloat16"}),
]
IDS = ["-".join([f, *map(str, o)]) for f, o in CASES]


def roll(policy, n=4, copies=8, seed=0):
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(n), copies, Rng.of(seed))
    reward = toys.reward(policy.decode(rollout), rollout.prompt_per_row()).to(rollout.logprob)
    return rollout.replace(advantage=advantages.flow_grpo(reward, rollout).to(rollout.logprob))


def gradient(policy, rollout, objective, micro=None, loss_agg_mode="token_mean"):
    points = list(objective.points(policy, rollout, Rng.of("points")))
    _, total = loss_total(points, rollout, loss_agg_mode)
    policy.net.zero_grad()
    for point in passes(points, micro):
        weight = loss_weights(point, loss_agg_mode, rollout.mask.shape[1])
        ((objective.loss(policy, point) * weight).sum() / total).backward()
    return torch.cat([p.grad.flatten() for p in policy.weights.parameters().values()])


@pytest.mark.parametrize(("family", "options"), CASES, ids=IDS)
def test_scoring_repeats_sampling_to_the_bit(family, options):
    policy = toys.make(family, fixed_batch_rows=16, **options)
    for precision in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with precision:
            rollout = roll(policy)
            for point in passes(policy.path(rollout), 16):
                again = policy.dist(point).log_prob(point.target)
                assert torch.equal(again * point.mask, point.logprob * point.mask)


@pytest.mark.parametrize(("family", "options"), CASES, ids=IDS)
def test_first_gradient_is_reinforce(family, options):
    policy = toys.make(family, double=True, **options)
    rollout = roll(policy)
    ours = gradient(policy, rollout, PolicyGradient(clip_range=0.2))
    policy.net.zero_grad()
    points = list(policy.path(rollout))
    score = sum((policy.dist(p).log_prob(p.target) * p.advantage * p.mask).sum() for p in points)
    (-score / rollout.mask.sum()).backward()
    reinforce = torch.cat([p.grad.flatten() for p in policy.weights.parameters().values()])
    torch.testing.assert_close(ours, reinforce, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(
    ("family", "reduction"),
    [
        ("flow", "token_mean"),
        ("causal", "seq_mean_token_mean"),
        ("masked", "seq_mean_token_sum_norm"),
    ],
)
def test_micro_batches_do_not_change_the_gradient(family, reduction):
    policy = toys.make(family, double=True)
    rollout = roll(policy)
    ragged = rollout.mask & (Rng.of("mask").uniform(rollout.row_id, (rollout.mask.shape[1],)) < 0.7)
    # off-policy, so that clipping matters
    rollout = rollout.replace(mask=ragged, logprob=rollout.logprob + 0.05)
    policy.weights.keep("ref")
    objective = PolicyGradient(clip_range=0.1, kl=0.3)
    whole = gradient(policy, rollout, objective, None, reduction)
    for micro in (1, 3, 7):
        parts = gradient(policy, rollout, objective, micro, reduction)
        torch.testing.assert_close(parts, whole, atol=1e-10, rtol=0)


def test_a_compressed_tail_saves_forwards_and_is_scored_as_sampled():
    """MixGRPO-Flash: noise in steps 2 to 4 of 12, then a solver in int(0.4 x 7) = 2 steps."""
    noisy = partial(window, start=2, stop=5)
    options = {"steps": 12, "noise_window": noisy, "solver": dpm, "fixed_batch_rows": 16}
    whole = toys.make("flow", **options)
    short = toys.make("flow", flash_step_ratio=0.4, **options)
    rollout = roll(short)
    assert short.report.forwards == 32 * 7
    assert rollout.mask[0].tolist() == [False, False, True, True, True, False, False]
    times = rollout.latents.time
    torch.testing.assert_close(times[:, :6], roll(whole).latents.time[:, :6])
    assert (times.diff(dim=1) < 0).all() and (times[:, -1] == 0).all()
    for point in passes(short.path(rollout), 16):
        again = short.dist(point).log_prob(point.target)
        assert torch.equal(again * point.mask, point.logprob * point.mask)
    with short.evaluating(), whole.evaluating():  # which takes all steps
        assert torch.equal(roll(short).sample, roll(whole).sample)


@pytest.mark.parametrize("options", [{}, {"tree": Tree(splits=1)}], ids=str)
def test_one_initial_noise_for_a_group_is_for_exploring(options):
    """Evaluated alike, all samples of a prompt were one picture."""
    policy = toys.make("flow", same_initial_noise=True, **options)
    first = roll(policy).latents.states[:, 0].view(4, 8, 2)
    assert torch.equal(first, first[:, :1].expand_as(first))
    assert len(first[:, 0].unique(dim=0)) == 4
    media, _ = sample(policy, toys.prompts(4), 8, seed=0)
    assert len(media.unique(dim=0)) == 32
    plain, _ = sample(toys.make("flow", **options), toys.prompts(4), 8, seed=0)
    assert torch.equal(media, plain), "as without the option"


def test_what_is_scored_of_guidance():
    """Without the gradient of the unconditional branch the value is the same; the conditional score
    is another distribution's than is sampled from."""
    with pytest.warns(UserWarning, match="drawn with guidance 3 and scored without it"):
        full, stopped, conditional = (
            toys.make("flow", True, guidance_scale=3.0, logprob_guidance=d) for d in GUIDED
        )
    a, b, c = (roll(policy) for policy in (full, stopped, conditional))
    torch.testing.assert_close(a.logprob, b.logprob, atol=1e-10, rtol=0)
    g, h = (gradient(p, r, PolicyGradient(clip_range=0.2)) for p, r in ((full, a), (stopped, b)))
    assert torch.nn.functional.cosine_similarity(g, h, dim=0) < 0.999
    torch.testing.assert_close(a.sample, c.sample)
    assert (a.logprob - c.logprob).abs().max() > 1e-3


@pytest.mark.parametrize("pick", ["first", "random"])
@pytest.mark.parametrize(("fraction", "kept"), [(0.99, 5), (0.5, 3), (0.01, 1), (1.0, 6)])
def test_timestep_subsets(fraction, kept, pick):
    policy = toys.make("flow")
    rollout = roll(policy)
    objective = PolicyGradient(timestep_fraction=fraction, timestep_selection=pick)
    points = list(objective.points(policy, rollout, Rng.of(0)))
    counts = torch.zeros(32, dtype=torch.long)
    for point in points:
        counts[point.row_id] += point.mask[:, 0].long()
    assert counts.tolist() == [kept] * 32
    assert len(points) == (kept if pick == "first" else 6) or kept != 3
    part = objective.points(policy, rollout[torch.arange(4)], Rng.of(0))
    chosen, again = (
        {(float(p.time[0]), r) for p in ps for r in p.row_id.tolist()} for ps in (points, part)
    )
    assert again == {(t, r) for t, r in chosen if r < 4}  # whatever other rows are there


@pytest.mark.parametrize("family", FAMILIES)
def test_a_memory_budget_chooses_the_chunks_and_changes_no_sample(family, monkeypatch):
    whole = roll(toys.make(family, double=True))
    policy = toys.make(family, double=True, sampling_memory_gib=20000 / 2**30)
    sizes = []
    sample = policy._sample
    monkeypatch.setattr(
        policy, "_sample", lambda group, *rest: sizes.append(len(group)) or sample(group, *rest)
    )
    parts = roll(policy)
    for name in ("sample", "logprob", "row_id", "mask"):
        one, other = getattr(parts, name), getattr(whole, name)
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)
    assert 1 <= sizes[0] < 32 and sum(sizes) == 32, sizes
    with pytest.raises(UserError, match="sampling_memory_gib = .* one row needs"):
        roll(toys.make(family, sampling_memory_gib=1e-9))


@pytest.mark.parametrize("family", ["flow", "diffusion"])
def test_noise_that_falls_along_the_path_is_scored_as_it_was_drawn(family):
    """EAD for the steps of a sampler: levels on a line, and the ratio is still exactly 1."""
    policy = toys.make(family, noise_level=0.8, noise_anneal=0.25, steps=4)
    rollout = roll(policy)
    levels = torch.tensor([0.8, 0.6, 0.4, 0.2])
    recorded = rollout.latents.noise_level[0].float()  # diffusion: the last step has no noise
    torch.testing.assert_close(recorded[:3], levels[:3])
    for point in policy.path(rollout):
        assert torch.equal(policy.dist(point).log_prob(point.target), point.logprob)
