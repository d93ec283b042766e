"""Cuts an optimizer step into passes through the network, equally many on all processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice

import torch

from mmrl.config.options import TrainOptions
from mmrl.config.plan import Plan
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.host import sent
from mmrl.core.types import Point, Rollout
from mmrl.objectives.base import Objective
from mmrl.objectives.contracts import Couples, WeighsPoints
from mmrl.policies.base import Policy
from mmrl.policies.contracts import FillsIdleRows
from mmrl.train import minibatches
from mmrl.train.batch import Batch
from mmrl.train.minibatches import Points
from samplers.noise import Rng


class Passes:
    """Makes the steps of an epoch, the points of a step and the passes over these points."""

    def __init__(self, policy: Policy, objective: Objective, options: TrainOptions, plan: Plan):
        self.policy = policy
        self.objective = objective
        self.options = options
        self.plan = plan
        whole_steps = options.train_batch_size % options.group_size == 0
        self.coupled = objective.couples(policy) if isinstance(objective, Couples) else ""
        if self.coupled == "groups" and not whole_steps:
            raise UserError(
                f"train.train_batch_size {options.train_batch_size}: this objective compares whole "
                f"groups, so it must be a multiple of train.group_size {options.group_size}"
            )
        self.whole_groups = self.coupled == "groups" or (
            policy.keep_groups_together and whole_steps
        )

    def steps(self, rollout: Rollout, sizes: Sequence[int], rng: Rng) -> Iterator[Rollout]:
        """Yield this process's rows of every optimizer step of an epoch; ``sizes``: of the groups
        of all processes."""
        return minibatches.batches(rollout, sizes, self.plan.steps, rng, self.whole_groups)

    def points(self, rollout: Rollout, rng: Rng, on_policy: bool) -> Points:
        """Return the objective's points for the rows of a step. States of a path are made again in
        every loop; tokens, and the points of coupled objectives, are small enough to hold."""

        def make() -> Iterator[Point]:
            points = self.objective.points(self.policy, rollout, rng) if len(rollout) else ()
            return (point.replace(on_policy=on_policy) for point in points)

        if self.policy.keep_groups_together or self.coupled:
            points = Points(partial(iter, list(make())))
        else:
            points = Points(make)
        if isinstance(self.objective, WeighsPoints):
            self.objective.before_step([(part.mask, part.renoised) for part in points.outline])
        return points

    def most_rows(self) -> int:
        """Return the largest number of rows that a pass may have."""
        planned = self.plan.micro_batch
        return min(planned, self.policy.pass_sizes.max_micro_batch or planned)

    def cut(
        self, batch: Batch, points: Points, rows: int, rng: Rng, couple: bool = False
    ) -> tuple[int, Iterator[Point]]:
        """Cut points into passes of ``rows`` rows. Returns how many passes every process makes, as
        sharded models need, and the passes on the device; a process with fewer adds idle ones,
        which train nothing.

        ``couple``: a coupled objective sees them all before the first is returned.
        """
        device = batch.idle_row.group.device
        trained: Iterable[Point] = minibatches.passes(
            points, rows, self.policy.keep_groups_together
        )
        if self.objective.requires.sums_kinds or self.policy.capabilities.decisions == "mixed":
            count, passes = self._by_kind(batch, points, rows, rng, iter(trained))
        else:
            needed = points.passes(rows)
            # without a row to train on there is still a gradient, of zeros
            count = max(1, distributed.largest(needed, device))
            idle = [self.idle(batch, rng) for _ in range(count - needed)]
            if couple and self.coupled:
                trained = self.couple(batch, list(trained), idle)
            passes = chain(trained, idle)
        return count, (point.map(lambda tensor: sent(tensor, device)) for point in passes)

    def _by_kind(
        self, batch: Batch, points: Points, rows: int, rng: Rng, trained: Iterator[Point]
    ) -> tuple[int, Iterator[Point]]:
        """Count the passes that every process makes, and add idle ones: equally many of every kind,
        in one order, since each kind uses different weights, which shards must gather at the same
        time. Collective calls."""
        idle: dict[type, Point] = {}
        for point in self._idle_points(batch, rng):
            idle.setdefault(type(point.step), point)
        device = batch.idle_row.group.device
        counts = [distributed.largest(points.passes_of(kind, rows), device) for kind in idle]
        if not any(counts):
            counts[0] = 1  # of zeros, as above

        def passes() -> Iterator[Point]:
            for (kind, point), count in zip(idle.items(), counts, strict=True):
                ours = points.passes_of(kind, rows)
                yield from islice(trained, ours)
                yield from [point] * (count - ours)

        return sum(counts), passes()

    @torch.no_grad()
    def couple(self, batch: Batch, passes: list[Point], idle: list[Point]) -> list[Point]:
        """Let an objective see all rows of the step before its elementwise loss."""
        assert isinstance(self.objective, Couples)
        device = batch.idle_row.group.device
        measured = [
            self.objective.measure(self.policy, point.map(lambda tensor: sent(tensor, device)))
            for point in [*passes, *idle]
        ]
        # a process without rows still joins the collective calls of couple
        joined = passes or idle
        coupled = self.objective.couple(Point.cat(joined), torch.cat(measured[: len(joined)]))
        parts = list(coupled.split(len(passes[0]))) if passes else []
        if parts and self.policy.keep_groups_together:
            minibatches.cache_masks_on_host(coupled, parts)
        return parts

    def idle(self, batch: Batch, rng: Rng) -> Point:
        """Make a pass of one row that trains nothing."""
        return next(self._idle_points(batch, rng))

    def _idle_points(self, batch: Batch, rng: Rng) -> Iterator[Point]:
        """Make all points of a row, without anything to train on."""
        advantage = torch.zeros_like(batch.idle_row.logprob[:, :1])
        row = batch.idle_row.replace(advantage=advantage)
        if isinstance(self.policy, FillsIdleRows):
            row = self.policy.idle_row(row)
        for point in self.objective.points(self.policy, row, rng):
            first = point[:1]
            yield first.replace(mask=torch.zeros_like(first.mask))
