"""Few-step students: a teacher whose ODE is known in closed form, gradients by a loop, learning."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from mmrl import config
from mmrl.advantages import dance_grpo
from mmrl.config.compatibility import unfit_for_data
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES
from mmrl.core.types import SamplerState, Transition
from mmrl.experiment.build import read
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.policies.contracts import EncodesMedia
from mmrl.policies.diffusion import few_step as sampling
from mmrl.policies.diffusion.flow_policy import FlowPolicy, demonstrated
from mmrl.train.device import Device
from mmrl.zoo.objectives.consistency import Consistency
from mmrl.zoo.objectives.distribution_matching import FAKE, DistributionMatching, Noising
from rewards.card import card
from samplers.noise import Rng
from samplers.processes import Consistent, Diffusion, Flow, noised
from samplers.windows import between_steps
from tests.experiment.test_resume import resumes
from tests.fixtures import toys

MEANS = torch.tensor([[1.0, -2.0], [-1.5, 0.5]], dtype=torch.float64)
ALPHAS = Diffusion().alphas


class Points(FlowPolicy, EncodesMedia):
    """Points of the plane around the mean of their label, by a small network."""

    shape = (2,)
    renews = True
    capabilities = replace(FlowPolicy.capabilities, makes="image")

    def __init__(self, process=None, net=None, double=True, **options):
        self.process = process or Flow()
        chosen = {"steps": 1} | sampling.OPTIONS | options
        net = net or toys.mlp(5, 2)
        super().__init__(net.double() if double else net, **chosen)

    def encode(self, prompts):
        return {"mean": MEANS[[p["label"] for p in prompts]].to(self.dtype)}

    def velocity(self, x, t, cond):
        return self.active()(torch.cat([x, t[:, None], cond["mean"]], 1))

    def encode_media(self, media):
        return media

    def demonstrate(self, prompts, answers, rng, *, score=True):
        return demonstrated(self, prompts, answers, rng)

    def decode(self, rollout):
        return rollout.sample


class Exact(Points):
    """The network of Gaussian data of standard deviation ``width``, and (``jumps``) the one whose
    prediction of the data is where the ODE ends."""

    def __init__(self, width=0.5, jumps=False, **options):
        super().__init__(net=torch.nn.Linear(1, 1), **options)
        self.width = width
        self.jumps = jumps

    def velocity(self, x, t, cond):
        alpha, sigma = self.process.scales(t, x)
        centred = x - alpha * cond["mean"]
        variance = (alpha * self.width) ** 2 + sigma**2
        clean = cond["mean"] + alpha * self.width**2 / variance * centred
        if self.jumps and isinstance(self.process, Consistent):
            # the ODE ends at timestep 0, where such a model leaves states as they are
            first, rest = self.process.scales(1 / len(ALPHAS), x)
            end = ((first * self.width) ** 2 + rest**2).sqrt() / variance.sqrt()
            clean = first * cond["mean"] + end * centred
            skip, keep = self.process._boundary(t, x)
            clean = torch.where(keep > 0, (clean - skip * x) / keep, x)
        elif self.jumps:
            clean = cond["mean"] + self.width / variance.sqrt() * centred
        # what says so of the data, plus nothing that the trained weights change
        noise = (x - alpha * clean) / sigma
        return (noise - clean if isinstance(self.process, Flow) else noise) + 0 * self.net.weight


def teacher():
    return Exact(0.5)


def rows(count=40, width=0.5):
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(count, 2, generator=draw, dtype=torch.float64)
    return [
        {"text": str(i), "label": i % 2, "answer": MEANS[i % 2] + width * noise[i]}
        for i in range(count)
    ]


def points_of(policy, objective, prompts):
    for name in objective.snapshots:
        policy.weights.keep(name)
    objective.setup(policy)
    if objective.requires.supervised:
        rollout = policy.demonstrate(prompts, [p["answer"] for p in prompts], Rng.of("a"))
    else:
        with torch.no_grad():
            rollout = policy.rollout(prompts, 1, Rng.of("a"))
    rollout = rollout.replace(advantage=torch.zeros_like(rollout.logprob[:, :1]))
    return list(objective.points(policy, rollout, Rng.of("b")))


PROCESSES = {
    "flow": (Flow(), Flow()),
    "epsilon": (Consistent("epsilon", ALPHAS), Diffusion("epsilon", ALPHAS)),
}


@pytest.mark.parametrize("name", PROCESSES)
def test_the_known_jump_costs_nothing_as_the_teachers_steps_become_short(name):
    ours, theirs = PROCESSES[name]

    def cost(steps, width):
        student = Exact(width, jumps=True, process=ours)
        objective = Consistency(
            teacher=partial(Exact, width, process=theirs),
            teacher_steps=steps,
            distance="square",
            num_noise_draws=8,
        )
        points = points_of(student, objective, rows(width=width))
        with torch.no_grad():
            return torch.cat([objective.loss(student, point) for point in points])

    # all at one point: the teacher's paths are straight
    assert cost(50, 0.0).max() < (1e-16 if name == "flow" else 1e-8)
    coarse, fine = cost(25, 0.5).mean(), cost(50, 0.5).mean()
    # a step's error is its length squared
    assert fine > 1e-12 and coarse / fine > (12 if name == "flow" else 3)
    if name == "flow":
        other = Exact(0.5, process=ours)  # many-step: no consistency function
        objective = Consistency(teacher=partial(Exact, 0.5), distance="square")
        (point,) = points_of(other, objective, rows())
        assert objective.loss(other, point).mean() > 100 * fine


def slopes_of(policy, loss):
    weights = list(policy.net.parameters())
    slopes = torch.autograd.grad(loss.sum(), weights, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(slopes, weights)]


def moved_on(policy, by=0.1):
    """Trained weights that have left their snapshots behind."""
    with torch.no_grad():
        for parameter in policy.net.parameters():
            parameter.add_(by)


def test_loss_and_gradient_of_consistency_by_a_loop():
    policy = Points()
    teacher = Exact(0.5)
    objective = Consistency(teacher=lambda: teacher, teacher_steps=10, huber_c=0.1)
    (point,) = points_of(policy, objective, rows(6))
    old = toys.mlp(5, 2).double()
    for its, kept in zip(old.parameters(), policy.weights.saved["old"].values()):
        assert torch.equal(its, kept)
    moved_on(policy)
    loss = objective.loss(policy, point)
    total = 0.0
    for i in range(len(point)):
        x, t = point.state[i : i + 1], point.time[i]
        mean = MEANS[[int(point.group[i]) % 2]]
        s = (t * 10).round() / 10 - 0.1
        with torch.no_grad():
            ahead = x + teacher.velocity(x, t[None], {"mean": mean}) * (s - t)
            goal = ahead - s * old(torch.cat([ahead, s.view(1, 1), mean], 1))
            if s < 1e-9:
                goal = ahead
        jump = x - t * policy.net(torch.cat([x, t.view(1, 1), mean], 1))
        each = ((jump - goal) ** 2 + 0.1**2).sqrt() - 0.1
        torch.testing.assert_close(loss[i, 0], each.mean())
        total = total + each.mean()
    torch.testing.assert_close(slopes_of(policy, loss), slopes_of(policy, total))


def test_discrete_times_are_those_of_lcm():
    """LCM's script: timesteps 19, 39, ... 999, and the one before, at least 0."""
    policy = Exact(jumps=True, process=PROCESSES["epsilon"][0])
    objective = Consistency(teacher=partial(Exact, process=PROCESSES["epsilon"][1]))
    times = torch.cat([p.time for p in points_of(policy, objective, rows(40)) for _ in (0,)])
    steps = policy.process.timestep(times)
    assert ((steps + 1) % 20 == 0).all() and len(steps.unique()) > 10
    nexts = policy.process.timestep(objective.next_time(policy, times))
    assert torch.equal(nexts, (steps - 20).clamp_min(0))


