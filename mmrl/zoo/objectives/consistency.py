"""Consistency distillation: a student learns to jump to the end of its teacher's ODE."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.numbers import Draws, Steps
from mmrl.core.registry import GRIDS, LATER, OBJECTIVES, POLICIES
from mmrl.core.types import Point, Rollout
from mmrl.objectives.base import Differentiable
from mmrl.objectives.contracts import FollowsReward, HasTeacher, TracksOld
from mmrl.objectives.forward_process import mean_square, noised
from mmrl.objectives.supervised import SFT
from mmrl.policies.base import Policy
from mmrl.zoo.objectives import few_step
from mmrl.zoo.objectives.reward_gradient import rewarded
from samplers.noise import Rng
from samplers.processes import Diffusion
from samplers.schedules import linear

Grid = Callable[[int], Tensor]


@OBJECTIVES.register("consistency")
@dataclass
class Consistency(SFT, HasTeacher, FollowsReward, TracksOld):
    """Learn to jump from any time to the data, along a many-step teacher's ODE (LCM).

    Song et al. 2023, "Consistency models", algorithm 2; Luo et al. 2023, "Latent consistency
    models", algorithm 1, with guidance in the teacher's step. Images of the data are noised to a
    time t of the teacher's grid; one step of its ODE leads to the next time s; the loss is the
    distance between the student's prediction of the data at t and its moving average's at s (at s =
    0: the state itself). For flows the jump is x - t v; for models that predict noise it is that of
    latent consistency models, ``scheduler: lcm``.

    teacher: a policy with the student's latents and conditions; null: the initial weights.
    guidance_scale: of the teacher. teacher_steps: of its grid, ``timestep_schedule``; 50 is LCM's.
    target_decay: of the moving average, per iteration; 0: the student at the start of the
    iteration. distance: pseudo-Huber of every dimension with ``huber_c``, as in LCM's scripts, or
    square. field: of the data's row, with the picture or video. num_noise_draws: times and noises a
    row.

    reward_weight: beta of the additional loss -beta r(decode(x0)), x0 the student's prediction of
    the data at t (Li et al. 2024, "Reward guided latent consistency distillation", RG-LCD); every
    reward with a weight must then be differentiable.

    timestep_schedule: the teacher's grid. huber_c: of the pseudo-Huber distance.
    """

    requires = replace(SFT.requires, decisions="gaussian")
    place: ClassVar[str] = "objective.consistency"
    not_options = (
        "template",
        "thought_dropout",
        "train_on",
        "masking",
        "timestep_sampler",
        "weighting",
        "gamma",
    )

    teacher: Annotated[Callable[[], Policy], POLICIES, LATER] | None = None
    guidance_scale: Annotated[float, Ge(0)] = 1.0
    teacher_steps: Steps = 50
    timestep_schedule: Annotated[Grid, GRIDS] = linear
    target_decay: Annotated[float, Ge(0), Lt(1)] = 0.95
    distance: Literal["huber", "square"] = "huber"
    huber_c: Annotated[float, Gt(0)] = 1e-3
    num_noise_draws: Draws = 1
    reward_weight: Annotated[float, Ge(0)] = 0.0

    def __post_init__(self) -> None:
        place = f"{self.place}.teacher"
        self.frozen = few_step.FrozenTeacher(self.teacher, self.guidance_scale, place)
        self.reward: Differentiable | None = None
        self.requires = replace(self.requires, differentiates=self.reward_weight > 0)
        self.snapshots = ("old",) if self.teacher is not None else ("old", "ref")
        try:
            self.grid = self.timestep_schedule(self.teacher_steps)  # [N + 1] from 1 to 0
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.place}.timestep_schedule: {error}") from error

    def unfit(self, policy: Any) -> Iterator[tuple[str, str]]:
        yield from super().unfit(policy)
        yield from few_step.unfit(policy)

    def setup(self, policy: Policy) -> None:
        self.frozen.setup(policy)

    def setup_dry_run(self, policy: Policy) -> None:
        # the dry run has no differentiable reward
        self.reward_weight = 0.0
        self.requires = replace(self.requires, differentiates=False)

    def attach(self, reward: Differentiable) -> None:
        """Take the trainer's rewards, with gradient."""
        self.reward = reward

    def old_decay(self, step: int) -> float:
        return self.target_decay

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        process = few_step.process_of(policy)
        below = 0.25 / len(process.alphas) if isinstance(process, Diffusion) else 0.0

        def times(draw: Rng, name: Tensor, draws: int, grid: Tensor | None) -> Tensor:
            """Draw any of the grid's times but 0."""
            place = (draw.uniform(name, (draws,)) * (len(self.grid) - 1)).long()
            # timesteps are found by rounding up
            return self.grid.to(place.device)[place] - below

        points = noised(policy, rollout, rng, times, self.num_noise_draws)
        return (point.replace(prompts=rollout.prompts) for point in points)

    def loss(self, policy: Policy, point: Point) -> Tensor:
        goal = self.goal(policy, point)
        predicted = few_step.clean(policy, point)
        if self.distance == "square":
            loss = mean_square(predicted - goal)
        else:
            c = self.huber_c
            each = ((predicted - goal).square() + c * c).sqrt() - c
            loss = each.flatten(1).mean(1, keepdim=True)
        observe("consistency_error", mean_square(predicted - goal), point.mask)
        if not self.reward_weight:
            return loss
        reward = rewarded(self.reward, policy, point, predicted)
        observe("reward/differentiated", reward, point.mask)
        return loss - self.reward_weight * reward

    @torch.no_grad()
    def goal(self, policy: Policy, point: Point) -> Tensor:
        """Return the average's prediction of the data one teacher step closer to it, [B, *]."""
        time = self.next_time(policy, point.time)
        state = self.frozen.earlier(policy, point, time)
        # the network is not called at 0, where nothing is left to predict
        asked_time = torch.where(time > 0, time, point.time)
        with policy.weights.using("old"):
            predicted = few_step.clean(policy, few_step.at(point, state, asked_time))
        ends = (time <= 0).view(-1, *[1] * (state.ndim - 1))
        return torch.where(ends, state, predicted)

    def next_time(self, policy: Policy, time: Tensor) -> Tensor:
        """Return the time of the grid after each of ``time`` [B]; of discrete diffusion the last is
        that of its timestep 0, where the jump leaves a state as it is."""
        grid = self.grid.to(time)
        place = (time[:, None] - grid[:-1]).abs().argmin(1)
        process = few_step.process_of(policy)
        earliest = 1 / len(process.alphas) if isinstance(process, Diffusion) else 0.0
        return grid[place + 1].clamp_min(earliest)
