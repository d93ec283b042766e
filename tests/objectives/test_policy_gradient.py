"""One objective on every kind of decisions: surrogates of whole samples whose decisions are scored
in several passes, and options that mean nothing for a policy."""

import math
from functools import partial

import pytest
import torch

from mmrl import config
from mmrl.advantages import dr_grpo
from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.registry import ESTIMATORS, SURROGATES
from mmrl.core.types import Point
from mmrl.experiment.build import read
from mmrl.objectives import PolicyGradient
from mmrl.objectives.surrogates import sees_whole_rows
from mmrl.objectives.terms.importance_sampling import Importance
from mmrl.policies.diffusion.trees import Tree
from mmrl.train.optimizers import sgd
from mmrl.zoo.advantages import COPO
from mmrl.zoo.objectives import ClipCov, Masked
from samplers.noise import Rng
from tests.fixtures import toys
from tests.objectives.test_objective_pairs import WHOLE, ToyHidden

registry.load_built_in()

SEQUENCES = [name for name, entry in SURROGATES.items() if sees_whole_rows(entry)]
CASES = {  # policy, objective
    "flow": (toys.ToyFlow, PolicyGradient),
    "weighted flow": (toys.ToyFlow, partial(PolicyGradient, timestep_weighting="noise")),
    "causal": (toys.ToyCausal, PolicyGradient),
    "video": (partial(toys.ToyVideo, steps=3), PolicyGradient),
    "tree": (partial(toys.ToyFlow, tree=Tree(splits=(1, 3))), PolicyGradient),
    "masked": (toys.ToyMasked, PolicyGradient),
    "trajectory": (ToyHidden, Masked),
    "coupled masks": (ToyHidden, partial(Masked, estimator=ESTIMATORS["coupled"])),
}


ROWS = 16


def setting(case, surrogate):
    policy = CASES[case][0]()
    policy.net.double()
    return policy, CASES[case][1](surrogate=built(surrogate))


def built(surrogate):
    """A surrogate by its name, or with options."""
    if isinstance(surrogate, str):
        return SURROGATES[surrogate]
    ((name, options),) = surrogate.items()
    return partial(SURROGATES[name], **options)


def trained(case, surrogate, iterations=1, advantage=dr_grpo, **options):
    """Metrics of every iteration and the weights after the last, by plain gradient descent."""
    policy, objective = setting(case, surrogate)
    sizes = {"train_batch_size": ROWS, "iterations": 2, "max_grad_norm": None} | options
    trainer = toys.trainer(policy, objective, advantage=advantage, lr=0.05, optimizer=sgd, **sizes)
    return [trainer.iterate() for _ in range(iterations)], policy.weights.full()


def assert_same(weights, others):
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], atol=1e-10, rtol=0)


# every surrogate there is, and options specific to a paper
VARIANTS = {
    **{name: name for name in SURROGATES},
    "dual clip": {"ppo": {"dual_clip": 3.0}},
    "two-sided clip": {"ppo": {"delta": 2.0}},
    "verl's cispo": {"cispo": {"clip_low": 0.2, "clip_high": 0.2}},
}
# a mean over a row's decisions of what is already a sum over them
SUMS = ("luspo", "rloo")


@pytest.mark.parametrize(
    "case", ["causal", "flow", "masked", "tree", "trajectory", "coupled masks"]
)
def test_the_first_step_has_ratio_one_and_the_gradient_of_reinforce(case, subtests):
    start = setting(case, "reinforce")[0].weights.full()
    _, expected = trained(case, "reinforce")
    # of the others no decision knows of its neighbours
    chosen = {"causal": VARIANTS, "tree": ["ppo", "spo"], "masked": SEQUENCES}
    for variant in chosen.get(case, ["gspo", "luspo"]):
        surrogate = VARIANTS[variant]
        with subtests.test(variant=variant):
            (metrics,), weights = trained(case, surrogate)
            assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-12)
            assert metrics["clip_fraction"] == 0 and metrics["grad_norm"] > 0
            factor = metrics["decisions"] / ROWS if variant in SUMS else 1.0
            steps = {name: factor * (expected[name] - start[name]) for name in weights}
            assert_same({name: value - start[name] for name, value in weights.items()}, steps)


