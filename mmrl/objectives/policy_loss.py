"""The loss of a policy gradient before its terms: a surrogate of ratio and advantage, with clip and
metrics."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmrl.core.metrics import observe
from mmrl.core.registry import unbound
from mmrl.core.types import Point, Surrogate
from mmrl.objectives.base import Tangent
from mmrl.objectives.decisions import RowTable, written_by_others
from mmrl.objectives.forward_process import positive
from mmrl.objectives.surrogates import (
    bounds_of,
    clipped,
    outside,
    ppo,
    sees_whole_rows,
    summed,
    without_slope,
)


class PolicyLoss:
    """Holds a surrogate, the range of its ratio, and the bound on its advantage."""

    def __init__(
        self,
        surrogate: Surrogate,
        clip_range: float | tuple[float, float] | None,
        advantage_clip: float | None,
    ):
        self.function = surrogate if clip_range is None else clipped(surrogate, clip_range)
        self.clip_bounds = bounds_of(self.function)
        self.states_clip = clip_range is not None
        self.advantage_clip = advantage_clip
        self.of_rows = sees_whole_rows(surrogate)
        bound = 1.0 if advantage_clip is None else advantage_clip
        positive("policy gradient", advantage_clip=bound)

    def clips_as_ppo(self) -> bool:
        """Tell whether the clip is PPO's, whose width may follow the weight of the decision."""
        return unbound(self.function) is ppo

    def advantage(self, point: Point) -> Tensor:
        return self._bounded(point.advantage)

    def credit(self, point: Point) -> Tensor:
        """Return the advantage, or its parts, whose losses are summed."""
        return self._bounded(point.credit())

    def _bounded(self, advantage: Tensor) -> Tensor:
        most = self.advantage_clip
        return advantage if most is None else advantage.clamp(-most, most)

    def __call__(self, logp: Tensor, old: Tensor, point: Point, scale: Tensor | float) -> Tensor:
        """Return [B, L]: the surrogate, or its tangent if ``couple`` computed it over whole rows.

        scale: factor on the clip of the ratio.
        """
        if isinstance(point.coupling, Tangent):
            stopped = (point.coupling.slope == 0) & (point.advantage != 0)
            loss = point.coupling.value + point.coupling.slope * (logp - logp.detach())
        else:
            surrogate, credit = self._clipping(scale), self.credit(point)
            loss = summed(surrogate, logp, old, credit, point.mask)
            stopped = without_slope(surrogate, logp, old, credit, point.mask)
        # KL from the sampling weights to the current ones, by (rho - 1) - log rho
        observe(
            "kl_behavior",
            (logp - old).expm1() - (logp - old),
            point.mask & ~written_by_others(point)[:, None],
        )
        ratio = (logp - old).exp()
        stated = self.states_clip and isinstance(scale, float)
        beyond = outside(ratio, *self.clip_bounds) if stated else stopped
        watch(ratio, stopped.double(), beyond.double(), point)
        return loss

    def _clipping(self, scale: Tensor | float) -> Surrogate:
        """Return the surrogate with the clip of these decisions."""
        if isinstance(scale, float):
            return self.function
        bounds = zip(("clip_low", "clip_high"), self.clip_bounds, strict=True)
        wider: dict[str, Any] = {name: bound * scale for name, bound in bounds}
        return partial(self.function, **wider)

    def tangent(self, point: Point, measured: Tensor) -> Point:
        """Return all points of the step, with the tangent of a loss of whole rows, from [B, 3 L]:
        log-probs, old ones, and weights in the mean of the loss."""
        logp, old, weight = measured.chunk(3, 1)
        credit = self.credit(point)
        credit = credit.expand(logp.shape + credit.shape[2:])
        rows = RowTable(point.row_id)
        mask = rows.spread(point.mask)
        with torch.enable_grad():
            leaf = rows.spread(logp).detach().requires_grad_()
            loss = summed(self.function, leaf, rows.spread(old), rows.spread(credit), mask)
            total = torch.where(mask, loss * rows.spread(weight), 0.0).sum()
            (slope,) = torch.autograd.grad(total, leaf)
        slope = torch.where(weight > 0, rows.collect(slope) / weight, 0.0)
        return point.replace(coupling=Tangent(value=rows.collect(loss.detach()), slope=slope))


def watch(ratio: Tensor, stopped: Tensor, beyond: Tensor, point: Point) -> None:
    """Log the ratio [B, L], the share of decisions that count as clipped (``beyond``), and by the
    sign of A those without gradient (``stopped``)."""
    observe("ratio", ratio, point.sampled_mask())
    is_replayed = point.provenance.is_replayed
    if is_replayed is not None:
        observe("reuse/ratio", ratio, point.mask & is_replayed[:, None])
    advantage = point.advantage.expand_as(ratio)
    observe("clip_fraction", beyond, point.sampled_mask())
    observe("clip/high", stopped * (advantage > 0), point.sampled_mask())
    observe("clip/low", stopped * (advantage < 0), point.sampled_mask())
