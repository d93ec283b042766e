"""Treats a step of several states at different times, such as the video and sound of MiniMax H3, as
one decision.

Flow times that differ only by a shift have odds t / (1 - t) of a constant ratio r, at every step.
So the time of each state is a function of the first's, r t / (1 + (r - 1) t), and a decision has
the time of the first state. Mean and deviation of each state are those at its own times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import bound_options
from mmrl.core.types import Kernel
from samplers.processes import Flow, Number, Process
from samplers.solvers import Step

SAME = 1e-3  # relative; odds near pure noise are of float32


def odds_ratio(first: Tensor, other: Tensor) -> float | None:
    """Return the ratio of the odds of two lists of flow times [K + 1]; 1 where they are the same,
    None where it is not constant."""
    if torch.equal(first, other):
        return 1.0
    if first.shape != other.shape:
        return None
    inner = (first > 0) & (first < 1) & (other > 0) & (other < 1)
    if not inner.any() or not torch.equal(first[~inner], other[~inner]):
        return None
    odds = [times[inner] / (1 - times[inner]) for times in (first, other)]
    ratios = odds[1] / odds[0]
    last = float(ratios[-1])  # of the smallest times, whose odds are rounded least
    return last if bool((ratios / last - 1).abs().max() < SAME) else None


def shifted(time: Number, ratio: float) -> Tensor:
    """Return the time [*] of the state whose odds are ``ratio`` times those of a time [*]."""
    time = torch.as_tensor(time)
    if ratio == 1:
        return time
    return torch.where(time < 1, ratio * time / (1 + (ratio - 1) * time), time)


def on_times(kernel: Kernel, ratio: float) -> Kernel:
    """Return the kernel of a state's times, from one that is bound to a grid's second time."""
    bound = bound_options(kernel)
    if "second" not in bound:
        return kernel
    shifted_kernel: Kernel = partial(kernel, second=float(shifted(bound["second"], ratio)))  # type: ignore[call-arg]
    return shifted_kernel


@dataclass(frozen=True)
class ByState:
    """Splits joined states [B, D] into states of these sizes, each at its own time."""

    sizes: Sequence[int]
    ratios: Sequence[float]  # of the odds of each state's time to those of the first

    def kernel(self, kernel: Kernel) -> Kernel:
        """Return the step of joined states: mean [B, D] and deviation [B, D]."""

        def step(x: Tensor, v: Tensor, t: Tensor, s: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
            if x.shape[1:] != (sum(self.sizes),):
                return kernel(x, v, t, s, eta)  # of the times alone
            parts = [
                on_times(kernel, ratio)(xs, vs, shifted(t, ratio), shifted(s, ratio), eta)
                for xs, vs, ratio in zip(*self._cut(x, v), self.ratios, strict=True)
            ]
            means = [mean for mean, _ in parts]
            return torch.cat(means, 1), torch.cat([std.expand_as(m) for m, std in parts], 1)

        return step

    def solver(self, solver: Callable[[Process], Step]) -> Callable[[Process], Step]:
        """Return the solver of joined states, with a separate history for each."""

        def of_process(process: Process) -> Step:
            steps = [solver(Flow()) for _ in self.sizes]

            def step(x: Tensor, output: Tensor, t: Tensor, s: Tensor) -> Tensor:
                each = zip(steps, *self._cut(x, output), self.ratios, strict=True)
                parts = [
                    one_step(xs, velocity, shifted(t, ratio), shifted(s, ratio))
                    for one_step, xs, velocity, ratio in each
                ]
                return torch.cat(parts, 1)

            return step

        return of_process

    def _cut(self, *joined: Tensor) -> list[tuple[Tensor, ...]]:
        return [tensor.split(list(self.sizes), 1) for tensor in joined]


@dataclass(frozen=True)
class SeveralTimes(Flow):
    """A flow whose states have different times, so that a sample has no single noise level."""

    pipeline: str = ""

    def _refuse(self) -> NoReturn:
        raise UserError(
            f"{self.pipeline} has video and sound at different times, and this objective needs "
            "samples of a single one; use an objective of the sampler's steps, such as "
            "policy_gradient"
        )

    def scales(self, t: Number, like: Tensor) -> tuple[Tensor, Tensor]:
        self._refuse()

    def clean(self, x: Tensor, output: Tensor, t: Number) -> Tensor:
        self._refuse()

    def noise(self, x: Tensor, output: Tensor, t: Number) -> Tensor:
        self._refuse()

    def target(self, clean: Tensor, noise: Tensor, t: Number) -> Tensor:
        self._refuse()

    def snap(self, t: Tensor) -> Tensor:
        self._refuse()

    def gain(self, t: Number, like: Tensor) -> Tensor:
        self._refuse()
