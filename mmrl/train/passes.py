"""Cuts an optimizer step into passes through the network, equally many on all processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from mmrl.config.options import TrainOptions
from mmrl.config.plan import Plan
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.host import sent
from mmrl.core.types import Point, Rollout, Transition
from mmrl.objectives.base import Objective
from mmrl.policies.base import Policy
from mmrl.train import minibatches
from mmrl.train.batch import Batch
from mmrl.train.minibatches import Points
from samplers.noise import Rng

KINDS: tuple[type, ...] = (type(None), Transition)


class Passes:
    """Makes the steps of an epoch, the points of a step and the passes over these points."""

    def __init__(self, policy: Policy, objective: Objective, options: TrainOptions, plan: Plan):
        self.policy = policy
        self.objective = objective
        self.options = options
        self.plan = plan
        whole_steps = options.train_batch_size % options.group_size == 0
        self.coupled = objective.couples(policy)
        if self.coupled == "groups" and not whole_steps:
            raise UserError(
                f"train.train_batch_size {options.train_batch_size}: this objective compares whole "
                f"groups, so it must be a multiple of train.group_size {options.group_size}"
            )
        self.whole_groups = self.coupled == "groups" or (policy.adjacent and whole_steps)

    def steps(self, rollout: Rollout, sizes: Sequence[int], rng: Rng) -> Iterator[Rollout]:
        """Yield this process's rows of every optimizer step of an epoch; ``sizes``: of the groups
        of all processes."""
        return minibatches.batches(rollout, sizes, self.plan.steps, rng, self.whole_groups)

    def first_rows(self, sizes: Sequence[int], rng: Rng) -> Tensor:
        """Return the names [n] of the rows of the first optimizer step of an epoch, of all
        processes, as ``steps`` deals them."""
        step = minibatches.dealt(sizes, self.plan.steps, rng, self.whole_groups)
        return (step == 0).nonzero()[:, 0]

    def points(self, rollout: Rollout, rng: Rng, on_policy: bool) -> Points:
        """Return the objective's points for the rows of a step. States of a path are made again in
        every loop; tokens, and the points of coupled objectives, are small enough to hold."""

        def make() -> Iterator[Point]:
            points = self.objective.points(self.policy, rollout, rng) if len(rollout) else ()
            return (point.replace(on_policy=on_policy) for point in points)

        if self.policy.adjacent or self.coupled:
            points = Points(partial(iter, list(make())))
        else:
            points = Points(make)
        self.objective.weigh([(part.mask, part.renoised) for part in points.outline])
        return points

    def most_rows(self) -> int:
        """Return the largest number of rows that a pass may have."""
        return min(self.plan.micro_batch, self.policy.most or self.plan.micro_batch)

    def cut(
        self, batch: Batch, points: Points, rows: int, rng: Rng, couple: bool = False
    ) -> tuple[int, Iterator[Point]]:
        """Cut points into passes of ``rows`` rows. Returns how many passes every process makes, as
        sharded models need, and the passes on the device; a process with fewer adds idle ones,
        which train nothing.

        ``couple``: a coupled objective sees them all before the first is returned.
        """
        device = batch.idle_row.group.device
        trained: Iterable[Point] = minibatches.passes(points, rows, self.policy.adjacent)
        if self.policy.capabilities.decisions == "mixed":
            count, passes = self._of_kinds(batch, points, rows, rng, trained)
        else:
            needed = points.passes(rows)
            # without a row that teaches there is still a gradient, of zeros
            count = max(1, distributed.largest(needed, device))
            idle = [self.idle(batch, rng) for _ in range(count - needed)]
            if couple and self.coupled:
                trained = self.couple(batch, list(trained), idle)
            passes = chain(trained, idle)
        return count, (point.map(lambda tensor: sent(tensor, device)) for point in passes)

    def _of_kinds(
        self, batch: Batch, points: Points, rows: int, rng: Rng, trained: Iterable[Point]
    ) -> tuple[int, Iterator[Point]]:
        """Count the passes that every process makes, and order them: equally many of each kind,
        since those of texts and of pictures go through other layers. A collective call."""
        device = batch.idle_row.group.device
        needed = [-(-points.rows.get(kind, 0) // rows) for kind in KINDS]
        most = distributed.all_max(torch.tensor(needed, device=device)).tolist()
        if not any(most):
            return 1, iter([self.idle(batch, rng)])
        kinds = [kind for kind, count in zip(KINDS, most, strict=True) for _ in range(count)]
        return len(kinds), self._filled(batch, rng, iter(trained), kinds)

    def _filled(
        self, batch: Batch, rng: Rng, trained: Iterator[Point], kinds: list[type]
    ) -> Iterator[Point]:
        """Yield a pass of each of ``kinds``, an idle one where ``trained`` has none."""
        waiting = next(trained, None)
        for kind in kinds:
            if waiting is not None and type(waiting.step) is kind:
                yield waiting
                waiting = next(trained, None)
            else:
                yield self.idle(batch, rng, kind)

    @torch.no_grad()
    def couple(self, batch: Batch, passes: list[Point], idle: list[Point]) -> list[Point]:
        """Let an objective see all rows of the step before its elementwise loss."""
        device = batch.idle_row.group.device
        measured = [
            self.objective.measure(self.policy, point.map(lambda tensor: sent(tensor, device)))
            for point in [*passes, *idle]
        ]
        # without rows of its own a process still joins what couple does with all
        joined = passes or idle
        coupled = self.objective.couple(Point.cat(joined), torch.cat(measured[: len(joined)]))
        parts = list(coupled.split(len(passes[0]))) if passes else []
        if parts and self.policy.adjacent:
            minibatches.tell(coupled, parts)
        return parts

    def idle(self, batch: Batch, rng: Rng, kind: type = object) -> Point:
        """Make a pass of one row that trains nothing, of a step of this kind."""
        advantage = torch.zeros_like(batch.idle_row.logprob[:, :1])
        row = self.policy.idle_row(batch.idle_row.replace(advantage=advantage))
        points = self.objective.points(self.policy, row, rng)
        point = next(point for point in points if isinstance(point.step, kind))[:1]
        return point.replace(mask=torch.zeros_like(point.mask))