# distribution matching


def test_loss_and_gradient_of_distribution_matching_by_a_loop():
    """Where fake and real agree nothing moves."""
    policy = Points(steps=3)
    teacher = Exact(0.5)
    equal = DistributionMatching()
    (point,) = points_of(policy, equal, rows(8))
    assert not any(slope.any() for slope in slopes_of(policy, equal.loss(policy, point)))
    objective = DistributionMatching(teacher=lambda: teacher)
    (point,) = points_of(policy, objective, rows(6))
    fake = toys.mlp(5, 2).double()
    moved_on(policy)
    found = slopes_of(policy, objective.loss(policy, point))
    drawn = point.coupled(Noising)
    assert len(point.time.unique()) > 1 and drawn.time.min() > 0.02 and drawn.time.max() < 0.98
    total = 0.0
    for i in range(len(point)):
        x, t, tau = point.state[i : i + 1], point.time[i], drawn.time[i]
        mean = MEANS[[int(point.group[i]) % 2]]
        jump = x - t * policy.net(torch.cat([x, t.view(1, 1), mean], 1))
        with torch.no_grad():
            again = (1 - tau) * jump + tau * drawn.noise[i : i + 1]
            real = again - tau * teacher.velocity(again, tau[None], {"mean": mean})
            claimed = again - tau * fake(torch.cat([again, tau.view(1, 1), mean], 1))
            direction = (claimed - real) / (jump - real).abs().mean()
        total = total + (jump * direction / 2).sum()  # mean over two dimensions
    torch.testing.assert_close(found, slopes_of(policy, total))


