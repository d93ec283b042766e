"""Diffusion and flow models: a decision is a Gaussian transition between two latents.

A family is a subclass with ``encode``, ``velocity`` and ``decode``; sampling, scoring, guidance, noise and chunks are
here, once. Sampling and scoring go through the same ``_transition``.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from samplers.batching import at_width, chunks
from samplers.kernels import flow_sde
from samplers.noise import Rng
from samplers.schedules import all_steps, linear

from ..dists import Gaussian
from ..registry import GRIDS, KERNELS, WINDOWS, UserError
from ..types import Kernel, Media, Point, Prompt, Rollout, tree_map
from .base import NetPolicy, first_of_group, rows_of

Grid = Callable[[int], Tensor]  # steps -> times [K + 1], from 1 to 0
Window = Callable[[int], Tensor]  # steps -> [K] bool, where noise is injected
LogpDist = Literal["guided", "guided_stopgrad_uncond", "conditional"]
Storage = Literal["float32", "bfloat16", "float16"]


class FlowPolicy(NetPolicy, ABC):
    """Options of every flow model.

    steps: forward passes per sample. eta: noise level of the stochastic steps. kernel, grid, sde: the stochastic step,
    the times, and which steps are stochastic. guidance: classifier-free guidance scale w, v = v_u + w (v_c - v_u).
    logp_dist: what is scored; "guided" is what was sampled, "guided_stopgrad_uncond" the same without gradient through
    the unconditional branch, "conditional" leaves guidance out of the score (a mismatch some codes publish).
    shared_noise: the samples of a group start from one noise. storage: type latents are rounded to before they are
    scored and kept. reduction: log-prob as mean or sum over dimensions.
    """

    shape: tuple[int, ...]  # of one sample's latents

    def __init__(
        self,
        net: nn.Module,
        steps: int = 10,
        eta: float = 0.7,
        kernel: Annotated[Kernel, KERNELS] = flow_sde,
        grid: Annotated[Grid, GRIDS] = linear,
        sde: Annotated[Window, WINDOWS] = all_steps,
        guidance: float = 1.0,
        logp_dist: LogpDist = "guided",
        shared_noise: bool = False,
        storage: Storage = "float32",
        reduction: Literal["mean", "sum"] = "mean",
        **options: Any,
    ):
        super().__init__(net, **options)
        if steps < 1 or eta < 0:
            raise UserError(f"steps must be at least 1 and eta at least 0, not {steps} and {eta}")
        try:
            self.times, self.noisy = grid(steps), sde(steps)
        except ValueError as error:
            raise UserError(f"grid or sde: {error}") from error
        self.eta = eta * self.noisy.double()  # [K]
        if logp_dist == "conditional" and guidance != 1:
            warnings.warn(
                f"logp_dist conditional: samples are drawn with guidance {guidance:g} and scored without it, so the "
                "gradient is not that of the sampled distribution; guided matches",
                stacklevel=2,
            )
        self.kernel, self.guidance, self.logp_dist = kernel, guidance, logp_dist
        self.shared_noise, self.storage, self.reduction = shared_noise, getattr(torch, storage), reduction

    @abstractmethod
    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Nest of tensors [P, *]; under ``uncond`` the same for the empty prompt, [1, *], if there is guidance."""

    @abstractmethod
    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        """[B, *] the network's output for latents x [B, *] at times t [B] under conditions [B, *]."""

    @abstractmethod
    def decode(self, rollout: Rollout) -> Media: ...

    @contextmanager
    def evaluating(self, guidance: float | None = None) -> Iterator[None]:
        """Deterministic (ODE) sampling, at another guidance scale if given."""
        kept = self.eta, self.guidance
        self.eta = torch.zeros_like(self.eta)
        self.guidance = self.guidance if guidance is None else guidance
        try:
            yield
        finally:
            self.eta, self.guidance = kept

    def rollout(self, prompts: list[Prompt], copies: int, rng: Rng) -> Rollout:
        row = rng.rows(len(prompts), copies).to(self.device)
        group = torch.arange(len(prompts), device=self.device).repeat_interleave(copies)
        cond = self.encode(prompts)
        size = self.chunk(len(row), lambda n: self._trial(group[:n], row[:n], cond))
        blocks = [self._sample(group[part], row[part], cond, rng, copies) for part in chunks(len(row), size)]
        return Rollout.cat(blocks).replace(prompts=tuple(prompts))

    def _trial(self, group: Tensor, row: Tensor, cond: dict[str, Any]) -> None:
        """One pass of the largest kind, for what it allocates."""
        x = torch.zeros(len(row), *self.shape, dtype=self.dtype, device=self.device)
        none, t = torch.zeros(len(row), 1, dtype=torch.bool), self._on_rows(self.times[:1], len(row))[:, 0]
        self._velocities(Point(group=group, cond=cond, row=row, state=x, time=t, mask=none), guided=self.guidance != 1)

    def _sample(self, group: Tensor, row: Tensor, cond: dict[str, Any], rng: Rng, copies: int) -> Rollout:
        first = torch.div(row, copies, rounding_mode="floor") if self.shared_noise else row
        time, eta = (self._on_rows(schedule, len(row)) for schedule in (self.times, self.eta))
        states = [self._store(rng.normal(first, self.shape, 0, self.dtype))]
        logprobs = []
        for k in range(eta.shape[1]):
            point = Point(
                group=group, cond=cond, row=row, mask=eta[:, k : k + 1] > 0,
                state=states[-1], time=time[:, k], next_time=time[:, k + 1], eta=eta[:, k],
            )  # fmt: skip
            sampled, scored = self._both(point)
            noise = rng.normal(row, self.shape, k + 1, self.dtype) if self.eta[k] > 0 else torch.zeros_like(states[-1])
            states.append(self._store(sampled.sample(noise)))  # rounded first, then scored
            logprobs.append(scored.log_prob(states[-1]))
        return Rollout(
            group=group, cond=cond, row=row, sample=states[-1], path=torch.stack(states, 1),
            logprob=torch.cat(logprobs, 1), mask=eta > 0, time=time, eta=eta,
        )  # fmt: skip

    def path(self, rollout: Rollout) -> Iterator[Point]:
        length = rollout.mask.sum(1)
        for k in range(rollout.mask.shape[1]):
            rows = rollout.mask[:, k].nonzero()[:, 0]
            if len(rows):
                yield _step(rollout, length, rows, k)

    def renoise(self, rollout: Rollout, rng: Rng, time: Tensor | None = None, shared: bool = False) -> Iterator[Point]:
        name = first_of_group(rollout) if shared else rollout.row
        t = rng.uniform(name, step=0) if time is None else time
        t = t.to(rollout.sample)
        noise = rng.normal(name, self.shape, 1, rollout.sample.dtype)
        alive = torch.ones_like(rollout.row, dtype=torch.bool) if rollout.kept is None else rollout.kept  # [B]
        yield Point(
            group=rollout.group, cond=rollout.cond, row=rollout.row, time=t, mask=alive[:, None], length=alive.long(),
            state=torch.lerp(rollout.sample, noise, t.view(-1, *[1] * len(self.shape))), target=noise - rollout.sample,
            advantage=None if rollout.advantage is None else rollout.advantage[:, -1:],
        )  # fmt: skip

    def dist(self, point: Point) -> Gaussian:
        """On the path the transition to ``next_time``. At a re-noised state a Gaussian of variance 1/2 around the
        velocity, whose log-prob is minus the denoising error, up to a constant."""
        scale = self._scale(point)
        conditional = scale == 1 or (self.logp_dist == "conditional" and point.guidance is None)
        v, empty = self._velocities(point, guided=not conditional)
        return self._transition(point, v if conditional else empty + scale * (v - empty))

    def _both(self, point: Point) -> tuple[Gaussian, Gaussian]:
        """The distribution that samples, and the one whose log-prob is recorded: the same unless asked otherwise."""
        scale = self._scale(point)
        if scale == 1 or self.logp_dist != "conditional":
            dist = self.dist(point)
            return dist, dist
        v, empty = self._velocities(point, guided=True)
        return self._transition(point, empty + scale * (v - empty)), self._transition(point, v)

    def _scale(self, point: Point) -> float:
        if point.guidance is not None:
            return point.guidance
        return self.guidance if point.next_time is not None else 1.0

    def _transition(self, point: Point, v: Tensor) -> Gaussian:
        if point.next_time is None:
            half = v.new_full((len(v), *[1] * len(self.shape)), 0.5**0.5)
            return Gaussian(v, half, self.reduction)
        mean, std = self.kernel(point.state, v, point.time, point.next_time, point.eta)
        return Gaussian(mean, std, self.reduction)

    def _velocities(self, point: Point, guided: bool) -> tuple[Tensor, Tensor | None]:
        """Conditional and unconditional velocity [B, *]; both in one forward pass unless one needs no gradient."""
        x, t = point.state, point.time
        own = {key: value for key, value in point.cond.items() if key != "uncond"}
        cond = rows_of(own, point.group)
        if not guided:
            return self._forward(x, t, cond), None
        empty = tree_map(lambda tensor: tensor.expand(len(x), *tensor.shape[1:]), point.cond["uncond"])
        if self.logp_dist == "guided_stopgrad_uncond":
            with torch.no_grad():
                v_empty = self._forward(x, t, empty)
            return self._forward(x, t, cond), v_empty
        both = _stack(cond, empty)
        v, v_empty = self._forward(torch.cat([x, x]), torch.cat([t, t]), both, passes=2).chunk(2)
        return v, v_empty

    def _forward(self, x: Tensor, t: Tensor, cond: dict[str, Any], passes: int = 1) -> Tensor:
        v = at_width(self.velocity, max(self.padded() * passes, len(x)), x, t, cond)
        if v.shape != x.shape:
            name = type(self).__name__
            raise UserError(f"{name}.velocity gave shape {tuple(v.shape)} for latents of shape {tuple(x.shape)}")
        return v.to(self.dtype)

    def _store(self, x: Tensor) -> Tensor:
        return x if self.storage == torch.float32 else x.to(self.storage).to(self.dtype)

    def _on_rows(self, schedule: Tensor, rows: int) -> Tensor:
        return schedule.to(self.device, self.dtype).expand(rows, -1)


def _step(rollout: Rollout, length: Tensor, rows: Tensor, k: int) -> Point:
    """Decision k of the given rows."""
    advantage = rollout.advantage
    return Point(
        group=rollout.group[rows], cond=rollout.cond, row=rollout.row[rows], length=length[rows],
        state=rollout.path[rows, k], target=rollout.path[rows, k + 1],
        time=rollout.time[rows, k], next_time=rollout.time[rows, k + 1], eta=rollout.eta[rows, k],
        logprob=rollout.logprob[rows, k, None], mask=rollout.mask[rows, k, None],
        advantage=None if advantage is None else advantage[rows].expand(-1, rollout.mask.shape[1])[:, k, None],
    )  # fmt: skip


def _stack(first: Any, second: Any) -> Any:
    """Two nests of tensors [B, *] on top of each other, [2B, *]."""
    if isinstance(first, Tensor):
        return torch.cat([first, second.to(first)])
    return {key: _stack(value, second[key]) for key, value in first.items()}
