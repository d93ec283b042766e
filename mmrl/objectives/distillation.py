"""On-policy distillation: the policy samples, frozen teachers say at each of its states what they
would have done, and the policy moves toward them in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.core.distributions import Dist, Gaussian
from mmrl.core.divergences import REVERSE, Divergence
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.registry import LATER, OBJECTIVES, POLICIES
from mmrl.core.types import Point
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.policies.base import Policy


@dataclass(frozen=True)
class Teacher:
    """Names a frozen model that says what it would have done.

    policy: as in the section ``policy``: of the same family, with its tokens or latents and its
    steps; its size, weights, adapters, precision and guidance are its own. weight: of its
    divergence among those of the teachers.
    """

    policy: Annotated[Callable[[], Policy], POLICIES, LATER]
    weight: Annotated[float, Gt(0)] = 1.0


@OBJECTIVES.register("distill")
class Distill(PolicyGradient):
    """Move toward frozen teachers at the policy's own samples: on-policy distillation.

    The loss of every decision is weight times the sum over teachers of their weights times the
    divergence of policy and teacher at the policy's state, in closed form: over the whole
    vocabulary for tokens, |mu - mu_T|^2 / (2 sigma^2) for steps of flow and diffusion models
    (Agarwal et al. 2024, GKD; Lu and Thinking Machines 2025, "On-policy distillation"). The
    gradient goes through the policy's distribution there, not through what it sampled.

    Rewards say how far it has come; they are trained on only with ``reward_weight``, the weight of
    their policy gradient beside it, whose options are those of policy_gradient. Without, no
    advantage is looked at.
    """

    proportional = False
    mixes = False

    def __init__(
        self,
        teachers: list[Teacher],
        weight: Annotated[float, Gt(0)] = 1.0,
        divergence: Divergence = REVERSE,
        reward_weight: Annotated[float, Ge(0)] = 0.0,
        **options: Any,
    ):
        super().__init__(**options)
        if not teachers:
            raise UserError("teachers: name at least one, {policy: ...}")
        self.teachers = teachers
        self.weight = weight
        self.divergence = divergence
        self.reward_weight = reward_weight
        self.compares = reward_weight > 0
        self.loaded: list[Policy] = []

    def extra_terms(self) -> str:
        return "teachers"

    def stand_in(self, policy: Policy) -> None:
        self.loaded = [policy] * len(self.teachers)

    def meet(self, policy: Policy) -> None:
        if self.loaded:
            return
        self.loaded = [_frozen(teacher.policy()) for teacher in self.teachers]
        for i, teacher in enumerate(self.loaded):
            for why in misfits(policy, teacher):
                raise UserError(f"objective.distill.teachers[{i}].policy: {why}")

    def loss_at(self, policy: Policy, point: Point, dist: Dist) -> Tensor:
        distance = self._distance(policy, point, dist)
        observe("distillation", distance, point.mask)
        loss = self.weight * distance
        if self.reward_weight:
            return loss + self.reward_weight * super().loss_at(policy, point, dist)
        logp, recorded = self._log_probs(policy, point, dist)
        # the gate looks at what rounding makes of it
        observe("log_ratio", logp - recorded, point.current())
        return loss

    def _distance(self, policy: Policy, point: Point, dist: Dist) -> Tensor:
        """Return the weighted divergences from the teachers, [B, L]."""
        total: Tensor | float = 0.0
        for i, (options, teacher) in enumerate(zip(self.teachers, self.loaded, strict=True)):
            if teacher.device != policy.device:
                teacher.net.to(policy.device)
            try:
                with torch.no_grad():
                    teacher_dist = teacher.dist(point)
                if isinstance(dist, Gaussian):
                    _check_steps(dist, teacher_dist)
                each = dist.kl(teacher_dist, self.divergence)
            except (RuntimeError, ValueError, KeyError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise UserError(
                    f"objective.distill.teachers[{i}].policy cannot say what it would do in the "
                    f"policy's states, it has another vocabulary, latent space or sampler: {error}"
                ) from error
            total = total + options.weight * each
        assert isinstance(total, Tensor)
        return total


def misfits(policy: Policy, teacher: Policy) -> Iterator[str]:
    """Say why a teacher cannot judge the policy's states, as far as their outsides show."""
    student_makes, teacher_makes = (
        (can.decisions, can.makes, can.remaskable)
        for can in (policy.capabilities, teacher.capabilities)
    )
    if student_makes != teacher_makes:
        yield (
            f"{type(teacher).__name__} makes other decisions than {type(policy).__name__}: a "
            "teacher has to be of the policy's family"
        )
    for what, students, teachers in (
        ("pictures of (height, width)", policy.media_size, teacher.media_size),
        ("videos of so many frames:", policy.media_frames, teacher.media_frames),
    ):
        if students != teachers:
            yield f"it makes {what} {teachers}, the policy {students}; both have to be the same"


def _frozen(teacher: Policy) -> Policy:
    teacher.net.requires_grad_(False)
    return teacher


def _check_steps(dist: Gaussian, teacher_dist: Dist) -> None:
    """Raise ValueError where two models take steps of different noise: then samples of the one say
    little of the other."""
    if not isinstance(teacher_dist, Gaussian) or not torch.allclose(
        dist.std.detach(), teacher_dist.std.to(dist.std), rtol=1e-3, atol=1e-6
    ):
        raise ValueError("the noise of a step differs: give both the same sde_type and noise_level")