def test_the_fake_model_learns_what_the_student_predicts():
    policy = Points(steps=3)
    critic = DistributionMatching(teacher=partial(Exact, 0.5)).critic()
    policy.weights.keep(FAKE)
    with torch.no_grad():
        rollout = policy.rollout(rows(6), 1, Rng.of("a"))
    moved_on(policy)
    (point,) = critic.objective.points(policy, rollout, Rng.of("b"))
    with policy.weights.using(FAKE):
        loss = critic.objective.loss(policy, point)
        fake = [p.detach().clone() for p in policy.net.parameters()]
    drawn = point.coupled(Noising)
    cond = torch.cat([point.time[:, None], MEANS[point.group % 2]], 1)
    jump = point.state - point.time[:, None] * policy.net(torch.cat([point.state, cond], 1))
    again = noised(Flow(), jump.detach(), drawn.noise, drawn.time)
    for mine, its in zip(policy.net.parameters(), fake):
        mine.data.copy_(its)
    cond = torch.cat([drawn.time[:, None], MEANS[point.group % 2]], 1)
    error = policy.net(torch.cat([again, cond], 1)) - (drawn.noise - jump.detach())
    torch.testing.assert_close(loss[:, 0], error.square().mean(1))


# training


def trainer_of(objective, steps=1, count=32, lr=3e-3, double=False, reward=toys.reward, **options):
    policy = Points(steps=steps, double=double)
    policy.net.requires_grad_(True)
    sizes = {"prompts_per_iteration": count, "group_size": 1, "train_batch_size": count, "seed": 3}
    if objective.requires.supervised and not objective.requires.differentiates:
        reward = None
    return toys.trainer(policy, objective, reward, dance_grpo, lr, data=rows(64), **sizes | options)


def spread(policy, steps=1):
    """(distance of the mean, standard deviation) of what the policy samples around its means."""
    policy.evaluation_times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(rows(64), 8, Rng.of("judge"))
    off = rollout.sample - rollout.cond["mean"][rollout.group]
    return off.mean(0).norm().item(), off.std(0).mean().item()


def single(**options):
    return partial(Exact, 0.5, double=False, **options)


class Euler(Exact):
    """The teacher, sampled by steps of its ODE."""

    renews = False


def test_a_student_of_one_step_beats_its_teacher_at_one_step():
    width = spread(Euler(0.5, double=False))[1]
    assert width < 1e-6  # the teacher's one step ends at the mean
    objective = Consistency(teacher=single(), teacher_steps=16, target_decay=0.0)
    objective.num_noise_draws = 4
    trainer = trainer_of(objective, lr=6e-3)
    for _ in range(28):
        metrics = trainer.iterate()
    mean, width = spread(trainer.policy)
    assert mean < 0.25 and 0.35 < width < 0.65, (mean, width)
    assert metrics["consistency_error"] < 0.02


def test_distribution_matching_finds_the_width():
    steps = 2
    objective = DistributionMatching(teacher=single(), fake_steps=3, fake_lr=1e-2)
    trainer = trainer_of(objective, steps, lr=1e-2)
    for _ in range(36):
        metrics = trainer.iterate()
    mean, width = spread(trainer.policy, steps)
    assert mean < 0.3 and 0.3 < width < 0.75, (mean, width)
    assert {"fake/error", "fake/grad_norm", "dmd/direction"} <= set(metrics)
    assert "error" not in metrics and trainer.critic.inner.step == 3 * trainer.update.step


