"""Keeps the passes of sampling with what their gradient needs, so that the first optimizer step
makes no forward pass of its own (``train.reuse_rollout_graph``).

While the weights are those that sampled, the outputs that an update would compute are those of
sampling. They are handed out as leaves: the loss of whatever rows share a pass of the update puts
its gradient on them, and at the end each pass of sampling is gone back through once, by the chain
rule. So neither the order of the rows nor the size of a pass matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.types import Query, Transition
from mmrl.core.weights import LIVE
from samplers.batching import chunks

Sampled = TypeVar("Sampled")


@dataclass(frozen=True)
class Recorded:
    """Holds one pass of sampling: its rows [B], their time, and its outputs with their graph."""

    row_id: Tensor
    time: Tensor  # [B]
    outputs: tuple[Tensor, ...]  # each [B, *]


class RolloutGraphs:
    """Records passes while a policy samples, and stands in for them in its first optimizer step.

    ``rows``: the names [n] of the rows of that step, on the CPU.
    """

    remedy = (
        "take a narrower noise_window, a smaller train_batch_size or "
        "train.gradient_checkpointing=true"
    )

    def __init__(self, rows: Tensor):
        self.rows = rows
        self.wanted = 0  # how many of the rows that are sampled now
        self.given_up = False
        self.recorded: list[Recorded] = []
        self.leaves: tuple[Tensor, ...] = ()  # [N, *] of all recorded rows, by output
        self.used = torch.zeros(0, dtype=torch.bool)  # [N] whether an update asked for them
        self.at: tuple[Tensor, Tensor] | None = None  # their names and times, [N] each
        self.answers = False  # whether a policy is to take its outputs from here

    def __reduce__(self) -> Any:
        raise TypeError("graphs stay in the process that sampled")

    def order(self, row: Tensor) -> Tensor | None:
        """Return an order [B] in which the rows of the step come first; None: it is theirs already.
        ``row``: the names of those that are sampled now, on the CPU."""
        in_step = torch.isin(row, self.rows)
        self.wanted = int(in_step.sum())
        return None if self.wanted in (0, len(row)) else torch.argsort(~in_step, stable=True)

    def tried(self, policy: Any, sample: Callable[[Any], Sampled]) -> Sampled:
        """Sample with graphs, or, where a process alone runs out of memory, without them."""
        before = len(self.recorded)
        if not self.given_up:
            try:
                return sample(self)
            except torch.OutOfMemoryError:
                if distributed.process()[1] > 1:
                    raise
                del self.recorded[before:]
                self.give_up(policy)
        return sample(None)

    def give_up(self, policy: Any) -> None:
        """Record nothing any more, for want of memory."""
        self.forget()
        self.given_up = True
        policy.news.append(
            "out of memory: train.reuse_rollout_graph is off from now on, since the graphs of a "
            f"rollout do not fit; {self.remedy}"
        )

    def record(
        self, policy: Any, point: Query, work: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Make a pass of the plain network with its graph; return its outputs without."""
        with sampling_graphs(policy):
            outputs = work()
        conditional, empty = outputs
        distinct = outputs if empty is not conditional else (conditional,)
        self.recorded.append(Recorded(point.row_id, point.time, distinct))
        detached = [output.detach() for output in distinct]
        return detached[0], detached[-1]

    @contextmanager
    def answering(self, policy: Any) -> Iterator[None]:
        """Let a policy take the outputs of what was recorded from here, in a first step."""
        self._join()
        policy.graphs = self
        try:
            yield
        finally:
            policy.graphs = None
            self.answers = False

    def stands_in(self, policy: Any) -> bool:
        """Tell whether a pass is one of the step's, with gradient, by the weights that sampled."""
        return self.answers and torch.is_grad_enabled() and policy.weights.current == LIVE

    def outputs_at(self, policy: Any, point: Query) -> tuple[Tensor, Tensor] | None:
        """Return the outputs at a point of the path; None where a pass must be made: without
        gradient, under other weights, with other guidance, or where nothing was recorded."""
        decides = point.guidance is None and isinstance(point.step, Transition)
        if not decides or self.at is None or not self.stands_in(policy):
            return None
        row_id, time = self.at
        same = (point.row_id[:, None] == row_id) & (point.time[:, None] == time)
        place = same.int().argmax(1)
        self.used[place] = True
        outputs = [leaf[place] for leaf in self.leaves]
        return outputs[0], outputs[-1]

    def covers(self, row: Tensor) -> bool:
        """Tell whether all of these rows [B] were recorded."""
        if not len(row):
            return True
        if not self.recorded:
            return False
        names = torch.cat([each.row_id for each in self.recorded])
        return bool(torch.isin(row, names).all())

    def backward(self) -> None:
        """Go back through the recorded passes that were used, with what the losses have put on
        their outputs, and forget them."""
        used = self.used.cpu()  # one wait for all
        first = 0
        while self.recorded:
            each = self.recorded.pop(0)
            last = first + len(each.row_id)
            pairs = [
                (output, leaf.grad[first:last])
                for output, leaf in zip(each.outputs, self.leaves, strict=True)
                if output.requires_grad and leaf.grad is not None and used[first:last].any()
            ]
            if pairs:
                outputs, gradients = zip(*pairs, strict=True)
                torch.autograd.backward(outputs, gradients)
            first = last
        self.forget()

    def forget(self) -> None:
        """Free everything that was recorded."""
        self.recorded = []
        self.leaves = ()
        self.at = None

    def _join(self) -> None:
        """Make one leaf of every output of all passes."""
        if self.leaves or not self.recorded:
            return
        self.at = (
            torch.cat([each.row_id for each in self.recorded]),
            torch.cat([each.time for each in self.recorded]),
        )
        self.used = torch.zeros_like(self.at[0], dtype=torch.bool)
        outputs = zip(*(each.outputs for each in self.recorded), strict=True)
        self.leaves = tuple(
            torch.cat([part.detach() for part in parts]).requires_grad_(parts[0].requires_grad)
            for parts in outputs
        )


@contextmanager
def sampling_graphs(policy: Any) -> Iterator[None]:
    """Let passes of the plain network that sample be recorded with their graphs."""
    policy.sampling = True
    try:
        with torch.enable_grad():
            yield
    finally:
        policy.sampling = False


def recording(
    graphs: RolloutGraphs | None, rows: int, size: int
) -> Iterator[tuple[slice, RolloutGraphs | None]]:
    """Cut ``rows`` rows into passes of ``size``, those that are recorded apart from the others."""
    first = graphs.wanted if graphs is not None else 0
    for part in chunks(first, size):
        yield part, graphs
    for part in chunks(rows - first, size):
        yield slice(first + part.start, first + part.stop), None
