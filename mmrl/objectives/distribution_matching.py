"""Distribution matching distillation: a student of few steps learns to have its teacher's
distribution, as the difference of two scores says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.config.options import Count
from mmrl.config.unfit import capabilities_of
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.registry import LATER, OBJECTIVES, POLICIES
from mmrl.core.types import Fields, Point, Rollout, SamplerState
from mmrl.core.weights import LIVE
from mmrl.objectives import few_step
from mmrl.objectives.base import Critic, Objective
from mmrl.objectives.forward_process.base import mean_square, velocity
from mmrl.policies.base import Policy, Reads
from samplers.noise import Rng
from samplers.processes import noised

FAKE = "fake"  # the snapshot that learns what the student makes


@dataclass(frozen=True, kw_only=True)
class Noising(Fields):
    """Says how what the student predicts at a point is noised again."""

    time: Tensor  # [B]
    noise: Tensor  # [B, *]


Range = tuple[float, float]


@OBJECTIVES.register("dmd")
@dataclass
class DistributionMatching(Objective):
    """Match a many-step teacher's distribution by a student of few steps (DMD, as DMD2 has it).

    Yin et al. 2024, "One-step diffusion with distribution matching distillation", eq. 7 and 8, and
    "Improved distribution matching distillation", without regression and GAN: the student samples
    by its own steps; at a random one it predicts the data, which gets fresh noise; there the
    teacher ("real") and a model of the student's own samples ("fake") say what the data are, and
    the student's prediction moves by their difference, over the mean distance of prediction and
    teacher. Before each step the fake model takes ``fake_steps`` of its own, with the denoising
    loss on such predictions. It is a snapshot that learns, beginning from the student's weights
    (with lora: adapters on the same base), with an optimizer like the student's.

    teacher: a policy with the student's latents and conditions; null: the weights the run begins
    with. guidance_scale: of the teacher. fake_lr: the learning rate of the fake model; null: that
    of the optimizer. time_range: between which times the scores are compared, 1 being noise.
    Rewards say how far it has come.
    """

    needs: ClassVar[str] = "gaussian"
    reads: ClassVar[Reads] = "path"
    single_paths = True
    compares = False

    teacher: Annotated[Callable[[], Policy], POLICIES, LATER] | None = None
    guidance_scale: Annotated[float, Ge(0)] = 1.0
    fake_steps: Count = 5
    fake_lr: Annotated[float, Gt(0)] | None = None
    time_range: Range = (0.02, 0.98)

    def __post_init__(self) -> None:
        low, high = self.time_range
        if not 0 <= low < high <= 1:
            raise UserError(
                f"objective.dmd.time_range: expected two times from 0 to 1, the first the smaller, "
                f"not {low:g} and {high:g}"
            )
        place = "objective.dmd.teacher"
        self.frozen = few_step.FrozenTeacher(self.teacher, self.guidance_scale, place)
        self.snapshots = (FAKE,) if self.teacher is not None else (FAKE, "ref")

    def extra_terms(self) -> str:
        return "teacher"

    def unfit(self, policy: Any) -> Iterator[tuple[str, str]]:
        yield from few_step.unfit(policy)
        if capabilities_of(policy) is not None and policy.tree is not None:
            yield "teacher", "the student's samples are single paths: leave out policy option tree"

    def meet(self, policy: Policy) -> None:
        self.frozen.meet(policy)

    def critic(self) -> Critic:
        return Critic(FAKE, FakeScore(self.time_range), self.fake_steps, self.fake_lr)

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        return [visited(policy, rollout, rng, self.time_range)]

    def loss(self, policy: Policy, point: Point) -> Tensor:
        predicted = few_step.clean(policy, point)
        direction = self.direction(policy, point, predicted.detach())
        observe("dmd/direction", mean_square(direction), point.mask)
        # its gradient by the prediction is the direction, over the number of dimensions
        return mean_square(predicted - (predicted - direction).detach()) / 2

    @torch.no_grad()
    def direction(self, policy: Policy, point: Point, predicted: Tensor) -> Tensor:
        """Return by what the student's predictions should fall, [B, *]: what the fake model takes
        for the data, less what the teacher does, over the mean distance of the teacher's."""
        again = renoised(policy, point, predicted)
        real = self.frozen.clean(policy, again)
        process = few_step.many_step(few_step.process_of(policy))
        with policy.weights.using(FAKE):
            fake = process.clean(again.state, velocity(policy.dist(again)), again.time)
        scale = (predicted - real).abs().flatten(1).mean(1).view(-1, *[1] * (real.ndim - 1))
        return ((fake - real) / scale.clamp_min(1e-8)).nan_to_num(0.0)


@dataclass
class FakeScore(Objective):
    """Learns, as any diffusion model does, what the student makes: the denoising loss on what it
    predicts of the data at its own states."""

    needs: ClassVar[str] = "gaussian"
    time_range: Range = (0.02, 0.98)

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        return [visited(policy, rollout, rng, self.time_range)]

    def loss(self, policy: Policy, point: Point) -> Tensor:
        """Compute the loss under the fake weights, which are in force."""
        with policy.weights.using(LIVE), torch.no_grad():
            predicted = few_step.clean(policy, point)
        again = renoised(policy, point, predicted)
        process = few_step.many_step(few_step.process_of(policy))
        target = process.target(predicted, point.coupled(Noising).noise, again.time)
        error = mean_square(velocity(policy.dist(again)) - target)
        observe("error", error, point.mask)
        return error


def visited(policy: Policy, rollout: Rollout, rng: Rng, time_range: Range) -> Point:
    """Take a random state of each row's path, and draw how what is predicted there is noised."""
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
    """Add the noise that was drawn for a point to the data predicted there."""
    drawn = point.coupled(Noising)
    process = few_step.many_step(few_step.process_of(policy))
    return few_step.at(point, noised(process, predicted, drawn.noise, drawn.time), drawn.time)