def test_the_fake_model_has_an_optimizer_of_its_own():
    trainer = trainer_of(DistributionMatching(teacher=single(), fake_lr=0.5), count=4)
    before = {k: v.clone() for k, v in trainer.policy.weights.saved[FAKE].items()}
    trainer.iterate()
    inner = trainer.critic.inner
    assert inner.optimizer is not trainer.update.optimizer
    assert inner.optimizer.param_groups[0]["lr"] == 0.5 != trainer.update.lrs[0]
    moved = [(v - before[k]).abs().max() for k, v in trainer.policy.weights.saved[FAKE].items()]
    live = [p.detach() - before[k] for k, p in trainer.policy.weights.parameters().items()]
    assert max(moved) > 0.1 > max(x.abs().max() for x in live) > 0


@pytest.mark.parametrize(
    ("options", "policy", "says"),
    [
        ({"dmd": {"time_range": [0.5, 0.5]}}, {}, "the first the smaller, not 0.5 and 0.5"),
        ({"consistency": {}}, {"process": Diffusion()}, "set the policy's option scheduler to lcm"),
        ({"dmd": {}}, {"guidance_scale": 2.0}, "set the policy's guidance_scale to 1"),
    ],
)
def test_what_does_not_fit_is_said(options, policy, says):
    with pytest.raises(UserError, match=says):
        objective = config.build(options, OBJECTIVES)
        raise UserError("; ".join(why for _, why in objective.unfit(Points(**policy))))


def test_what_does_not_fit_a_run_is_refused(monkeypatch):
    objective = DistributionMatching(teacher=partial(toys.make, "video"))
    with pytest.raises(UserError, match="objective.dmd.teacher: .*latent space"):
        objective.setup(toys.make("flow"))
    with pytest.raises(UserError, match="no 'answer'.* another with objective.consistency.field"):
        Consistency().check(Points(), [{"text": "a red cat"}])
    monkeypatch.setattr(Device, "scales_loss", True)
    with pytest.raises(UserError, match="precision fp16: the snapshot fake learns .* use bf16"):
        trainer_of(DistributionMatching(teacher=single()), 2, 4)


# Rewards beside distillation


@card(differentiable=True)
def to_the_right(media, prompts):
    return 0.5 * media[:, 0]


def rewarded(objective, reward=to_the_right, steps=3, **options):
    sizes = {"group_size": 4, "train_batch_size": 16} | options
    return trainer_of(objective, steps, 4, double=True, reward=reward, **sizes)


def gradients(objective, **options):
    one = rewarded(objective, **options)
    batch = one.collect()
    with torch.no_grad():
        for parameter in one.policy.net.parameters():
            parameter.add_(0.02)  # so that ratios are not 1
    return one.update.gradient(batch, batch.rollout)


@pytest.mark.parametrize("micro", [None, 3])
def test_its_gradient_is_the_sum_of_both(micro):
    alone = gradients(DistributionMatching(teacher=teacher))
    rewards = gradients(PolicyGradient(clip_range=0.3))
    mixed = DistributionMatching(teacher=teacher, reward_weight=0.7, clip_range=0.3)
    for both, matching, policy in zip(gradients(mixed, micro_batch_size=micro), alone, rewards):
        torch.testing.assert_close(both, matching + 0.7 * policy, rtol=1e-6, atol=1e-9)
        assert policy.abs().max() > 1e-3 and matching.abs().max() > 1e-3


def test_without_a_weight_nothing_is_changed():
    """To the bit: points, losses, gradients and what is kept."""
    plain = DistributionMatching(teacher=teacher)
    mixed = DistributionMatching(teacher=teacher, reward_weight=0.5)
    policy = Points(steps=3)
    (alone,) = points_of(policy, plain, rows(6))
    matched, *decisions = points_of(policy, mixed, rows(6))
    assert torch.equal(alone.state, matched.state) and type(matched.step) is SamplerState
    assert all(type(point.step) is Transition for point in decisions) and len(decisions) == 2
    assert torch.equal(plain.loss(policy, alone), mixed.loss(policy, matched))
    assert not plain.requires.compares and not plain.requires.visits
    assert mixed.requires.compares and mixed.requires.visits
    assert plain.state_dict() == {} and plain.snapshots == ("fake",) == mixed.snapshots


