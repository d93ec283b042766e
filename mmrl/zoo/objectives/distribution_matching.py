"""Distribution matching distillation: a few-step student learns its teacher's distribution from the
difference of two scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.nn.functional import softplus

from mmrl.core.distributed import all_sum
from mmrl.core.effects import Requires
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.numbers import Count
from mmrl.core.registry import LATER, OBJECTIVES, POLICIES
from mmrl.core.types import Fields, Point, Prompt, Rollout, SamplerState, Transition
from mmrl.core.weights import LIVE
from mmrl.objectives.base import Critic, Head, Objective
from mmrl.objectives.contracts import ChecksRows, HasCritic, HasTeacher
from mmrl.objectives.decisions import WHOLE
from mmrl.objectives.forward_process import mean_square, velocity
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.objectives.terms import KLPenalty, TimestepShare, TimestepWeighting
from mmrl.policies.base import Policy, unwrapped
from mmrl.policies.capabilities import capabilities_of
from mmrl.policies.contracts import Branches, Demonstrates
from mmrl.zoo.objectives import few_step
from mmrl.zoo.objectives.discriminator import (
    Discriminator,
    Gan,
    Pictures,
    by_token,
    reading,
)
from samplers.noise import Rng
from samplers.processes import noised

FAKE = "fake"  # the snapshot that learns the student's distribution


@dataclass(frozen=True, kw_only=True)
class Noising(Fields):
    """Says how the student's prediction at a point is noised again."""

    time: Tensor  # [B]
    noise: Tensor  # [B, *]


@dataclass(frozen=True, kw_only=True)
class Judged(Noising):
    """Holds a real picture beside it, and its noise at the same time."""

    real: Tensor  # [B, *]
    real_noise: Tensor  # [B, *]


Range = tuple[float, float]


