"""Token models: a decision is a categorical draw. Causal and masked models differ in ``order``
only.

``order`` [B, T] is the pass that committed each token; a state at pass k shows the tokens of
earlier passes and hides the rest. A family says how to encode a prompt and how to get logits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.distributions import Categorical
from mmrl.core.types import Media, Point, Prompt, Rollout
from mmrl.policies.base import (
    DEFAULT_CONTEXT,
    Policy,
    RolloutContext,
    first_of_group,
    rows_of,
)
from mmrl.policies.capabilities import Capabilities
from samplers.batching import at_width, chunks
from samplers.noise import Rng


class TokenPolicy(Policy):
    """``length`` tokens a sample, committed in ``passes`` passes; ``mask_id`` stands for a hidden
    token."""

    not_options = ("net", "length", "mask_id")
    capabilities = Capabilities("categorical", one_pass=False)

    def __init__(
        self, net: nn.Module, length: int, mask_id: int, passes: int | None = None, **options: Any
    ):
        super().__init__(net, **options)
        self.length = length
        self.mask_id = mask_id
        self.passes = passes or length

    @abstractmethod
    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Nest of tensors [P, *]."""

    @abstractmethod
    def logits(self, ids: Tensor, cond: dict[str, Any]) -> Tensor:
        """[B, T, V] for ids [B, T] with hidden tokens, under conditions [B, *]."""

    @abstractmethod
    def commit(self, step: int, dist: Categorical, ids: Tensor, hidden: Tensor) -> Tensor:
        """[B, T] bool: which hidden positions become final in this pass."""

    def decode(self, rollout: Rollout) -> Media:
        return rollout.sample

    def rollout(
        self,
        prompts: list[Prompt],
        copies: int,
        rng: Rng,
        context: RolloutContext = DEFAULT_CONTEXT,
    ) -> Rollout:
        row = rng.rows(len(prompts), copies).to(self.device)
        group = torch.arange(len(prompts), device=self.device).repeat_interleave(copies)
        cond = self.encode(prompts)
        hidden = torch.full((len(row), self.length), self.mask_id, device=self.device)
        size = self.chunk(len(row), lambda n: self._trial(hidden[:n], cond, group[:n]))
        parts = chunks(len(row), size)
        return Rollout.cat([self._sample(group[p], row[p], cond, rng) for p in parts]).replace(
            prompts=tuple(prompts)
        )

    def _sample(self, group: Tensor, row: Tensor, cond: dict[str, Any], rng: Rng) -> Rollout:
        ids = torch.full((len(row), self.length), self.mask_id, device=row.device)
        order = torch.full_like(ids, self.passes)
        logprob = torch.zeros(ids.shape, dtype=self.dtype, device=row.device)
        for step in range(self.passes):
            dist = Categorical(self._forward(ids, rows_of(cond, group)))
            draw = dist.sample(rng.uniform(row, (self.length,), step))
            new = self.commit(step, dist, draw, hidden=order == self.passes)
            ids = torch.where(new, draw, ids)
            order = torch.where(new, step, order)
            logprob = torch.where(new, dist.log_prob(draw), logprob)
        mask = torch.ones_like(ids, dtype=torch.bool)
        return Rollout(
            group=group,
            cond=cond,
            row_id=row,
            sample=ids,
            logprob=logprob,
            commit_step=order,
            mask=mask,
        )

    def path(self, rollout: Rollout) -> Iterator[Point]:
        for step in range(self.passes):
            yield self._point(
                rollout, hide=rollout.commit_step >= step, score=rollout.commit_step == step
            )

    def renoise(
        self, rollout: Rollout, rng: Rng, time: Tensor | None = None, shared: bool = False
    ) -> Iterator[Point]:
        name = first_of_group(rollout) if shared else rollout.row_id
        rate = rng.uniform(name, (1,), step=0).clamp_min(0.1) if time is None else time[:, None]
        hide = rng.uniform(name, (self.length,), step=1) < rate
        yield self._point(rollout, hide, score=hide).replace(logprob=None)

    def dist(self, point: Point) -> Categorical:
        return Categorical(self._forward(point.state, rows_of(point.cond, point.group)))

    def _trial(self, ids: Tensor, cond: dict[str, Any], group: Tensor) -> None:
        """One pass of the largest kind, for what it allocates."""
        self._forward(ids, rows_of(cond, group))

    def _forward(self, ids: Tensor, cond: dict[str, Any]) -> Tensor:
        return at_width(self.logits, max(self.padded(), len(ids)), ids, cond)

    def _point(self, rollout: Rollout, hide: Tensor, score: Tensor) -> Point:
        return Point(
            group=rollout.group,
            cond=rollout.cond,
            row_id=rollout.row_id,
            target=rollout.sample,
            mask=rollout.mask & score,
            state=torch.where(hide, self.mask_id, rollout.sample),
            num_decisions=rollout.mask.sum(1),
            logprob=rollout.logprob,
            advantage=rollout.advantage,
            sampler_logprob=rollout.sampler_logprob,
        )


class MaskedPolicy(TokenPolicy):
    """Each pass commits the hidden positions it is most confident of (MaskGIT, Chang et al.
    2022)."""

    def commit(self, step: int, dist: Categorical, ids: Tensor, hidden: Tensor) -> Tensor:
        keep = self.length * (step + 1) // self.passes - self.length * step // self.passes
        confidence = dist.log_prob(ids).masked_fill(~hidden, -torch.inf)
        return torch.zeros_like(hidden).scatter_(1, confidence.topk(keep).indices, True)


class CausalPolicy(TokenPolicy):
    """Left to right, so one teacher-forced pass scores every decision."""

    capabilities = Capabilities("categorical")

    def commit(self, step: int, dist: Categorical, ids: Tensor, hidden: Tensor) -> Tensor:
        return (torch.arange(self.length, device=ids.device) == step).expand_as(hidden)

    def path(self, rollout: Rollout) -> Iterator[Point]:
        nothing = torch.zeros_like(rollout.mask)
        everything = torch.ones_like(rollout.mask)
        yield self._point(rollout, hide=nothing, score=everything)
