"""On-policy distillation: closed forms of divergences, teachers that equal the policy, learning."""

from functools import partial

import pytest
import torch
import yaml
from torch.distributions import Categorical as Tokens
from torch.distributions import Normal
from torch.distributions import kl_divergence as known_kl

from mmrl import config
from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.core.distributions import Categorical, Gaussian
from mmrl.core.divergences import Divergence
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES
from mmrl.zoo.objectives.distillation import Distill, Teacher
from samplers.noise import Rng
from tests.core.test_contract import made
from tests.experiment.test_resume import resumes
from tests.fixtures import toys
from tests.policies.test_contract_policies import prompts_for

KINDS = ("reverse", "forward", "jensen_shannon")
FAMILIES = sorted(toys.POLICIES)
# one of each kind of distribution: steps, tokens scored from hidden states, with guidance, hidden
# ones, and those of two heads
MODELS = ("sd3", "vlm", "janus", "amused", "masked_lm", "janus_unified")


def teacher(make, **options):
    return Teacher(make, **options)


def moved(policy, by=0.05):
    """The policy with other weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.net.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += by * noise.to(parameter)
    return policy


def points_of(policy, objective, prompts):
    objective.setup(policy)
    with torch.no_grad():
        rollout = policy.rollout(prompts, 2, Rng.of("rollout"))
    advantage = torch.zeros_like(rollout.logprob[:, :1])
    return list(objective.points(policy, rollout.replace(advantage=advantage), Rng.of("points")))


def gradients(policy, objective, points):
    """The loss of all decisions, and its gradient."""
    policy.net.zero_grad()
    total = 0.0
    for point in points:
        loss = (objective.loss(policy, point) * point.mask).sum()
        loss.backward()
        total += loss.item()
    found = [p.grad.flatten() for p in policy.net.parameters() if p.grad is not None]
    return total, torch.cat(found).double()


# closed forms


def test_divergences_of_tokens_equal_torchs():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 4, 5, 7, generator=generator, dtype=torch.float64).unbind()
    of = {kind: Divergence(kind, 0.3) for kind in KINDS}
    mine = {kind: Categorical(p).kl(Categorical(q), of[kind]) for kind in KINDS}
    ours, theirs = Tokens(logits=p), Tokens(logits=q)
    between = Tokens(probs=0.3 * theirs.probs + 0.7 * ours.probs)
    torch.testing.assert_close(mine["reverse"], known_kl(ours, theirs))
    torch.testing.assert_close(mine["forward"], known_kl(theirs, ours))
    torch.testing.assert_close(
        mine["jensen_shannon"], 0.3 * known_kl(theirs, between) + 0.7 * known_kl(ours, between)
    )


def test_where_only_one_can_draw_a_token_the_mixture_stays_finite():
    p = Categorical(torch.tensor([[[0.0, -torch.inf]]]))
    q = Categorical(torch.tensor([[[0.0, 0.0]]]))
    assert p.kl(q, Divergence("reverse")).item() == pytest.approx(0.6931, abs=1e-4)
    assert q.kl(p, Divergence("reverse")).isinf() and p.kl(q, Divergence("forward")).isinf()
    both = torch.tensor([0.3, -0.2, -torch.inf], dtype=torch.float64, requires_grad=True)
    other = Categorical(torch.tensor([[[-1.0, 0.4, -torch.inf]]], dtype=torch.float64))
    for one, two in ((p, q), (Categorical(both[None, None]), other)):
        value = one.kl(two, Divergence("jensen_shannon"))
        assert value.isfinite()
    value.sum().backward()  # a token that is impossible in both spoils no gradient
    assert both.grad.isfinite().all() and both.grad[2] == 0


def gaussian(mean, std):
    return Gaussian(torch.tensor([[mean]]).double(), torch.tensor([[std]]).double())


@pytest.mark.parametrize("stds", [(0.5, 0.5), (0.5, 0.8)])
def test_divergences_of_steps_equal_torchs(stds):
    p, q = gaussian(0.3, stds[0]), gaussian(-0.4, stds[1])
    ours, theirs = Normal(p.mean, p.std), Normal(q.mean, q.std)
    torch.testing.assert_close(p.kl(q), known_kl(ours, theirs))
    torch.testing.assert_close(p.kl(q, Divergence("forward")), known_kl(theirs, ours))
    # p^0.7 q^0.3, normalised, from its precision and mean
    mix = 0.3
    precision = 0.7 / p.std**2 + mix / q.std**2
    mean = (0.7 * p.mean / p.std**2 + mix * q.mean / q.std**2) / precision
    between = Normal(mean, precision**-0.5)
    wanted = mix * known_kl(theirs, between) + (1 - mix) * known_kl(ours, between)
    torch.testing.assert_close(p.kl(q, Divergence("jensen_shannon", mix)), wanted)


# teachers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_from_itself_there_is_nothing_to_learn(kind, family):
    make = partial(toys.make, family, double=True)
    policy = make()
    objective = Distill([teacher(make)], divergence=Divergence(kind))
    points = points_of(policy, objective, toys.prompts(2))
    total, grad = gradients(policy, objective, points)
    assert abs(total) < 1e-12 and grad.abs().max() < 1e-12


@pytest.mark.parametrize(("name", "kind"), list(zip(MODELS, [*KINDS, *KINDS], strict=True)))
def test_real_classes_teach_themselves_nothing_and_another_something(name, kind):
    policy, twin = (made("policies", name) for _ in range(2))
    by = Divergence(kind)
    same, other = (Distill([teacher(lambda: twin)], divergence=by) for _ in range(2))
    for mine, its in zip(policy.net.parameters(), twin.net.parameters()):
        assert torch.equal(mine, its)  # built alike
    points = points_of(policy, same, prompts_for(policy)[:2])
    total, grad = gradients(policy, same, points)
    assert abs(total) < 1e-4 and grad.abs().max() < 1e-4
    moved(twin)
    other.setup(policy)
    total, grad = gradients(policy, other, points)
    assert total > 1e-4 and grad.abs().max() > 0
    assert not any(parameter.requires_grad for parameter in twin.net.parameters())
    if name in ("vlm", "janus"):
        for each in KINDS:
            assert_whole_vocabularies_are_compared(policy, twin, points, each)


def assert_whole_vocabularies_are_compared(policy, twin, points, kind):
    """At every token."""
    objective = Distill([teacher(lambda: twin)], divergence=Divergence(kind))
    objective.setup(policy)
    for point in points:
        with torch.no_grad():
            mine, its = policy.dist(point), twin.dist(point)
            full = [
                dist._head("full", policy.warp.untruncated).double().exp() for dist in (mine, its)
            ]
            ours, theirs = (Tokens(probs=probs) for probs in full)
            between = Tokens(probs=(full[0] + full[1]) / 2)
            wanted = {
                "reverse": known_kl(ours, theirs),
                "forward": known_kl(theirs, ours),
                "jensen_shannon": (known_kl(ours, between) + known_kl(theirs, between)) / 2,
            }[kind]
            found = objective.loss(policy, point)[mine.where].double()
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-3)


def test_a_step_costs_the_squared_distance_of_the_means():
    policy = toys.make("flow", double=True)
    objective = Distill([teacher(lambda: moved(toys.make("flow", double=True)))])
    for point in points_of(policy, objective, toys.prompts(2)):
        mine, its = policy.dist(point), objective.loaded[0].dist(point)
        square = ((mine.mean - its.mean) ** 2).flatten(1).mean(1, keepdim=True)
        wanted = square / (2 * mine.std.flatten(1)[:, :1] ** 2)
        torch.testing.assert_close(objective.loss(policy, point), wanted)


def test_teachers_add_up_by_their_weights():
    policy = toys.make("causal", double=True)
    makers = [lambda: moved(toys.make("causal", double=True)), partial(toys.make, "causal", True)]
    alone = Distill([teacher(makers[0])])
    both = Distill([teacher(makers[0], weight=0.25), teacher(makers[1], weight=3.0)], weight=2.0)
    first = gradients(policy, alone, points_of(policy, alone, toys.prompts(2)))
    second = gradients(policy, both, points_of(policy, both, toys.prompts(2)))
    assert second[0] == pytest.approx(0.5 * first[0])  # the other one is the policy itself
    torch.testing.assert_close(second[1], 0.5 * first[1])


def test_beside_rewards_it_is_added_to_their_policy_gradient():
    policy = toys.make("causal", double=True)
    make = partial(toys.make, "causal", double=True)
    alone = Distill([teacher(lambda: moved(make()))])
    mixed = Distill([teacher(lambda: moved(make()))], reward_weight=0.5, clip_range=0.1)
    plain = config.build({"policy_gradient": {"clip_range": 0.1}}, OBJECTIVES)
    assert mixed.requires.compares and not alone.requires.compares
    (point,) = points_of(policy, mixed, toys.prompts(2))
    alone.setup(policy)
    point = point.replace(advantage=torch.linspace(-1, 1, len(point), dtype=torch.float64)[:, None])
    wanted = alone.loss(policy, point) + 0.5 * plain.loss(policy, point)
    torch.testing.assert_close(mixed.loss(policy, point), wanted)


def trainer_of(family, **sizes):
    objective = Distill([teacher(lambda: moved(toys.make(family), 0.3))])
    sizes = {"prompts_per_iteration": 2, "group_size": 8, "seed": 1} | sizes
    return toys.trainer(family, objective, lr=1e-2, data=toys.prompts(2), **sizes)


def test_a_policy_comes_to_its_teacher():
    trainer = trainer_of("causal")
    distances = [trainer.iterate()["distillation"] for _ in range(12)]
    assert sum(distances[-2:]) / 2 < 0.5 * distances[0], distances


# as a configuration


WHOLE = {
    "policy": "tests.fixtures.toys:ToyCausal",
    "data": {"prompts": {"path": "prompts.jsonl", "held_out": 0.25}},
    "reward": {"tests.fixtures.toys:reward": 1.0},
    "objective": {"distill": {"teachers": [{"policy": "tests.fixtures.toys:ToyCausal"}]}},
    "optimizer": {"adamw": {"lr": 1e-2}},
    "train": {
        "prompts_per_iteration": 4,
        "group_size": 2,
        "train_batch_size": 4,
        "iterations": 4,
        "save_every": 2,
    },
    "evaluate": {"prompts": 2, "num_samples": 2},
    "log": {"tensorboard": False},
}


def written(folder, **changes):
    rows = "".join(f'{{"text": "p{i}", "label": {i % 2}}}\n' for i in range(16))
    (folder / "prompts.jsonl").write_text(rows)
    file = folder / "distill.yaml"
    file.write_text(yaml.safe_dump(WHOLE | changes))
    return file


def distill(*policies):
    return {"distill": {"teachers": [{"policy": policy} for policy in policies]}}


def test_a_run_resumes_to_the_bit(tmp_path):
    resumes(partial(trainer_of, "causal"), tmp_path)


def test_a_dry_run_loads_no_teacher(tmp_path, monkeypatch):
    def never(policy):
        raise AssertionError("a teacher was loaded")

    monkeypatch.setattr("mmrl.zoo.objectives.distillation._frozen", never)
    dry_run(written(tmp_path), [])


@pytest.mark.parametrize(
    ("teachers", "says"),
    [
        ([], "name at least one"),
        (["tests.fixtures.toys:ToyFlow"], "makes other decisions than ToyCausal"),
        ([{"tests.fixtures.toys:ToyFlow": {"step": 3}}], "teachers.0.policy.*unknown option"),
        (["tests.fixtures.toys:prompts"], "a policy is a class with rollout and decode"),
    ],
)
def test_a_teacher_that_cannot_teach_is_named(tmp_path, teachers, says):
    from mmrl.experiment.lifecycle import train

    with pytest.raises(UserError, match=says):
        train(written(tmp_path, objective=distill(*teachers)), [f"run={tmp_path / 'run'}"])


def test_a_teacher_of_another_vocabulary_is_named_before_anything_is_learnt():
    policy = toys.make("causal")

    def larger():
        other = toys.make("causal")
        other.dist = lambda point: Categorical(torch.zeros(len(point), 6, 9))
        return other

    objective = Distill([teacher(larger)])
    objective.loaded = [larger()]
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(2), 2, Rng.of("rollout"))
    (point,) = policy.path(rollout.replace(advantage=torch.zeros(4, 1)))
    with pytest.raises(UserError, match=r"teachers\[0\].policy cannot say .* another vocabulary"):
        objective.loss(policy, point)
