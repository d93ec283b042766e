"""What must hold for every family of policies, tried on the toys. A new toy is tested by being
listed."""

from functools import partial

import pytest
import torch

from mmrl import advantages
from mmrl.core.errors import UserError
from mmrl.core.types import Rollout, SamplerState
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
from tests.fixtures.records import make_point

FAMILIES = list(toys.POLICIES)
FLOWS = ["flow", "video"]
GUIDED = [
    ("flow", {"guidance_scale": 3.0, "logprob_guidance": d})
    for d in ("guided", "guided_stopgrad_uncond", "conditional")
]
CASES = (
    [(f, {}) for f in FAMILIES] + GUIDED + [("flow", {"sde_type": dance_sde, "noise_level": 0.3})]
)
CASES += [
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
    rollout = roll(policy)
    for point in passes(policy.path(rollout), 16):
        again = policy.dist(point).log_prob(point.target)
        assert torch.equal(again * point.mask, point.logprob * point.mask)


@pytest.mark.parametrize(("family", "options"), CASES, ids=IDS)
def test_scoring_in_bfloat16_repeats_sampling_to_the_bit(family, options):
    policy = toys.make(family, fixed_batch_rows=16, **options)
    with torch.autocast("cpu", torch.bfloat16):
        rollout = roll(policy)
        for point in passes(policy.path(rollout), 16):
            again = policy.dist(point).log_prob(point.target)
            assert torch.equal(again * point.mask, point.logprob * point.mask)


@pytest.mark.parametrize(("family", "options"), CASES, ids=IDS)
def test_first_gradient_is_reinforce(family, options):
    policy = toys.make(family, double=True, **options)
    if options.get("logp_dist") == "guided_stopgrad_uncond":
        pytest.skip("by its definition not the gradient of a log-prob")
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
        torch.testing.assert_close(
            gradient(policy, rollout, objective, micro, reduction), whole, atol=1e-10, rtol=0
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_do_not_change_the_samples(family):
    whole, parts = (roll(toys.make(family, double=True, fixed_batch_rows=w)) for w in (None, 3))
    torch.testing.assert_close(whole.sample, parts.sample, atol=1e-10, rtol=0)
    torch.testing.assert_close(whole.logprob, parts.logprob, atol=1e-10, rtol=0)
    assert torch.equal(whole.row_id, parts.row_id) and torch.equal(whole.mask, parts.mask)


def test_a_compressed_tail_saves_forwards_and_is_scored_as_sampled():
    """MixGRPO-Flash: noise in steps 2 to 4 of 12, then a second-order solver in 0.4 of the 7 that
    are left."""
    options = {
        "steps": 12,
        "noise_window": partial(window, start=2, stop=5),
        "solver": dpm,
        "fixed_batch_rows": 16,
    }
    whole = toys.make("flow", **options)
    short = toys.make("flow", flash_step_ratio=0.4, **options)
    rollout = roll(short)
    # 2 and 3 as before, int(0.4 x 7) = 2
    assert short.report.forwards == 32 * 7 and rollout.mask.shape == (32, 7)
    assert rollout.mask[0].tolist() == [False, False, True, True, True, False, False]
    torch.testing.assert_close(rollout.latents.time[:, :6], roll(whole).latents.time[:, :6])
    assert (rollout.latents.time.diff(dim=1) < 0).all() and (rollout.latents.time[:, -1] == 0).all()
    for point in passes(short.path(rollout), 16):
        again = short.dist(point).log_prob(point.target)
        assert torch.equal(again * point.mask, point.logprob * point.mask)
    with short.evaluating(), whole.evaluating():  # which takes all steps
        assert torch.equal(roll(short).sample, roll(whole).sample)


def test_shared_noise_is_shared_inside_a_group_only():
    first = roll(toys.make("flow", same_initial_noise=True)).latents.states[:, 0].view(4, 8, 2)
    assert torch.equal(first, first[:, :1].expand_as(first))
    assert len(first[:, 0].unique(dim=0)) == 4
    assert len(roll(toys.make("flow")).latents.states[:, 0].unique(dim=0)) == 32


@pytest.mark.parametrize(
    "options", [{}, {"guidance_scale": 2.0}, {"tree": Tree(splits=1)}], ids=str
)
def test_samples_of_a_prompt_differ_where_no_noise_on_the_way_makes_them(options):
    """One initial noise for a group is for exploring. Evaluated alike, all samples of a prompt were
    one picture."""
    policy = toys.make("flow", same_initial_noise=True, **options)
    media, _ = sample(policy, toys.prompts(4), 8, seed=0)
    assert len(media.unique(dim=0)) == 32
    plain, _ = sample(toys.make("flow", **options), toys.prompts(4), 8, seed=0)
    assert torch.equal(media, plain), "as without the option"


@pytest.mark.parametrize("family", FLOWS)
def test_evaluation_is_deterministic_given_the_first_noise(family):
    policy = toys.make(family)
    with policy.evaluating(guidance=2.0):
        rollout = roll(policy)
        assert policy.guidance_scale == 2.0
    assert policy.guidance_scale == 1.0 and not rollout.mask.any()
    state = rollout.latents.states[:, 0]
    for k in range(6):
        point = make_point(
            group=rollout.group,
            cond=rollout.cond,
            row_id=rollout.row_id,
            mask=rollout.mask[:, :1],
            state=state,
            time=rollout.latents.time[:, k],
            next_time=rollout.latents.time[:, k + 1],
            noise_level=rollout.latents.noise_level[:, k],
            guidance=2.0,
        )
        v = policy.dist(point.replace(step=SamplerState(time=point.time))).mean
        state = state + v * (rollout.latents.time[:, k + 1] - rollout.latents.time[:, k]).view(
            -1, *[1] * (v.ndim - 1)
        )
    torch.testing.assert_close(state, rollout.sample)


def test_stopgrad_guidance_has_the_value_of_full_guidance_but_not_its_gradient():
    full, stopped = (
        toys.make("flow", True, guidance_scale=3.0, logprob_guidance=d)
        for d in ("guided", "guided_stopgrad_uncond")
    )
    a = roll(full)
    b = roll(stopped)
    torch.testing.assert_close(a.logprob, b.logprob, atol=1e-10, rtol=0)
    g, h = (gradient(p, r, PolicyGradient(clip_range=0.2)) for p, r in ((full, a), (stopped, b)))
    assert torch.nn.functional.cosine_similarity(g, h, dim=0) < 0.999


def test_conditional_scores_another_distribution_than_it_samples():
    guided = toys.make("flow", True, guidance_scale=3.0)
    with pytest.warns(UserWarning, match="drawn with guidance 3 and scored without it"):
        conditional = toys.make("flow", True, guidance_scale=3.0, logprob_guidance="conditional")
    a = roll(guided)
    b = roll(conditional)
    torch.testing.assert_close(a.sample, b.sample)
    assert (a.logprob - b.logprob).abs().max() > 1e-3


@pytest.mark.parametrize("pick", ["first", "random"])
def test_timestep_subsets(pick):
    for fraction, kept in ((0.99, 5), (0.5, 3), (0.01, 1), (1.0, 6)):
        subset(fraction, kept, pick)


def subset(fraction, kept, pick):
    policy = toys.make("flow")
    rollout = roll(policy)
    objective = PolicyGradient(timestep_fraction=fraction, timestep_selection=pick)
    points = list(objective.points(policy, rollout, Rng.of(0)))
    counts = torch.zeros(32, dtype=torch.long)
    for point in points:
        counts[point.row_id] += point.mask[:, 0].long()
    assert counts.tolist() == [kept] * 32
    if pick == "first":
        assert len(points) == kept
    elif kept == 3:
        assert len(points) == 6
    part = objective.points(policy, rollout[torch.arange(4)], Rng.of(0))
    chosen, again = (
        {(float(p.time[0]), r) for p in ps for r in p.row_id.tolist()} for ps in (points, part)
    )
    assert again == {(t, r) for t, r in chosen if r < 4}  # whatever other rows are there


def test_rows_share_conditions_and_keep_their_names():
    rollout = roll(toys.make("flow"))
    part = rollout[torch.tensor([30, 2])]
    assert (
        part.cond is rollout.cond
        and part.group.tolist() == [3, 0]
        and part.row_id.tolist() == [30, 2]
    )
    assert [p["label"] for p in part.prompt_per_row()] == [1, 0]
    joined = Rollout.cat([rollout[:5], rollout[5:]])
    assert torch.equal(joined.latents.states, rollout.latents.states)
    assert joined.cond is rollout.cond


@pytest.mark.parametrize("family", FAMILIES)
def test_a_memory_budget_chooses_the_chunks_and_changes_no_sample(family, monkeypatch):
    whole = roll(toys.make(family, double=True))
    policy = toys.make(family, double=True, sampling_memory_gib=20000 / 2**30)
    sizes = []
    sample = policy._sample
    monkeypatch.setattr(
        policy, "_sample", lambda group, *rest: sizes.append(len(group)) or sample(group, *rest)
    )
    torch.testing.assert_close(roll(policy).sample, whole.sample, atol=1e-10, rtol=0)
    assert 1 <= sizes[0] < 32 and sum(sizes) == 32, sizes
    with pytest.raises(UserError, match="sampling_memory_gib = .* one row needs"):
        roll(toys.make(family, sampling_memory_gib=1e-9))


@pytest.mark.parametrize("family", ["flow", "diffusion", "video"])
def test_noise_that_falls_along_the_path_is_scored_as_it_was_drawn(family):
    """EAD for the steps of a sampler: levels on a line, and the ratio is still exactly 1."""
    policy = toys.make(family, noise_level=0.8, noise_anneal=0.25, steps=4)
    rollout = roll(policy)
    levels = torch.tensor([0.8, 0.6, 0.4, 0.2])
    recorded = rollout.latents.noise_level[0].float()  # diffusion: the last step has no noise
    torch.testing.assert_close(recorded[:3], levels[:3])
    for point in policy.path(rollout):
        assert torch.equal(policy.dist(point).log_prob(point.target), point.logprob)
    plain = roll(toys.make(family, noise_level=0.8, steps=4))
    same = roll(toys.make(family, noise_level=0.8, noise_anneal=1.0, steps=4))
    assert torch.equal(plain.sample, same.sample)