@OBJECTIVES.register("dmd")
class DistributionMatching(PolicyGradient, HasTeacher, ChecksRows, HasCritic):
    """Match a many-step teacher's distribution with a few-step student (DMD, as in DMD2).

    Yin et al. 2024, "One-step diffusion with distribution matching distillation", eq. 7 and 8, and
    "Improved distribution matching distillation", without regression: the student samples with its
    few steps; at a random one it predicts the data, which gets fresh noise; there the teacher
    ("real") and a model of the student's samples ("fake") predict the data, and the student's
    prediction moves by their difference, over the mean distance of prediction and teacher. Before
    each step the fake model takes ``fake_steps`` steps with the denoising loss on such predictions.
    It is a trained snapshot, initialised from the student's weights (with lora: adapters on the
    same base), with an optimizer like the student's.

    teacher: a policy with the student's latents and conditions; null: the initial weights.
    guidance_scale: of the teacher. fake_lr: the learning rate of the fake model; null: that of the
    optimizer. time_range: of the times at which the scores are compared; 1 is noise. gan: a
    discriminator on the hidden states of the fake model's middle block, trained together with it to
    distinguish real pictures of the data from the student's predictions, both noised; null: none.

    Rewards only monitor progress, unless ``reward_weight`` adds their policy gradient with this
    weight (Jiang et al. 2025, "Distribution matching distillation meets reinforcement learning"),
    at the stochastic steps of the same samples. Its options are those of policy_gradient. Each of
    the two losses is a mean over its own points.

    fake_steps: steps of the fake model before each of the student. reward_weight: of the rewards'
    policy gradient.
    """

    requires = Requires("gaussian")
    not_options = ("behavior_policy",)
    term_types = (TimestepShare, TimestepWeighting, KLPenalty)

    def __init__(
        self,
        teacher: Annotated[Callable[[], Policy], POLICIES, LATER] | None = None,
        guidance_scale: Annotated[float, Ge(0)] = 1.0,
        fake_steps: Count = 5,
        fake_lr: Annotated[float, Gt(0)] | None = None,
        time_range: Range = (0.02, 0.98),
        reward_weight: Annotated[float, Ge(0)] = 0.0,
        gan: Gan | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        if options and not reward_weight:
            raise UserError(
                f"objective.dmd.{min(options)}: it is an option of the rewards' policy gradient, "
                "which has no weight: set reward_weight, or leave it out"
            )
        low, high = time_range
        if not 0 <= low < high <= 1:
            raise UserError(
                f"objective.dmd.time_range: expected two times from 0 to 1, the first the smaller, "
                f"not {low:g} and {high:g}"
            )
        if self.requires.single_paths:
            raise UserError(f"objective.dmd.surrogate: it {WHOLE}")
        self.fake_steps = fake_steps
        self.fake_lr = fake_lr
        self.time_range = time_range
        self.reward_weight = reward_weight
        self.judge = None if gan is None else Judge(gan)
        self.frozen = few_step.FrozenTeacher(teacher, guidance_scale, "objective.dmd.teacher")
        self.shares = (1.0, 1.0)  # of the matching and of the policy gradient, in this step
        follows = reward_weight > 0
        self.requires = replace(
            self.requires, single_paths=True, visits=follows, compares=follows, sums_kinds=follows
        )
        self.snapshots = (FAKE, *(() if teacher is not None else ("ref",)), *self.snapshots)

    def extra_terms(self) -> str:
        return "teacher"

    def unfit(self, policy: Any) -> Iterator[tuple[str, str]]:
        yield from few_step.unfit(policy)
        if Branches.kept_by(policy) and policy.tree is not None:
            yield "teacher", "the student's samples are single paths: leave out policy option tree"
        can = capabilities_of(policy)
        if self.judge is not None and can is not None and not Demonstrates.kept_by(policy):
            yield "gan", "this policy takes no pictures of others, which would be the real ones"
        yield from super().unfit(policy)

    def setup(self, policy: Policy) -> None:
        self.frozen.setup(policy)

    def check(self, policy: Policy, prompts: Sequence[Prompt]) -> None:
        if self.judge is not None:
            for prompt in prompts:
                self.judge.pictures.check(policy, prompt)

    def critic(self) -> Critic:
        score = FakeScore(self.time_range, self.judge)
        return Critic(FAKE, score, self.fake_steps, self.fake_lr, self.judge)

    def setup_dry_run(self, policy: Policy) -> None:
        self.judge = None  # the dry run has no pictures

    def couples(self, policy: Policy) -> Literal["", "rows", "groups"]:
        return ""  # its surrogates are of single decisions

    def _in_parts(self, policy: Any) -> bool:
        return False

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        yield visited(policy, rollout, rng, self.time_range)
        if self.reward_weight:
            if rollout.latents.stream is None:
                raise UserError(
                    "objective.dmd.reward_weight: none of the sampler's steps draws noise, so that "
                    "no decision is there to be rewarded: set the policy's option scheduler to "
                    "lcm, with 2 steps or more, or leave it out"
                )
            yield from policy.path(self.trained_share(rollout, rng.fold("decisions")))

    def before_step(self, masks: Sequence[tuple[Tensor, bool]]) -> None:
        """Scale matched states and decisions to means over their numbers on all processes."""
        if not self.reward_weight:
            return
        device = masks[0][0].device if masks else None
        counts = torch.zeros(2, dtype=torch.float64, device=device)
        for number, (mask, _) in enumerate(masks):
            counts[min(number, 1)] += mask.sum()  # the states come first
        states, decisions = all_sum(counts).tolist()
        total = states + decisions
        self.shares = (total / max(states, 1), total / max(decisions, 1))

    def loss(self, policy: Policy, point: Point) -> Tensor:
        if isinstance(point.step, Transition):
            rewards = self.loss_at(policy, point, policy.dist(point))
            return self.shares[1] * self.reward_weight * rewards
        predicted = few_step.clean(policy, point)
        direction = self.direction(policy, point, predicted.detach())
        observe("dmd/direction", mean_square(direction), point.mask)
        # its gradient by the prediction is the direction, over the number of dimensions
        matching = mean_square(predicted - (predicted - direction).detach()) / 2
        if self.judge is not None:
            matching = matching + self.judge.fooled(policy, point, predicted)
        return self.shares[0] * matching if self.reward_weight else matching

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.reward_weight else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            super().load_state_dict(state)

    @torch.no_grad()
    def direction(self, policy: Policy, point: Point, predicted: Tensor) -> Tensor:
        """Return the direction [B, *] to subtract from the student's predictions: the fake model's
        prediction less the teacher's, over the mean distance to the teacher's."""
        again = renoised(policy, point, predicted)
        real = self.frozen.clean(policy, again)
        process = few_step.many_step(few_step.process_of(policy))
        with policy.weights.using(FAKE):
            fake = process.clean(again.state, velocity(policy.dist(again)), again.time)
        scale = (predicted - real).abs().flatten(1).mean(1).view(-1, *[1] * (real.ndim - 1))
        return ((fake - real) / scale.clamp_min(1e-8)).nan_to_num(0.0)


@dataclass
class FakeScore(Objective):
    """Learns the student's distribution: the denoising loss on the student's predictions of the
    data at its own states."""

    requires = Requires("gaussian")
    time_range: Range = (0.02, 0.98)
    judge: Judge | None = None

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        point = visited(policy, rollout, rng, self.time_range)
        return [point if self.judge is None else self.judge.shown(policy, rollout, point, rng)]

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """Compute the loss under the fake weights, which are active."""
        with policy.weights.using(LIVE), torch.no_grad():
            predicted = few_step.clean(policy, point)
        again = renoised(policy, point, predicted)
        process = few_step.many_step(few_step.process_of(policy))
        target = process.target(predicted, point.coupled(Noising).noise, again.time)
        if self.judge is None:
            output, judgement = velocity(policy.dist(again)), None
        else:
            output, judgement = self.judge.told_apart(policy, point, again)
        error = mean_square(output - target)
        observe("error", error, point.mask)
        return error if judgement is None else error + judgement


class Judge(Head):
    """Is the discriminator of real pictures and the student's predictions, both noised."""

    def __init__(self, options: Gan):
        self.options = options
        self.module = Discriminator()
        self.pictures = Pictures(options.field)

    def shown(self, policy: Policy, rollout: Rollout, point: Point, rng: Rng) -> Point:
        """Add the real picture of each row's prompt to a point."""
        drawn = point.coupled(Noising)
        real = self.pictures.latents(policy, rollout)
        noise = rng.fold("real").normal(rollout.row_id, real.shape[1:], 0, real.dtype)
        judged = Judged(time=drawn.time, noise=drawn.noise, real=real, real_noise=noise)
        return point.replace(coupling=judged)

    def told_apart(self, policy: Policy, point: Point, again: Point) -> tuple[Tensor, Tensor]:
        """Pass noised predictions and noised pictures through the fake model in one batch. Returns
        its output at the predictions [B, *], and the weighted classification loss [B, 1]."""
        drawn = point.coupled(Judged)
        process = few_step.many_step(few_step.process_of(policy))
        state = noised(process, drawn.real, drawn.real_noise, drawn.time)
        pairs = type(again).cat([again, few_step.at(point, state, drawn.time)])
        with reading(policy.net, len(pairs)) as hidden:
            output = velocity(policy.dist(pairs))[: len(point)]
            fake, real = self.module(hidden()).to(output).chunk(2)
        loss = softplus(fake) + softplus(-real)
        observe("gan", loss.detach(), point.mask)
        observe("gan_right", ((fake < 0).double() + (real > 0).double()) / 2, point.mask)
        return output, self.options.critic_weight * loss

    def fooled(self, policy: Policy, point: Point, predicted: Tensor) -> Tensor:
        """Return the student's weighted loss [B, 1] at its predictions [B, *]: its gradient goes
        through the fake model and the head, whose weights get none. 0 before the discriminator has
        begun to learn."""
        if not self.module.grown:
            return torch.zeros_like(point.mask, dtype=predicted.dtype)
        with policy.weights.using(FAKE), unwrapped(policy), torch.enable_grad():
            leaf = predicted.detach().requires_grad_()
            with reading(policy.net, len(point)) as hidden:
                policy.dist(renoised(policy, point, leaf))
                verdict = self.module(hidden()).to(leaf)
            loss = softplus(-verdict)
            (slope,) = torch.autograd.grad(loss.sum(), leaf)
        observe("dmd/gan", loss.detach(), point.mask)
        along = (slope * (predicted - predicted.detach())).flatten(1).sum(1, keepdim=True)
        return self.options.weight * (loss.detach() + along)

    def measure(self, policy: Policy, point: Point) -> None:
        with torch.no_grad(), reading(policy.net, len(point)) as hidden:
            policy.dist(few_step.at(point, point.state, point.time))
            width = by_token(hidden()).shape[-1]
        self.module.grow(width, policy.dtype, policy.device)

    def restore(self, policy: Policy, tensors: Mapping[str, Tensor]) -> None:
        self.module.grow(tensors["layers.0.weight"].shape[0], policy.dtype, policy.device)
        self.module.load_state_dict({name: tensors[name] for name in self.module.state_dict()})


def visited(policy: Policy, rollout: Rollout, rng: Rng, time_range: Range) -> Point:
    """Choose a random state of each row's path, and draw the noise for the prediction there."""
    process = few_step.process_of(policy)
    latents = rollout.latents
    row = torch.arange(len(rollout), device=rollout.group.device)
    draw = rng.uniform(rollout.row_id, (2,))  # [B, 2]
    step = (draw[:, 0] * (latents.time.shape[1] - 1)).long()
    place = step if latents.visit is None else latents.visit[row, step]
    states = latents.states[row.to(latents.states.device), place.to(latents.states.device)]
    low, high = time_range
    time = process.snap((low + (high - low) * draw[:, 1]).to(rollout.sample))
    noise = rng.normal(rollout.row_id, rollout.sample.shape[1:], 1, rollout.sample.dtype)
    alive = rollout.alive()
    return Point(
        group=rollout.group,
        cond=rollout.cond,
        row_id=rollout.row_id,
        state=states.to(rollout.sample),
        step=SamplerState(time=latents.time[row, step]),
        mask=alive[:, None],
        num_decisions=alive.long(),
        target=rollout.sample,
        advantage=rollout.advantages()[:, -1:],
        guidance=few_step.ONE,
        coupling=Noising(time=time, noise=noise),
        prompts=rollout.prompts,
    )


def renoised(policy: Policy, point: Point, predicted: Tensor) -> Point:
    """Add a point's noise to the data predicted there."""
    drawn = point.coupled(Noising)
    process = few_step.many_step(few_step.process_of(policy))
    return few_step.at(point, noised(process, predicted, drawn.noise, drawn.time), drawn.time)
