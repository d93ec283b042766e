"""Few-step students: a teacher whose ODE is known in closed form, gradients by a loop, learning."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from mmrl import config
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES, OBJECTIVES
from mmrl.policies.contracts import EncodesMedia
from mmrl.policies.diffusion import few_step as sampling
from mmrl.policies.diffusion.flow_policy import FlowPolicy, demonstrated
from mmrl.scoring import Scorer
from mmrl.train.device import Device
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.objectives.consistency import Consistency
from mmrl.zoo.objectives.distribution_matching import FAKE, DistributionMatching, Noising
from samplers.noise import Rng
from samplers.processes import Consistent, Diffusion, Flow, noised
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


def test_loss_and_gradient_of_consistency_by_a_loop():
    policy = Points()
    teacher = Exact(0.5)
    objective = Consistency(teacher=lambda: teacher, teacher_steps=10, huber_c=0.1)
    (point,) = points_of(policy, objective, rows(6))
    old = toys.mlp(5, 2).double()
    with torch.no_grad():
        for mine, its, kept in zip(
            policy.net.parameters(), old.parameters(), policy.weights.saved["old"].values()
        ):
            mine.add_(0.1)  # the average stays behind
            assert torch.equal(its, kept)
    loss = objective.loss(policy, point)
    loss.sum().backward()
    gradients = [p.grad.clone() for p in policy.net.parameters()]
    policy.net.zero_grad()

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
    total.backward()
    for mine, parameter in zip(gradients, policy.net.parameters()):
        torch.testing.assert_close(mine, parameter.grad)


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


def test_where_fake_and_real_agree_nothing_moves():
    policy = Points(steps=3)
    objective = DistributionMatching()
    (point,) = points_of(policy, objective, rows(8))
    objective.loss(policy, point).sum().backward()
    assert all(not parameter.grad.any() for parameter in policy.net.parameters())


def test_loss_and_gradient_of_distribution_matching_by_a_loop():
    policy = Points(steps=3)
    teacher = Exact(0.5)
    objective = DistributionMatching(teacher=lambda: teacher)
    (point,) = points_of(policy, objective, rows(6))
    fake = toys.mlp(5, 2).double()
    with torch.no_grad():
        for mine in policy.net.parameters():
            mine.add_(0.1)
    objective.loss(policy, point).sum().backward()
    gradients = [p.grad.clone() for p in policy.net.parameters()]
    policy.net.zero_grad()
    drawn = point.coupled(Noising)
    assert len(point.time.unique()) > 1 and drawn.time.min() > 0.02 and drawn.time.max() < 0.98
    for i in range(len(point)):
        x, t, tau = point.state[i : i + 1], point.time[i], drawn.time[i]
        mean = MEANS[[int(point.group[i]) % 2]]
        jump = x - t * policy.net(torch.cat([x, t.view(1, 1), mean], 1))
        with torch.no_grad():
            again = (1 - tau) * jump + tau * drawn.noise[i : i + 1]
            real = again - tau * teacher.velocity(again, tau[None], {"mean": mean})
            said = again - tau * fake(torch.cat([again, tau.view(1, 1), mean], 1))
            direction = (said - real) / (jump - real).abs().mean()
        (jump * direction / 2).sum().backward()  # mean over two dimensions
    for mine, parameter in zip(gradients, policy.net.parameters()):
        torch.testing.assert_close(mine, parameter.grad)


def test_the_fake_model_learns_what_the_student_predicts():
    policy = Points(steps=3)
    critic = DistributionMatching(teacher=partial(Exact, 0.5)).critic()
    policy.weights.keep(FAKE)
    with torch.no_grad():
        rollout = policy.rollout(rows(6), 1, Rng.of("a"))
        for mine in policy.net.parameters():
            mine.add_(0.1)
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


def trainer_of(objective, steps=1, count=32, lr=3e-3, **options):
    policy = Points(steps=steps, double=False)
    policy.net.requires_grad_(True)
    sizes = {"prompts_per_iteration": count, "group_size": 1, "train_batch_size": count}
    return Trainer(
        policy,
        rows(64),
        Scorer.nothing() if objective.requires.supervised else Scorer({"any": toys.reward}),
        ADVANTAGES["dance_grpo"],
        objective,
        partial(adamw, lr=lr),
        TrainOptions(**sizes | {"iterations": 1, "max_grad_norm": 1.0, "seed": 3} | options),
    )


def spread(policy, steps=1):
    """(distance of the mean, standard deviation) of what the policy samples around its means."""
    policy.evaluation_times = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(rows(64), 8, Rng.of("judge"))
    off = rollout.sample - rollout.cond["mean"][rollout.group]
    return off.mean(0).norm().item(), off.std(0).mean().item()


def single(**options):
    return partial(Exact, 0.5, double=False, **options)


def test_a_student_of_one_step_beats_its_teacher_at_one_step():
    width = spread(Euler(0.5, double=False))[1]
    assert width < 1e-6  # the teacher's one step ends at the mean
    objective = Consistency(teacher=single(), teacher_steps=16, target_decay=0.0)
    objective.num_noise_draws = 4
    trainer = trainer_of(objective)
    for _ in range(60):
        metrics = trainer.iterate()
    mean, width = spread(trainer.policy)
    assert mean < 0.25 and 0.35 < width < 0.65, (mean, width)
    assert metrics["consistency_error"] < 0.02


class Euler(Exact):
    """The teacher, sampled by steps of its ODE."""

    renews = False


def test_distribution_matching_finds_the_width():
    steps = 2
    objective = DistributionMatching(teacher=single(), fake_steps=3, fake_lr=1e-2)
    trainer = trainer_of(objective, steps)
    for _ in range(60):
        metrics = trainer.iterate()
    mean, width = spread(trainer.policy, steps)
    assert mean < 0.3 and 0.3 < width < 0.75, (mean, width)
    assert {"fake/error", "fake/grad_norm", "dmd/direction"} <= set(metrics)
    assert "error" not in metrics and trainer.critic.inner.step == 3 * trainer.update.step


@pytest.mark.parametrize("make", [Consistency, DistributionMatching])
def test_a_run_resumes_to_the_bit(make, tmp_path):
    def fresh():
        return trainer_of(make(), count=4, micro_batch_size=3, ema=0.9, precision="bf16")

    resumes(fresh, tmp_path)


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


@pytest.mark.parametrize("micro", [1, 3])
def test_passes_change_nothing(micro):
    def weights(size):
        trainer = trainer_of(
            DistributionMatching(teacher=partial(Exact, 0.5)), 2, 4, micro_batch_size=size
        )
        trainer.policy.net.double()
        trainer.iterate()
        return torch.cat([p.flatten() for p in trainer.policy.net.parameters()])

    torch.testing.assert_close(weights(micro), weights(4), rtol=0, atol=1e-6)


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


def test_a_teacher_of_another_latent_space_is_refused():
    objective = DistributionMatching(teacher=partial(toys.make, "video"))
    with pytest.raises(UserError, match="objective.dmd.teacher: .*latent space"):
        objective.setup(toys.make("flow"))


def test_a_row_without_a_picture_names_the_objectives_own_option():
    with pytest.raises(UserError, match="no 'answer'.* another with objective.consistency.field"):
        Consistency().check(Points(), [{"text": "a red cat"}])


def test_a_scaled_loss_is_refused_since_the_fake_models_is_not(monkeypatch):
    monkeypatch.setattr(Device, "scales_loss", True)
    with pytest.raises(UserError, match="precision fp16: the snapshot fake learns .* use bf16"):
        trainer_of(DistributionMatching(teacher=single()), 2, 4)