def test_the_parabola_of_spo_pulls_a_ratio_back_that_has_gone_too_far():
    """On the second step over the same rows, and as its formula."""
    ratio = torch.tensor([[0.5, 1.0, 1.3]]).double()
    leaf = ratio.log().requires_grad_()
    advantage = torch.tensor([[-2.0]]).double()
    loss = SURROGATES["spo"](leaf, leaf.detach() * 0, advantage, None, width=0.4)
    parabola = [2 * r + 2 * (r - 1) ** 2 / 0.8 for r in (0.5, 1.0, 1.3)]
    assert loss[0].tolist() == pytest.approx(parabola)
    (slope,) = torch.autograd.grad(loss.sum(), leaf)
    # r (2 + 5 (r - 1)): nothing at 1 - width = 0.6, backwards below it
    assert slope[0].tolist() == pytest.approx([0.5 * -0.5, 2.0, 1.3 * 3.5])
    metrics, _ = trained("tree", "spo", epochs=2, iterations=2)
    assert metrics[0]["ratio/mean"] != 1 and metrics[1]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("case", "surrogate"),
    [
        ("weighted flow", "gspo"),
        ("masked", "gmpo"),
        ("flow", "cispo"),
        ("causal", "gspo"),
        ("trajectory", "gspo"),
        ("coupled masks", "gspo"),
    ],
)
def test_micro_batches_change_nothing(case, surrogate):
    """Also on the second step, whose ratios are not 1."""
    sizes = {"iterations": 2, "train_batch_size": 8}
    (metrics, weights), (_, cut) = (
        trained(case, surrogate, micro_batch_size=micro, **sizes) for micro in (None, 3)
    )
    assert metrics[0]["ratio/mean"] != 1
    assert_same(weights, cut)


@pytest.mark.parametrize("case", ["flow", "masked", "trajectory"])
@pytest.mark.parametrize("surrogate", SEQUENCES)
def test_loss_and_gradient_are_those_of_whole_samples(case, surrogate):
    """After the weights have moved, against the surrogate of all decisions side by side."""
    policy, objective, rollout, advantage, _ = moved(case, surrogate, None)
    points = list(objective.points(policy, rollout.replace(advantage=advantage), Rng.of("points")))
    assert len(points) > 1 and objective.couples(policy) == "rows"
    whole = Point.cat(points)
    with torch.no_grad():
        ready = objective.couple(whole, objective.measure(policy, whole))
    loss = objective.loss(policy, ready)[whole.mask].mean()
    logp = [policy.dist(p).log_prob(p.target).masked_fill(~p.mask, 0) for p in points]
    old = [p.logprob.masked_fill(~p.mask, 0) for p in points]
    logp, old, mask = (torch.cat(x, 1) for x in (logp, old, [p.mask for p in points]))
    each = SURROGATES[surrogate](logp, old, advantage, mask).expand_as(mask)
    assert_equal(policy, loss, each[mask].mean())


def assert_equal(policy, loss, expected):
    """In value and gradient."""
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-9)
    slopes = (gradients(policy, x) for x in (loss, expected))
    for slope, truth in zip(*slopes, strict=True):
        torch.testing.assert_close(slope, truth, atol=1e-10, rtol=1e-9)


def moved(case, surrogate, low=0.02):
    """A policy, its objective and a rollout whose weights have moved since, with two advantages."""
    policy, objective = setting(case, surrogate)
    if low:
        surrogate = objective.surrogate
        surrogate.function = partial(surrogate.function, clip_low=low, clip_high=low)
    policy.weights.keep("old")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(2), 4, Rng.of("rollout"))
        for parameter in policy.net.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).double())
    first = torch.linspace(-1, 1, len(rollout), dtype=torch.float64)[:, None]
    second = torch.tensor([0.5, -0.7], dtype=torch.float64)[rollout.group][:, None]
    return policy, objective, rollout, first, second


