"""Which rows share an optimizer step, and which share a forward pass. Neither depends on the number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from samplers.noise import Rng

from .host import remember
from .types import Point, Rollout


def batches(
    rollout: Rollout, copies: int, rows: int, size: int, rng: Rng, whole_groups: bool = False
) -> Iterator[Rollout]:
    """Split a process's rollout into the optimizer steps of one epoch.

    ``rows`` in the whole iteration are put in one random order that every process computes alike; each step takes the
    next ``size`` of it, and a process those that it holds. The order goes through the groups copy by copy, so that
    every step has (nearly) the same number of rows of every group, and so of every process. With ``whole_groups`` it
    goes through the prompts instead, and deals them to the steps in turn.
    """
    order = torch.empty(rows, dtype=torch.long)  # place of each row of the iteration
    names = _dealt(rows, copies, size) if whole_groups else _stratified(rows, copies, rng)
    order[names] = torch.arange(rows)
    place = order[rollout.row.cpu()]
    for start in range(0, rows, size):
        mine = ((place >= start) & (place < start + size)).nonzero()[:, 0]
        yield rollout[mine.to(rollout.row.device)]


def _stratified(rows: int, copies: int, rng: Rng) -> Tensor:
    """[rows] long: all row names, first one random copy of every prompt in random order, then another ..."""
    names = torch.arange(rows)
    draw = rng.uniform(names, (2,))  # [rows, 2]
    copy = draw[:, 0].view(-1, copies).argsort(1).argsort(1).flatten()  # [rows] random place inside the group
    return torch.argsort(copy + draw[:, 1])


def _dealt(rows: int, copies: int, size: int) -> Tensor:
    """[rows] long: all row names, group by group, so that consecutive prompts lie in different steps."""
    steps = rows // size
    prompt = torch.arange(rows // copies)
    order = torch.argsort(prompt % steps, stable=True)  # [P]
    return (order[:, None] * copies + torch.arange(copies)).flatten()


def passes(points: Iterable[Point], size: int | None, adjacent: bool = False) -> list[Point]:
    """Points joined and cut anew into passes of ``size`` rows; rows with nothing to train on are left out.

    ``adjacent``: rows of one prompt come together, long ones first, so that they share its prefix and little padding.
    """
    points = list(points)
    trained = zip(points, trained_rows(points), strict=True)
    kept = [point if rows is None else point[rows] for point, rows in trained]
    kept = [point for point in kept if len(point)]
    if not kept:
        return []
    whole = Point.cat(kept)
    if adjacent:
        last = (whole.mask * torch.arange(1, whole.mask.shape[1] + 1, device=whole.mask.device)).amax(1)
        order = last.argsort(descending=True, stable=True)
        whole = whole[order[whole.group[order].argsort(stable=True)]]
    parts = list(whole.split(size or len(whole)))
    if adjacent:
        tell(whole, parts)
    return parts


def tell(whole: Point, parts: Sequence[Point]) -> None:
    """Let the host know prompts and masks of a point's parts, which policies of tokens ask for, by one question."""
    if whole.mask.device.type == "cpu":
        return
    known = torch.cat([whole.group[:, None], whole.mask.long()], 1).cpu()
    for part, rows in zip(parts, known.split([len(part) for part in parts]), strict=True):
        remember(part.group, rows[:, 0])
        remember(part.mask, rows[:, 1:].bool())


def trained_rows(points: Sequence[Point]) -> list[Tensor | None]:
    """Find the rows [n] of every point that have a decision to train on, on the CPU; None: all of them have.

    The device is asked once for all points, since every question waits for what it is still computing."""
    if not points:
        return []
    flags = [point.mask.any(1) for point in points]
    known = torch.cat(flags).cpu().split([len(flag) for flag in flags])
    return [None if flag.all() else flag.nonzero()[:, 0] for flag in known]


def loss_weights(point: Point, reduction: str, decisions: int) -> Tensor:
    """[B, L] the weight of every decision before division by ``loss_total``.

    "decision": every decision counts the same. "row": every row does, however long (GRPO's sequence mean); "every_row":
    rows without decisions count too. "constant": division by a number of decisions (Dr. GRPO), which does not favour
    short answers; "sum": the same, not divided by the number of rows. A policy may weigh its decisions besides.
    """
    mask = point.mask if point.weight is None else point.mask * point.weight
    if reduction == "decision":
        return mask.float()
    if reduction in ("row", "every_row"):
        return mask / point.length[:, None].clamp_min(1)
    return mask / decisions


def loss_total(points: Sequence[Point], rollout: Rollout, reduction: str) -> Tensor:
    """[2] float64 of this process: whether it has a decision to train on (above 0), and its part of the number by
    which the weighted sum of all losses is divided: decisions, rows with decisions, or rows that stay in training."""
    trained = [point.mask / point.length[:, None].clamp_min(1) for point in points]
    rows = sum((part.double().sum() for part in trained), torch.zeros((), device=rollout.group.device).double())
    if reduction == "decision":
        total = sum((point.mask.sum().double() for point in points), torch.zeros_like(rows))
    elif reduction == "row":
        total = rows
    else:
        total = rows.new_full((), len(rollout)) if rollout.kept is None else rollout.kept.sum().to(rows)
    return torch.stack([rows, total])
