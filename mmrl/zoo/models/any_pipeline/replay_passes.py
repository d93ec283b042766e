"""Splits a pass, whose rows may be at several times, into calls of a pipeline, and synchronises
processes that wait for each other in every pass of a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmrl.core.distributed import all_gather_plain
from mmrl.core.sharding import whole_blocks
from mmrl.zoo.models.any_pipeline.replay import Visit


class Ask(NamedTuple):
    """Rows of a pass that go through the pipeline together, and its step; no rows: a dummy pass of
    the first row for another process's sake."""

    rows: list[int]
    visit: Visit


class Networks(nn.Module):
    """Holds the trained networks of a pipeline that has several, such as the experts of Wan 2.2."""

    def __init__(self, parts: dict[str, Any]):
        super().__init__()
        for name, net in parts.items():
            self.add_module(name, net)
        self.names = tuple(parts)
        self.config = parts[self.names[0]].config

    def forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the network of that name; without a name return the first argument, so that a
        wrapper sees the whole pass."""
        return self.get_submodule(name)(*args, **kwargs) if name else args[0]

    def add_adapter(self, config: Any) -> None:
        """Add the same kind of adapter to each network."""
        for name in self.names:
            self.get_submodule(name).add_adapter(config)  # type: ignore[operator]

    @property
    def _no_split_modules(self) -> list[str]:
        nets = [self.get_submodule(name) for name in self.names]
        return [block for net in nets for block in whole_blocks(net)]

    def enable_gradient_checkpointing(self) -> None:
        for name in self.names:
            self.get_submodule(name).enable_gradient_checkpointing()  # type: ignore[operator]


def asks(
    times: Tensor, grid: Tensor, steps: int, timestep_of: Callable[[Tensor], Tensor], alone: bool
) -> list[Ask]:
    """Group the rows of a pass, at times [B] on the CPU, by the step of the pipeline's loop whose
    time of ``grid`` [K] is nearest; a time off the grid replaces that step's. ``alone``: one row at
    a time."""
    parts = []
    for time in times.unique():
        k = int((time - grid).abs().argmin())
        exact = bool(time == grid[k])
        visit = Visit(steps, k) if exact else Visit(steps, k, timestep_of(time))
        rows = (times == time).nonzero()[:, 0].tolist()
        parts += [Ask([row], visit) for row in rows] if alone else [Ask(rows, visit)]
    return parts


def in_step(parts: Sequence[Ask], passes: Sequence[Any]) -> list[Ask]:
    """Order the asks of this process by the network passes they cause, ``passes``, and add dummy
    ones where another process has more of a kind; a collective call."""
    asked_visits = [[names, _plain(part.visit)] for names, part in zip(passes, parts, strict=True)]
    everyone: list[list[Any]] = all_gather_plain(asked_visits)
    ordered = []
    for names in sorted({tuple(names) for theirs in everyone for names, _ in theirs}):
        of_kind = [[v for n, v in theirs if tuple(n) == names] for theirs in everyone]
        ours = [part for n, part in zip(passes, parts, strict=True) if tuple(n) == names]
        example = _visit(next(theirs for theirs in of_kind if theirs)[0])
        missing = max(map(len, of_kind)) - len(ours)
        ordered += ours + [Ask([], example)] * missing
    return ordered


def _plain(visit: Visit) -> list[Any]:
    steps, place, timestep = visit
    return [steps, place, None if timestep is None else timestep.item()]


def _visit(plain: list[Any]) -> Visit:
    steps, place, timestep = plain
    return Visit(steps, place, None if timestep is None else torch.tensor(timestep))