def whole_loss(policy, objective, rollout):
    """The sum of the loss over all decisions, however its points are coupled."""
    points = Point.cat(list(objective.points(policy, rollout, Rng.of("points"))))
    if objective.couples(policy):
        with torch.no_grad():
            points = objective.couple(points, objective.measure(policy, points))
    return objective.loss(policy, points)[points.mask].sum()


@pytest.mark.parametrize("surrogate", ["ppo", "gspo"])
@pytest.mark.parametrize("case", CASES)
def test_parts_of_an_advantage_are_clipped_apart(surrogate, case):
    """The loss of COPO is the sum of two, not that of the sum: they differ where it is clipped."""
    if case == "tree" and surrogate == "gspo":
        return  # whole samples share steps
    policy, objective, rollout, first, second = moved(case, surrogate)
    parts = torch.stack([first, second], -1)
    together = rollout.replace(advantage=first + second, advantage_parts=parts)
    alone = [
        whole_loss(policy, objective, rollout.replace(advantage=part)) for part in (first, second)
    ]
    loss = whole_loss(policy, objective, together)
    assert_equal(policy, loss, sum(alone))
    blended = whole_loss(policy, objective, rollout.replace(advantage=first + second))
    assert abs(blended - loss) > 1e-6


@pytest.mark.parametrize("case", ["masked", "tree"])
def test_micro_batches_change_nothing_of_copo(case):
    """Two epochs over the same rows, so that ratios are clipped; of trees, edges have means of both
    parts."""
    copo = COPO(width=0.1)
    sizes = {"epochs": 2, "train_batch_size": 8, "iterations": 1}
    narrow = {"ppo": {"clip_low": 1e-3}}
    (metrics, weights), (_, cut) = (
        trained(case, narrow, advantage=copo, micro_batch_size=micro, **sizes)
        for micro in (None, 3)
    )
    assert metrics[0]["clip_fraction"] > 0
    assert_same(weights, cut)
    _, blended = trained(case, narrow, advantage=lambda r, x: copo(r, x), **sizes)
    assert any((value - blended[name]).abs().max() > 1e-9 for name, value in weights.items())


def gradients(policy, loss):
    return torch.autograd.grad(loss, list(policy.net.parameters()), retain_graph=True)


REFUSED = [  # policy, reward, options of the objective, message
    ("sd3", "digits", "{entropy: 0.1}", "entropy: the noise of a step is not trained"),
    ("sd3", "digits", "{off_policy: 0.1}", "off_policy: .* use clip_range"),
    ("sd3", "digits", "{top_entropy: 0.2}", "top_entropy: .* use timestep_fraction"),
    ("vlm", "count", "{timestep_fraction: 0.5}", "timestep_fraction: .* use top_entropy"),
    ("vlm", "count", "{timestep_selection: random}", "timestep_selection: .* use top_entropy"),
    ("vlm", "count", "{timestep_weighting: noise}", "timestep_weighting: .* use top_entropy"),
    ("vlm", "count", "{kl: {weight: 1, form: flow_grpo}}", "kl: .* use k3 or exact"),
    ("masked_lm", "count", "{off_policy: 0.1}", "off_policy: .* scored in several passes"),
    ("masked_lm", "count", "{surrogate: gspo, top_entropy: 0.2}", "surrogate: .* choose .* ppo"),
    ("vlm", "count", "{surrogate: sapo, clip_range: 0.1}", "sapo clips no ratio: leave out"),
    ("vlm", "count", "{surrogate: {ppo: {clip_low: 1}}, clip_range: 1}", "are the same: keep one"),
]


def test_what_means_nothing_for_a_policy_is_refused_when_it_is_read(tmp_path, subtests):
    file = tmp_path / "run.yaml"
    for policy, reward, options, complaint in REFUSED:
        objective = f"{{policy_gradient: {options}}}"
        file.write_text(WHOLE.format(policy=policy, reward=reward, objective=objective))
        says = rf"run.yaml:6: objective.policy_gradient.*{complaint}"
        with subtests.test(options=options), pytest.raises(UserError, match=says):
            read(file, [])


