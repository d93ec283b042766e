"""Computes a flow's network outputs at states of a path, and the step distributions from them, the
same for sampling and scoring."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mmrl.core.contract import called, returned
from mmrl.core.distributions import Gaussian
from mmrl.core.errors import UserError
from mmrl.core.registry import KERNELS, declared, unbound
from mmrl.core.sharding import in_step, sharded
from mmrl.core.types import Kernel, Query, Transition, tree_map
from mmrl.policies.base import rows_of, without_empty
from mmrl.policies.contracts import Guided
from mmrl.policies.diffusion.row_settings import GUIDANCE
from mmrl.policies.diffusion.trees import Tree
from samplers import tables
from samplers.batching import at_width
from samplers.noise import Rng
from samplers.processes import Flow, Process

BUILT_IN = frozenset(tables.KERNELS.values())
FEW = 8  # rows; a matmul of fewer rounds differently (docs/lab-notes.md)
# (steps, iteration, rng) -> [K] bool, where noise is injected
Window = Callable[[int, int, Rng], Tensor]


class FlowPasses(Guided):
    """Runs a flow's network at states of its paths, with guidance, and makes Gaussian steps from
    its outputs."""

    shape: tuple[int, ...]  # of one sample's latents
    process: Process = Flow()
    # the pipeline argument for the scale of classifier-free guidance, which rows and their
    # conditions may set
    guided_by: str = GUIDANCE
    logprob_reduction: Literal["mean", "sum"]
    logprob_weight: Tensor | None = None  # [*] weights of the mean over dimensions; 1 on average
    sde_type: Kernel
    dist_type: type[Gaussian]
    tree: Tree | None
    times: Tensor  # [K + 1] of a path
    evaluation_times: Tensor
    noise_window: Window  # which steps are stochastic
    noise_level: float
    noise_anneal: float
    flash_step_ratio: float | None
    exploring = True  # False while evaluating: only the initial noise is drawn
    # True while a model whose sampler draws noise is evaluated: noise, but no decision
    plain = False

    def begin(self, noise: Tensor, cond: dict[str, Any]) -> Tensor:
        """Make the first states of paths [B, *] from noise and the rows' conditions."""
        return noise

    @abstractmethod
    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        """Compute the network's output [B, *] for latents x [B, *] at times t [B] under conditions
        [B, *]."""

    def unconditional(self, row_cond: dict[str, Any], cond: dict[str, Any]) -> dict[str, Any]:
        """Return the conditions [B, *] for the pass without the prompt, from the rows' conditions
        ``row_cond`` and those of the rollout.

        They are those of the empty prompt; entries missing in ``uncond``, such as an image to edit,
        are the row's own.
        """
        if "uncond" not in cond:
            raise UserError(
                f"classifier-free guidance (guidance_scale) needs an unconditional input: return "
                f'"uncond" from {type(self).__name__}.encode, one row, or set the option empty of '
                f"the policy module"
            )
        rows = len(next(leaf for leaf in row_cond.values() if isinstance(leaf, Tensor)))
        empty: dict[str, Any] = tree_map(
            lambda tensor: tensor.expand(rows, *tensor.shape[1:]), cond["uncond"]
        )
        return row_cond | empty

    def combine(self, v: Tensor, empty: Tensor, scale: float | Tensor) -> Tensor:
        """Apply classifier-free guidance (Ho and Salimans 2022), [B, *]; families may rescale it as
        their pipelines do."""
        return empty + scale * (v - empty)

    def _for_process(self, kernel: Any) -> Kernel:
        """Bind the process to a kernel that takes one; UserError if the kernel is for another
        process."""
        plain = unbound(kernel)
        process_type = declared(plain, "process", Flow if plain in BUILT_IN else None)
        if process_type is not None and not isinstance(self.process, process_type):
            known = ", ".join(
                n
                for n, k in KERNELS.items()
                if isinstance(self.process, declared(k, "process", Flow))
            )
            raise UserError(
                f"policy option sde_type: {plain.__name__} is not for this kind of "
                f"model; for it: {known}"
            )
        takes_process = declared(plain, "process") is not None
        bound: Kernel = partial(kernel, process=self.process) if takes_process else kernel
        return bound

    def _on_grid(self, kernel: Kernel, times: Tensor) -> Kernel:
        """Bind the second of the times [K + 1] to a kernel whose first step depends on it."""
        plain = unbound(kernel)
        if declared(plain, "first_step") is None:
            return kernel
        first = {"second": float(times[1])}
        bound: Kernel = partial(kernel, **first)
        return bound

    @property
    def summed_dimensions(self) -> int:
        return math.prod(self.shape) if self.logprob_reduction == "sum" else 1

    def dist(self, point: Query) -> Gaussian:
        """Compute the transition to ``next_time`` on the path. At a re-noised state return a
        Gaussian of variance 1/2 around the velocity, whose log-prob is minus the denoising error,
        up to a constant."""
        scale = self._scales(point)
        conditional = unguided(scale) or (
            self.logprob_guidance == "conditional" and point.guidance is None
        )
        v, empty = self._velocities(point, guided=not conditional)
        return self._transition(
            point, v if conditional else self.combine(v, empty, self.strength(point, scale))
        )

    def _both(self, point: Query, rows: int | None) -> tuple[Gaussian, Gaussian, Tensor]:
        """Compute the distribution that samples, the one whose log-prob is recorded (the same
        unless ``logprob_guidance`` differs), and the network's output for the first, in passes of
        at most ``rows``."""
        scale = self._scales(point)
        each = []
        waits = rows is not None and sharded(self.net)
        for part, counts in in_step(point.split(rows or len(point)), point[:1], self.device, waits):
            output = self._velocities(part, guided=not unguided(scale))
            each += [output] if counts else []
        v = torch.cat([part for part, _ in each])
        guided = v
        if not unguided(scale):
            empty = torch.cat([part for _, part in each])
            guided = self.combine(v, empty, self.strength(point, scale))
        sampled = self._transition(point, guided)
        mismatch = not unguided(scale) and self.logprob_guidance == "conditional"
        return sampled, self._transition(point, v) if mismatch else sampled, guided

    def strength(self, point: Query, scale: float | Tensor) -> float | Tensor:
        """Return the guidance scale: ``scale``, or one per row, shaped for [B, *], where a family
        has several."""
        return scale

    def _scales(self, point: Query) -> float | Tensor:
        """Return the guidance scale, or one per row, shaped for [B, *], where rows set their
        own."""
        return self._scale(point)

    def _scale(self, point: Query) -> float:
        if point.guidance is not None:
            return point.guidance
        return self.guidance_scale if isinstance(point.step, Transition) else 1.0

    def _transition(self, point: Query, v: Tensor) -> Gaussian:
        step = point.step
        if not isinstance(step, Transition):
            half = v.new_full((len(v), *[1] * len(self.shape)), 0.5**0.5)
            return Gaussian(v, half, self.logprob_reduction, self.logprob_weight)
        mean, std = self.sde_type(point.state, v, step.time, step.next_time, step.noise_level)
        rows, *rest = v.shape
        by = f"the SDE type {called(self.sde_type)}"
        returned(mean, f"{by} (mean)", B_latents=(rows, *rest))
        # packed states with several clocks (sound and video) have a std per dimension
        returned(std, f"{by} (std)", B_ones=(rows, *[1] * len(rest)), B_latents=(rows, *rest))
        return self.dist_type(mean, std, self.logprob_reduction, self.logprob_weight)

    def _velocities(self, point: Query, guided: bool) -> tuple[Tensor, Tensor]:
        """Compute conditional and unconditional velocity [B, *], both in one forward pass unless
        one needs no gradient; not ``guided``: the first for both."""
        x = point.state
        t = point.time
        self.report.forwards += 2 * len(x) if guided else len(x)
        cond = rows_of(without_empty(point.cond), point.group)
        if not guided:
            v = self._pass(x, t, cond)
            return v, v
        empty = self.unconditional(cond, point.cond)
        if self.logprob_guidance == "guided_stopgrad_uncond":
            with torch.no_grad():
                v_empty = self._pass(x, t, empty)
            return self._pass(x, t, cond), v_empty
        stacked_cond = stacked(cond, empty)
        v, v_empty = self._pass(torch.cat([x, x]), torch.cat([t, t]), stacked_cond, passes=2).chunk(
            2
        )
        return v, v_empty

    def _pass(self, x: Tensor, t: Tensor, cond: dict[str, Any], passes: int = 1) -> Tensor:
        v: Tensor = at_width(
            self.velocity, max(self._filled(len(x) // passes) * passes, len(x)), x, t, cond
        )
        if v.shape != x.shape:
            name = type(self).__name__
            raise UserError(
                f"{name}.velocity gave shape {tuple(v.shape)} for latents of shape {tuple(x.shape)}"
            )
        return v.to(self.dtype)

    def _filled(self, rows: int) -> int:
        """Return the number of rows to which a pass is padded. Few states are active near the root
        of a tree: padded to the constant width they would cost as much as all leaves, so tree
        passes are padded to the next power of two."""
        if self.tree is None:
            return self.pass_sizes.width()
        return min(self.pass_sizes.width(), max(FEW, 1 << (rows - 1).bit_length()))


def unguided(scale: float | Tensor) -> bool:
    """Tell whether a pass needs no guidance."""
    return isinstance(scale, (int, float)) and scale == 1


def stacked(first: Any, second: Any) -> Any:
    """Stack two nests of tensors [B, *] into one, [2B, *]."""
    if isinstance(first, Tensor):
        return torch.cat([first, second.to(first)])
    return {key: stacked(value, second[key]) for key, value in first.items()}
