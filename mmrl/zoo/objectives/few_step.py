"""Shared by the objectives that distil a model to few steps: the frozen teacher, and a network's
prediction of the data at a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Point, SamplerState
from mmrl.objectives.forward_process import VELOCITIES, velocity
from mmrl.policies.base import Policy
from mmrl.policies.capabilities import capabilities_of
from mmrl.policies.contracts import FollowsProcess, guidance_of
from mmrl.policies.teaching import misfits, signature
from samplers.kernels import ddim, ode
from samplers.processes import Consistent, Diffusion, Flow, Process

ONE = 1.0  # a guidance scale: none


def unfit(policy: Any) -> Iterator[tuple[str, str]]:
    """Yield (option, sentence) for policies that cannot be distilled to few steps."""
    can = capabilities_of(policy)
    if can is None or can.decisions != "gaussian":
        return
    process = policy.process if FollowsProcess.kept_by(policy) else None
    if isinstance(process, Diffusion) and not isinstance(process, Consistent):
        yield (
            "teacher",
            "this policy's network predicts noise and jumps to no data: set the policy's option "
            "scheduler to lcm",
        )
    if guidance_of(policy) not in (None, ONE):
        yield (
            "guidance_scale",
            "the student learns the teacher's guidance: set the policy's guidance_scale to 1, and "
            "the objective's to that of the teacher",
        )


class FrozenTeacher:
    """Gives the predictions of a frozen many-step model with classifier-free guidance: another
    policy, or the initial weights of the run (snapshot ``ref``)."""

    def __init__(self, make: Callable[[], Policy] | None, guidance: float, place: str):
        self.make = make
        self.guidance = guidance
        self.place = place
        self.policy: Policy | None = None

    def setup(self, policy: Policy) -> None:
        """Load the teacher, if it is another policy. Raises UserError where it does not fit."""
        if self.make is None or self.policy is not None:
            return
        self.policy = self.make()
        self.policy.net.requires_grad_(False)
        for why in misfits(policy, signature(self.policy)):
            raise UserError(f"{self.place}: {why}")

    @torch.no_grad()
    def output(self, policy: Policy, point: Point) -> Tensor:
        """Predict, with guidance, at a re-noised point, [B, *]."""
        guided = point.replace(guidance=self.guidance)
        if self.policy is None:
            with policy.weights.using("ref"):
                return velocity(policy.dist(guided))
        if self.policy.device != policy.device:
            self.policy.net.to(policy.device)
        return velocity(self.policy.dist(guided))

    def process(self, policy: Policy) -> Process:
        """Return the process by which the teacher's output is read: it is no consistency model."""
        return many_step(process_of(self.policy or policy))

    def clean(self, policy: Policy, point: Point) -> Tensor:
        """Predict the data at a re-noised point, [B, *]."""
        output = self.output(policy, point)
        return self.process(policy).clean(point.state, output, point.time)

    def earlier(self, policy: Policy, point: Point, time: Tensor) -> Tensor:
        """Take one step of the teacher's ODE from a point to an earlier time [B]: [B, *]."""
        output = self.output(policy, point)
        process = self.process(policy)
        if isinstance(process, Flow):
            return ode(point.state, output, point.time, time)[0]
        return ddim(point.state, output, point.time, time, 0.0, process)[0]


def process_of(policy: Policy) -> Process:
    """Return a flow or diffusion model's process. Raises UserError for models of tokens."""
    if not isinstance(policy, FollowsProcess):
        raise UserError(VELOCITIES)
    return policy.process


def many_step(process: Process) -> Process:
    """Return a process without the boundary that consistency models add."""
    if isinstance(process, Consistent):
        return Diffusion(process.prediction, process.alphas, process.final)
    return process


def at(point: Point, state: Tensor, time: Tensor) -> Point:
    """Replace a point's state [B, *] and time [B]."""
    return point.replace(state=state, step=SamplerState(time=time), guidance=ONE)


def clean(policy: Policy, point: Point) -> Tensor:
    """Predict the data at a point under the active weights, without guidance: [B, *]."""
    output = velocity(policy.dist(point.replace(guidance=ONE)))
    return process_of(policy).clean(point.state, output, point.time)
