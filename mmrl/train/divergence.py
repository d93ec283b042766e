"""Names weights that diverged in training when an iteration fails: samplers, rewards and the check
of log-probs each report non-finite numbers differently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mmrl.core.distributed import StopAll
from mmrl.core.errors import UserError
from mmrl.core.weights import Weights, local

GROWTH = 1e4  # times the largest number of a weight at the start, or 1: no training gets there


class Divergence:
    """Remembers since when a weight is not finite, or larger than training makes it.
    Nothing is read from the device before something fails."""

    def __init__(self, weights: Weights):
        self.weights = weights
        self.names: list[str] = []
        self.bound: Tensor | None = None  # [N] of the N weights
        self.since: Tensor | None = None  # [N] iteration, -1: never

    @torch.no_grad()
    def look(self, iteration: int) -> None:
        """Check the weights at the start of an iteration."""
        parameters = {name: local(p) for name, p in self.weights.parameters().items()}
        filled = {name: tensor for name, tensor in parameters.items() if tensor.numel()}
        if not filled:
            return
        sizes = torch.stack(
            [s.float() for s in torch._foreach_norm(list(filled.values()), torch.inf)]
        )
        if self.bound is None or self.since is None or self.names != list(filled):
            self.names = list(filled)
            self.bound = GROWTH * sizes.clamp(min=1)
            self.since = torch.full_like(sizes, -1)
        within = sizes <= self.bound  # False of NaN
        fresh = ~within & (self.since < 0)
        self.since = torch.where(within, -1, torch.where(fresh, iteration, self.since))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise UserError with the cause if the block fails and weights have diverged."""
        try:
            yield
        except Exception as error:
            if (cause := self.cause()) is None:
                raise
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            kind = StopAll if isinstance(error, StopAll) else UserError
            raise kind(f"{cause} (what failed then: {first})") from error

    def cause(self) -> str | None:
        """Say which weight diverged first, and when; None if none has."""
        if self.since is None:
            return None
        since = self.since.tolist()
        diverged = sorted((when, n) for n, when in enumerate(since) if when >= 0)
        if not diverged:
            return None
        when, place = diverged[0]
        tensor = local(self.weights.parameters()[self.names[place]])
        largest = float(tensor.abs().max())
        further = f" and {len(diverged) - 1} others are" if len(diverged) > 1 else " is"
        since_when = f"since iteration {int(when)}" if when else "from the beginning"
        return (
            f"the weights have diverged: {self.names[place]}{further} not finite or far too large "
            f"{since_when} (largest number {largest:.3g}); lower the optimizer's lr, set "
            f"train.max_grad_norm or train.warmup_steps, and begin from a checkpoint before it"
        )