def test_whole_samples_of_a_tree_are_refused(tmp_path):
    (tmp_path / "run.yaml").write_text(
        WHOLE.format(policy="sd3", reward="digits", objective="{policy_gradient: {}}")
    )
    tree = "policy.sd3.tree={splits: 2}"
    read(tmp_path / "run.yaml", [tree, "objective.surrogate=cispo"])
    read(tmp_path / "run.yaml", ["objective.surrogate=gspo"])
    sampling = "objective.importance_sampling={level: %s}"
    read(tmp_path / "run.yaml", [tree, sampling % "token"])
    for whole in ("objective.surrogate=gspo", sampling % "sequence", sampling % "geometric"):
        with pytest.raises(UserError, match="follows single paths: remove .* tree"):
            read(tmp_path / "run.yaml", [tree, whole])
    policy = toys.ToyFlow(tree=Tree(splits=(1,)))
    rollout = policy.rollout(toys.prompts(2), 2, Rng.of(0))
    objective = PolicyGradient(surrogate=SURROGATES["gspo"])
    with pytest.raises(UserError, match="share the steps of a tree"):
        list(objective.points(policy, rollout, Rng.of(0)))


@pytest.mark.parametrize("level", ["sequence", "geometric"])
@pytest.mark.parametrize("kind", ["flow", "masked", "causal"])
def test_importance_weights_are_of_whole_samples_however_many_passes_score_them(level, kind):
    """What another sampler says of every decision, by a loop over the rollout."""
    policy = toys.make(kind)
    rollout = policy.rollout(toys.prompts(2), 3, Rng.of("whole"))
    gap = 0.2 * torch.randn(rollout.logprob.shape, generator=torch.Generator().manual_seed(0))
    source = rollout.provenance.replace(sampler_logprob=rollout.logprob - gap)
    rollout = rollout.replace(provenance=source)
    sampling = Importance(level=level, cap=1e9)
    seen = 0
    objective = PolicyGradient(importance_sampling=sampling)
    for point in objective.points(policy, rollout, Rng.of(0)):
        weight = sampling.weight(point)
        for row, name in enumerate(point.row_id.tolist()):
            gaps = gap[name][rollout.mask[name]].tolist()
            total = sum(gaps) / (1 if level == "sequence" else len(gaps))
            own = weight[row][point.mask[row]].tolist()
            assert own == pytest.approx([math.exp(total)] * len(own), rel=1e-4)
            seen += len(own)
    assert seen == int(rollout.mask.sum())


def test_whole_samples_in_parts_are_refused_where_tokens_are_compared():
    """Its coupling is taken up by the tokens that are held back."""
    policy = toys.ToyMasked()
    rollout = policy.rollout(toys.prompts(2), 2, Rng.of(0))
    with pytest.raises(UserError, match="compares whole samples"):
        list(ClipCov(surrogate=SURROGATES["gspo"]).points(policy, rollout, Rng.of(0)))


def test_a_written_clip_range_takes_the_place_of_a_presets(tmp_path):
    text = WHOLE.format(policy="vlm", reward="count", objective="{policy_gradient: {}}")
    (tmp_path / "run.yaml").write_text(text + "preset: verl/dapo\n")
    loaded = config.load(tmp_path / "run.yaml")
    assert loaded["objective"]["policy_gradient"]["surrogate"]["ppo"]["clip_high"] == 0.28
    written = text.replace("{policy_gradient: {}}", "{policy_gradient: {clip_range: 0.1}}")
    (tmp_path / "run.yaml").write_text(written + "preset: verl/dapo\n")
    objective = config.load(tmp_path / "run.yaml")["objective"]["policy_gradient"]
    assert objective["clip_range"] == 0.1 and objective["surrogate"] == {"ppo": {"dual_clip": 10.0}}
