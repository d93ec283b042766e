"""Decides which rows share an optimizer step, and which share a forward pass. Neither depends on
the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.core.host import remember
from mmrl.core.types import Point, Rollout
from samplers.noise import Rng


def batches(
    rollout: Rollout, copies: int, rows: int, size: int, rng: Rng, whole_groups: bool = False
) -> Iterator[Rollout]:
    """Split a process's rollout into the optimizer steps of one epoch.

    ``rows`` in the whole iteration are put in one random order that every process computes alike;
    each step takes the next ``size`` of it, and a process those that it holds. The order goes
    through the groups copy by copy, so that every step has (nearly) the same number of rows of
    every group, and so of every process. With ``whole_groups`` it goes through the prompts instead,
    and deals them to the steps in turn.
    """
    order = torch.empty(rows, dtype=torch.long)  # place of each row of the iteration
    names = _dealt(rows, copies, size) if whole_groups else _stratified(rows, copies, rng)
    order[names] = torch.arange(rows)
    place = order[rollout.row_id.cpu()]
    for start in range(0, rows, size):
        local_rows = ((place >= start) & (place < start + size)).nonzero()[:, 0]
        # all of its rows in their order: not a copy of their paths
        whole = len(local_rows) == len(rollout)
        yield rollout if whole else rollout[local_rows.to(rollout.row_id.device)]


def _stratified(rows: int, copies: int, rng: Rng) -> Tensor:
    """Order all row names, [rows] long: first one random copy of every prompt in random order, then
    another, and so on."""
    names = torch.arange(rows)
    draw = rng.uniform(names, (2,))  # [rows, 2]
    # [rows] random place inside the group
    copy = draw[:, 0].view(-1, copies).argsort(1).argsort(1).flatten()
    return torch.argsort(copy + draw[:, 1])


def _dealt(rows: int, copies: int, size: int) -> Tensor:
    """Order all row names, [rows] long: group by group, so that consecutive prompts lie in
    different steps."""
    steps = rows // size
    prompt = torch.arange(rows // copies)
    order = torch.argsort(prompt % steps, stable=True)  # [P]
    return (order[:, None] * copies + torch.arange(copies)).flatten()


class Outline(NamedTuple):
    """Keeps of a point how much there is to train on, without network inputs."""

    mask: Tensor  # [B, L] bool
    num_decisions: Tensor  # [B]


class Points:
    """Makes the points of one optimizer step anew in every loop over them, so that all are never
    held at once.

    ``outline``: their masks and lengths, which are. ``rows``: how many of their rows have a
    decision to train on.
    """

    def __init__(self, make: Callable[[], Iterable[Point]]):
        self.make = make
        self.outline = [Outline(point.mask, point.num_decisions) for point in make()]
        self.trained = trained_rows(self.outline)
        pairs = zip(self.outline, self.trained, strict=True)
        self.rows = sum(len(point.mask if rows is None else rows) for point, rows in pairs)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.make())


def passes(points: Iterable[Point], size: int | None, adjacent: bool = False) -> Iterator[Point]:
    """Join points and cut them anew into passes of ``size`` rows; leave out rows with nothing to
    train on.

    Points are made as passes need them. ``adjacent``: rows of one prompt come together, long
    ones first, so that they share its prefix and little padding; for that all points are held.
    """
    if adjacent or size is None:
        return _sorted_passes(points, size, adjacent)
    return _cut(points, size)


def _cut(points: Iterable[Point], size: int) -> Iterator[Point]:
    waiting: list[Point] = []  # fewer rows than a pass takes
    for point in _trained(points):
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
        tell(whole, parts)
    yield from parts


def tell(whole: Point, parts: Sequence[Point]) -> None:
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
    short answers; "token_sum": the same, not divided by the number of rows. A policy may weigh its
    decisions besides.
    """
    mask = point.mask if point.weight is None else point.mask * point.weight
    if loss_agg_mode == "token_mean":
        return mask.float()
    if loss_agg_mode in ("seq_mean_token_mean", "seq_mean_token_mean_all"):
        return mask / point.num_decisions[:, None].clamp_min(1)
    return mask / decisions


def loss_total(points: Sequence[Point | Outline], rollout: Rollout, loss_agg_mode: str) -> Tensor:
    """Return what this process adds to the loss's divisor, [2] float64: whether it has a decision
    to train on (above 0), and its part of the number by which the weighted sum of all losses is
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
