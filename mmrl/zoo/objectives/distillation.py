"""On-policy distillation: the policy samples, frozen teachers give their distributions at its
states, and the policy minimises the divergence from them in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from mmrl.core.distributions import Dist, Gaussian
from mmrl.core.divergences import REVERSE, Divergence
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.registry import LATER, OBJECTIVES, POLICIES
from mmrl.core.types import Point
from mmrl.objectives.contracts import HasTeacher
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.policies.base import Policy
from mmrl.policies.teaching import misfits, signature
from mmrl.zoo.objectives.teacher_options import RemoteOptions

if TYPE_CHECKING:
    from mmrl.zoo.objectives.remote_teacher import RemoteTeacher


@dataclass(frozen=True)
class Teacher:
    """Specifies a frozen teacher.

    policy: as in the section ``policy``: of the same family, with the same tokens or latents and
    the same steps; size, weights, adapters, precision and guidance may differ. weight: of its
    divergence among those of the teachers. remote: instead of policy, the address of ``mmrl
    serve-teacher`` in another process or on another machine, which has the policy.
    """

    policy: Annotated[Callable[[], Policy], POLICIES, LATER] | None = None
    weight: Annotated[float, Gt(0)] = 1.0
    remote: RemoteOptions | None = None


@OBJECTIVES.register("distill")
class Distill(PolicyGradient, HasTeacher):
    """Move toward frozen teachers at the policy's own samples: on-policy distillation.

    The loss of every decision is weight times the sum over teachers of their weights times the
    divergence of policy and teacher at the policy's state, in closed form: over the whole
    vocabulary for tokens, |mu - mu_T|^2 / (2 sigma^2) for steps of flow and diffusion models
    (Agarwal et al. 2024, GKD; Lu and Thinking Machines 2025, "On-policy distillation"). The
    gradient goes through the policy's distribution there, not through what it sampled.

    Rewards only monitor progress, unless ``reward_weight`` adds their policy gradient with this
    weight, whose options are those of policy_gradient. Without it no advantage is used.

    teachers: frozen models, each a ``policy`` or ``remote``, with a weight. weight: of the loss.
    divergence: ``kind``: reverse, forward or jensen_shannon with ``mix``. reward_weight: of the
    rewards' policy gradient.
    """

    requires = replace(PolicyGradient.requires, mixes=False, proportional=False)

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
        if any((teacher.policy is None) == (teacher.remote is None) for teacher in teachers):
            raise UserError("teachers: each needs a policy, or remote: {url: ...} in its place")
        self.teachers = teachers
        self.weight = weight
        self.divergence = divergence
        self.reward_weight = reward_weight
        self.requires = replace(self.requires, compares=reward_weight > 0)
        self.loaded: list[Policy | RemoteTeacher] = []

    def extra_terms(self) -> str:
        return "teachers"

    def setup_dry_run(self, policy: Policy) -> None:
        self.loaded = [policy] * len(self.teachers)

    def setup(self, policy: Policy) -> None:
        if self.loaded:
            return
        self.loaded = [_ready(teacher, i) for i, teacher in enumerate(self.teachers)]
        for i, teacher in enumerate(self.loaded):
            remote = self.teachers[i].remote
            if remote and remote.top_k and policy.capabilities.decisions != "categorical":
                raise UserError(
                    f"{_place(self.teachers[i], i)}.top_k: it is for policies whose decisions are "
                    f"tokens, and {type(policy).__name__} decides numbers; leave it out"
                )
            described = signature(teacher) if isinstance(teacher, Policy) else teacher.signature()
            for why in misfits(policy, described):
                raise UserError(f"{_place(self.teachers[i], i)}: {why}")

    def loss_at(self, policy: Policy, point: Point, dist: Dist) -> Tensor:
        distance = self._distance(policy, point, dist)
        observe("distillation", distance, point.mask)
        loss = self.weight * distance
        if self.reward_weight:
            return loss + self.reward_weight * super().loss_at(policy, point, dist)
        at = self.scored(policy, point, dist)
        # the gate compares the rounded value
        observe("log_ratio", at.logp - at.recorded, point.current())
        return loss

    def _distance(self, policy: Policy, point: Point, dist: Dist) -> Tensor:
        """Return the weighted divergences from the teachers, [B, L]."""
        total: Tensor | float = 0.0
        for i, (options, teacher) in enumerate(zip(self.teachers, self.loaded, strict=True)):
            try:
                teacher_dist = _reference(teacher, policy, point, dist)
                if isinstance(dist, Gaussian):
                    _check_steps(dist, teacher_dist)
                each = dist.kl(teacher_dist, self.divergence)
            except (RuntimeError, ValueError, KeyError) as error:
                if isinstance(error, torch.OutOfMemoryError) or (
                    isinstance(error, UserError) and options.remote is not None
                ):
                    raise
                raise UserError(
                    f"{_place(options, i)} cannot say what it would do in the policy's states, it "
                    f"has another vocabulary, latent space or sampler: {error}"
                ) from error
            total = total + options.weight * each
        assert isinstance(total, Tensor)
        return total


def _place(teacher: Teacher, number: int) -> str:
    """Name the options of a teacher in the configuration."""
    kind = "policy" if teacher.remote is None else "remote"
    return f"objective.distill.teachers[{number}].{kind}"


def _ready(teacher: Teacher, number: int) -> Policy | RemoteTeacher:
    """Load a teacher, or a client of one."""
    if teacher.remote is not None:
        from mmrl.zoo.objectives.remote_teacher import RemoteTeacher

        return RemoteTeacher(teacher.remote, _place(teacher, number))
    assert teacher.policy is not None
    return _frozen(teacher.policy())


@torch.no_grad()
def _reference(teacher: Policy | RemoteTeacher, policy: Policy, point: Point, dist: Dist) -> Dist:
    """Return a teacher's distribution at a point where the policy's is ``dist``."""
    if not isinstance(teacher, Policy):
        return teacher.reference(point, dist)
    if teacher.device != policy.device:
        teacher.net.to(policy.device)
    return teacher.dist(point)


def _frozen(teacher: Policy) -> Policy:
    teacher.net.requires_grad_(False)
    return teacher


def _check_steps(dist: Gaussian, teacher_dist: Dist) -> None:
    """Raise ValueError where the steps of two models have different noise: then samples of one are
    unlikely under the other."""
    if not isinstance(teacher_dist, Gaussian) or not torch.allclose(
        dist.std.detach(), teacher_dist.std.to(dist.std), rtol=1e-3, atol=1e-6
    ):
        raise ValueError("the noise of a step differs: give both the same sde_type and noise_level")
