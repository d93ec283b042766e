"""Decides which rows share an optimizer step, and which share a forward pass. Neither depends on
the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.core.host import remember
from mmrl.core.types import Point, Renoised, Rollout
from samplers.noise import Rng


def batches(
    rollout: Rollout,
    sizes: Sequence[int],
    steps: int,
    rng: Rng,
    whole_groups: bool = False,
) -> Iterator[Rollout]:
    """Split a process's rollout into the optimizer steps of one epoch.

    ``sizes``: how many rows answer each prompt of the whole iteration. Its rows are dealt to the
    steps in a way that every process computes alike; a process takes those that it holds. Every
    step has (nearly) the same number of rows of every group, and so of every process; with
    ``whole_groups`` it has whole groups, and as many as any other.
    """
    step = dealt(sizes, steps, rng, whole_groups)
    local_steps = step[rollout.row_id.cpu()]
    for number in range(steps):
        rows = (local_steps == number).nonzero()[:, 0]
        # all of its rows in order: no copy of their paths
        whole = len(rows) == len(rollout)
        yield rollout if whole else rollout[rows.to(rollout.row_id.device)]


def dealt(sizes: Sequence[int], steps: int, rng: Rng, whole_groups: bool) -> Tensor:
    """Choose the step of every row of the iteration, [rows] long."""
    return _dealt(sizes, steps) if whole_groups else _stratified(sizes, steps, rng)


def _stratified(sizes: Sequence[int], steps: int, rng: Rng) -> Tensor:
    """Choose the step of every row, [rows] long: in the order of the rows' places one random copy
    of every prompt comes first in random order, then another, and so on."""
    count = torch.tensor(sizes)
    rows = int(count.sum())
    draw = rng.uniform(torch.arange(rows), (2,))  # [rows, 2]
    group = torch.arange(len(count)).repeat_interleave(count)
    # [rows] random place inside the group, spread over the iteration where groups differ in size
    order = torch.argsort(group + draw[:, 0])
    copy = torch.empty(rows, dtype=torch.float64)
    copy[order] = (torch.arange(rows) - (count.cumsum(0) - count)[group]).double()
    copy = (copy + draw[:, 1]) * (int(count.max()) / count[group])
    return _steps(torch.argsort(copy), steps)


def _steps(order: Tensor, steps: int) -> Tensor:
    """Cut rows in their ``order`` into steps that differ by one row at most; return the step of
    every row."""
    step = torch.empty_like(order)
    step[order] = torch.arange(len(order)) * steps // len(order)
    return step


def _dealt(sizes: Sequence[int], steps: int) -> Tensor:
    """Choose the step of every row, [rows] long: consecutive prompts lie in different steps, and a
    step gets a further prompt only when no other has fewer rows."""
    filled = [0] * steps
    chosen = []
    for size in sizes:
        step = min(range(steps), key=lambda number: filled[number])
        filled[step] += size
        chosen.append(step)
    return torch.tensor(chosen).repeat_interleave(torch.tensor(sizes))


def mask_zero_advantage(rollout: Rollout) -> Rollout:
    """Mask the decisions of rows whose advantage, with all its parts, is 0."""
    advantage = rollout.advantages() if rollout.advantage_parts is None else rollout.advantage_parts
    rows = advantage.flatten(1).ne(0).any(1)
    return rollout.replace(mask=rollout.mask & rows[:, None], trainable=rollout.alive() & rows)


class Outline(NamedTuple):
    """Keeps of a point how much there is to train on, without network inputs."""

    mask: Tensor  # [B, L] bool
    num_decisions: Tensor  # [B]
    renoised: bool = False  # a re-noised finished sample; else decisions as sampled
    kind: type = type(None)  # of the step: passes are of one kind


class Points:
    """Makes the points of one optimizer step again in every loop over them, so that they are never
    all held at once.

    ``outline``: their masks and lengths, which are held. ``rows``: how many of their rows have a
    decision to train on, by kind; points of a kind are consecutive.
    """

    def __init__(self, make: Callable[[], Iterable[Point]]):
        self.make = make
        self.outline = [
            Outline(
                point.mask, point.num_decisions, isinstance(point.step, Renoised), type(point.step)
            )
            for point in make()
        ]
        self.trained = trained_rows(self.outline)
        pairs = zip(self.outline, self.trained, strict=True)
        self.rows: dict[type, int] = {}
        for point, rows in pairs:
            count = len(point.mask if rows is None else rows)
            self.rows[point.kind] = self.rows.get(point.kind, 0) + count

    def passes(self, size: int) -> int:
        """Count the passes of ``size`` rows that they take."""
        return sum(self.passes_of(kind, size) for kind in self.rows)

    def passes_of(self, kind: type, size: int) -> int:
        """Count the passes of ``size`` rows that points of a kind take."""
        return -(-self.rows.get(kind, 0) // size)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.make())


def passes(points: Iterable[Point], size: int | None, adjacent: bool = False) -> Iterator[Point]:
    """Regroup points into passes of ``size`` rows; leave out rows with nothing to train on.

    Points are made as passes need them. ``adjacent``: rows of one prompt are consecutive, long
    ones first, so that they share its prefix and little padding; for that all points are held.
    """
    if adjacent or size is None:
        return _sorted_passes(points, size, adjacent)
    return _cut(points, size)


def _cut(points: Iterable[Point], size: int) -> Iterator[Point]:
    waiting: list[Point] = []  # fewer rows than a pass takes
    for point in _trained(points):
        if waiting and type(point.step) is not type(waiting[0].step):
            yield _joined(waiting)
            waiting = []
        while len(point):
            free = size - sum(map(len, waiting))
            waiting.append(point[:free])
            point = point[free:]
            if sum(map(len, waiting)) == size:
                yield _joined(waiting)
                waiting = []
    if waiting:
        yield _joined(waiting)


def _sorted_passes(points: Iterable[Point], size: int | None, adjacent: bool) -> Iterator[Point]:
    alive = [point for point in _trained(points) if len(point)]
    if not alive:
        return
    whole = _joined(alive)
    if adjacent:
        last = (
            whole.mask * torch.arange(1, whole.mask.shape[1] + 1, device=whole.mask.device)
        ).amax(1)
        order = last.argsort(descending=True, stable=True)
        whole = whole[order[whole.group[order].argsort(stable=True)]]
    parts = list(whole.split(size or len(whole)))
    if adjacent:
        cache_masks_on_host(whole, parts)
    yield from parts


def cache_masks_on_host(whole: Point, parts: Sequence[Point]) -> None:
    """Copy group and mask of a point to the host in one read, for all its parts; policies of tokens
    read both."""
    if whole.mask.device.type == "cpu":
        return
    known = torch.cat([whole.group[:, None], whole.mask.long()], 1).cpu()
    for part, rows in zip(parts, known.split([len(part) for part in parts]), strict=True):
        remember(part.group, rows[:, 0])
        remember(part.mask, rows[:, 1:].bool())


def trained_rows(points: Sequence[Point | Outline]) -> list[Tensor | None]:
    """Find the rows [n] of every point that have a decision to train on, on the CPU; None: all of
    them have.

    The device is read once for all points, since every read waits for what it is still
    computing."""
    if not points:
        return []
    flags = [point.mask.any(1) for point in points]
    known = torch.cat(flags).cpu().split([len(flag) for flag in flags])
    return [None if flag.all() else flag.nonzero()[:, 0] for flag in known]


def _trained(points: Iterable[Point]) -> Iterator[Point]:
    """Yield the rows with a decision to train on, copying only points that have other rows."""
    known = points.trained if isinstance(points, Points) else None
    for i, point in enumerate(points):
        rows = trained_rows([point])[0] if known is None else known[i]
        yield point if rows is None else point[rows]


def _joined(points: Sequence[Point]) -> Point:
    return points[0] if len(points) == 1 else Point.cat(points)


def loss_weights(point: Point, loss_agg_mode: str, decisions: int) -> Tensor:
    """Return the weight of every decision before division by ``loss_total``, [B, L].

    "token_mean": every decision counts the same. "seq_mean_token_mean": every row does, however
    long (GRPO's sequence mean); "seq_mean_token_mean_all": rows without decisions count too.
    "seq_mean_token_sum_norm": division by a number of decisions (Dr. GRPO), which does not favour
    short answers; "token_sum": the same, not divided by the number of rows. A policy may also
    weight its decisions.
    """
    mask = point.mask if point.weight is None else point.mask * point.weight
    if loss_agg_mode == "token_mean":
        return mask.float()
    if loss_agg_mode in ("seq_mean_token_mean", "seq_mean_token_mean_all"):
        return mask / point.num_decisions[:, None].clamp_min(1)
    return mask / decisions


def loss_total(points: Sequence[Point | Outline], rollout: Rollout, loss_agg_mode: str) -> Tensor:
    """Return this process's share of the loss's divisor, [2] float64: whether it has a decision to
    train on (above 0), and its part of the number by which the weighted sum of all losses is
    divided: decisions, rows with decisions, or rows that stay in training."""
    trained = [point.mask / point.num_decisions[:, None].clamp_min(1) for point in points]
    rows = sum(
        (part.double().sum() for part in trained),
        torch.zeros((), device=rollout.group.device).double(),
    )
    if loss_agg_mode == "token_mean":
        total = sum((point.mask.sum().double() for point in points), torch.zeros_like(rows))
    elif loss_agg_mode == "seq_mean_token_mean":
        total = rows
    else:
        total = (
            rows.new_full((), len(rollout))
            if rollout.trainable is None
            else rollout.trainable.sum().to(rows)
        )
    return torch.stack([rows, total])