def test_decisions_and_states_without_a_score_are_left_out():
    """And processes with fewer passes of one kind fill them up by that kind."""

    def some(media, prompts):
        return torch.where(media[:, 1] < 0, torch.nan, to_the_right(media, prompts))

    objective = DistributionMatching(teacher=teacher, reward_weight=0.5)
    one = rewarded(objective, some, max_reward_failure_rate=1.0, micro_batch_size=4)
    one.scorer.max_failures = 1.0
    batch = one.collect()
    alive = batch.rollout.alive()
    assert 0 < alive.sum() < len(alive)
    points = one.update.passes.points(batch.rollout, Rng.of("u"), False)
    count, cut = one.update.passes.cut(batch, points, 4, Rng.of("u"))
    kinds = [type(point.step) for point in cut]
    states = -(-int(alive.sum()) // 4)
    assert kinds == [SamplerState] * states + [Transition] * (count - states)


def test_a_run_resumes_to_the_bit(tmp_path):
    def fresh():
        objective = Consistency(reward_weight=0.5, num_noise_draws=2)
        sizes = {"group_size": 1, "train_batch_size": 4, "micro_batch_size": 3}
        return rewarded(objective, ema=0.9, precision="bf16", **sizes)

    resumes(fresh, tmp_path)


def test_consistency_beside_rewards_by_a_loop():
    """The loss and its gradient: the distance, less beta times the reward of the jump."""
    policy = Points()
    plain = Consistency(teacher=teacher, teacher_steps=10)
    mixed = Consistency(teacher=teacher, teacher_steps=10, reward_weight=0.4)
    mixed.attach(toys.smooth_reward)
    assert mixed.requires.differentiates and not plain.requires.differentiates
    (point,) = points_of(policy, plain, rows(6))
    (same,) = points_of(policy, mixed, rows(6))
    losses = [plain.loss(policy, point), mixed.loss(policy, same)]
    cond = torch.cat([point.time[:, None], policy.encode(rows(6))["mean"][point.group]], 1)
    jump = point.state - point.time[:, None] * policy.net(torch.cat([point.state, cond], 1))
    earned = -(jump - 1).square().mean(1)
    torch.testing.assert_close(losses[1][:, 0], losses[0][:, 0] - 0.4 * earned)
    parts = [slopes_of(policy, x) for x in (losses[1], losses[0], -0.4 * earned)]
    for whole, by_distance, by_reward in zip(*parts):
        torch.testing.assert_close(whole, by_distance + by_reward)
        assert by_reward.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dmd": {"clip_range": 0.1}}, "objective.dmd.clip_range: .* set reward_weight"),
        ({"dmd": {"reward_weight": 1.0, "surrogate": "gspo"}}, "dmd.surrogate: .* choose the"),
    ],
)
def test_options_that_do_nothing_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        config.build(options, OBJECTIVES)


def test_samplers_without_noise_and_means_over_rows_are_refused():
    mixed = DistributionMatching(teacher=teacher, reward_weight=1.0)
    with pytest.raises(UserError, match="none of the sampler's steps draws noise"):
        rewarded(mixed, steps=1).iterate()
    policy = Points(steps=1, noise_window=between_steps)
    assert len(points_of(policy, DistributionMatching(teacher=teacher), rows(4))) == 1
    sizes = {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 16, "iterations": 1}
    train = TrainOptions(**sizes, loss_agg_mode="seq_mean_token_mean")
    (why,) = unfit_for_data(train, mixed, Points)
    assert why.startswith("train.loss_agg_mode: seq_mean_token_mean, but the objective sums two")
    assert not list(unfit_for_data(train, DistributionMatching(teacher=teacher), Points))


WHOLE = """
policy: {sd3: {path: "world:digits/sd3-test", size: 32, steps: 2, scheduler: lcm}}
data: {digits: {kind: single, pictures: 2}}
reward: {%s: 1.0}
objective: {consistency: {reward_weight: %s}}
optimizer: {adamw: {lr: 1e-3}}
train: {prompts_per_iteration: 4, group_size: 1, train_batch_size: 4, iterations: 1}
"""


def test_rewards_without_a_gradient_are_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "run.yaml").write_text(WHOLE % ("jpeg_compressibility", 0.1))
    with pytest.raises(UserError, match="reward 'jpeg_compressibility' cannot be used"):
        read(tmp_path / "run.yaml", [])
    for reward, weight in (("jpeg_compressibility", 0.0), ("digits", 0.1)):
        (tmp_path / "run.yaml").write_text(WHOLE % (reward, weight))
        read(tmp_path / "run.yaml", [])
