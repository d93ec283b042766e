"""Gives token models what they share: a decision is a categorical draw.

The recorded path, guidance of the score, the pass that every process makes, and distributions over
large vocabularies, which are computed on request.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import distributed
from mmrl.core.distributions import Categorical
from mmrl.core.host import on_host, selected, spread
from mmrl.core.types import Copies, Media, Point, Prompt, Rollout, TokenOrder
from mmrl.policies.base import (
    NO_CONTEXT,
    Policy,
    RolloutContext,
    at_guidance,
    rows_and_groups,
    rows_of,
)
from mmrl.policies.capabilities import Capabilities
from mmrl.policies.demonstrations import sourced
from mmrl.policies.scores import Scored, Scorer
from samplers.batching import at_width, chunks
from samplers.noise import Rng
from samplers.warp import Warp


class TokenPolicy(Policy):
    """Trains a policy whose decisions are tokens. One pass scores all tokens of a row, unless a
    family says otherwise."""

    capabilities = Capabilities("categorical")
    entropies: bool = False  # computed in every scoring pass once one was requested

    def path(self, rollout: Rollout) -> Iterator[Point]:
        yield Point(
            group=rollout.group,
            cond=rollout.cond,
            row_id=rollout.row_id,
            state=rollout.sample,
            target=rollout.sample,
            mask=rollout.mask,
            logprob=rollout.logprob,
            advantage=rollout.advantages(),
            num_decisions=rollout.mask.sum(1),
            provenance=rollout.provenance,
        )

    @contextmanager
    def evaluating(self, guidance: float | None = None) -> Iterator[None]:
        """Sample as in training, at another guidance scale if given: the likeliest image is not a
        good one."""
        with at_guidance(self, guidance):
            yield

    @torch.no_grad()
    def scored(self, rollout: Rollout) -> Rollout:
        """Record the log-probs that the policy gives to tokens which it did not sample."""
        logprob = torch.zeros_like(rollout.logprob)
        for part in chunks(len(rollout), min(self.fixed_batch_rows or len(rollout), len(rollout))):
            for point in self.path(rollout[part]):
                scores = self.dist(point).log_prob(point.target).to(logprob)
                logprob[part] += torch.where(point.mask, scores, 0.0)
        return rollout.replace(logprob=logprob)

    def scored_guidance(self, point: Point) -> float:
        """Choose the guidance scale of a point's log-probs; 1 leaves guidance out."""
        if point.guidance is not None:
            return point.guidance
        if self.guidance_scale is None or self.logprob_guidance == "conditional":
            return 1.0
        return self.guidance_scale

    def any_process(self, working: bool) -> bool:
        """Tell whether any process still works, where all must make equally many passes."""
        return bool(distributed.all_max(torch.tensor(float(working), device=self.device)))


class LogitsPolicy(TokenPolicy):
    """Trains a policy of ``length`` tokens a sample, whose family encodes prompts and computes
    logits; ``mask_id`` stands for a token not yet drawn."""

    not_options: tuple[str, ...] = ("net", "length", "mask_id")

    def __init__(self, net: nn.Module, length: int, mask_id: int, **options: Any):
        super().__init__(net, **options)
        self.length = length
        self.mask_id = mask_id

    @abstractmethod
    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Encode prompts to a nest of tensors [P, *]; with guidance those of the empty prompt, [1,
        *], under ``uncond``."""

    @abstractmethod
    def logits(self, ids: Tensor, cond: dict[str, Any]) -> Tensor:
        """Compute the logits [B, L, V] for ids [B, L] with hidden tokens, under conditions [B,
        *]."""

    def decode(self, rollout: Rollout) -> Media:
        return rollout.sample

    @torch.no_grad()
    def demonstrate(
        self, prompts: list[Prompt], answers: Sequence[Any], rng: Rng, *, score: bool = True
    ) -> Rollout:
        row, group = rows_and_groups(prompts, 1, rng, self.device)
        ids, present = self.answer_ids(answers)
        rollout = Rollout(
            group=group,
            cond=self.encode(prompts),
            row_id=row,
            sample=ids,
            logprob=torch.zeros(ids.shape, dtype=self.dtype, device=ids.device),
            mask=self.read(ids) & present[:, None],
            trajectory=TokenOrder(commit_step=self.order_of(row, rng, score)),
            prompts=tuple(prompts),
        )
        rollout = sourced(rollout, present)
        return self.scored(rollout) if score else rollout

    def answer_ids(self, answers: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return the token ids [B, L] of answers, and which rows have one, [B] bool."""
        blank = torch.full((self.length,), self.mask_id, device=self.device)
        rows = [blank if answer is None else torch.as_tensor(answer) for answer in answers]
        present = torch.tensor([answer is not None for answer in answers], device=self.device)
        return torch.stack([row.to(blank) for row in rows]), present

    def read(self, ids: Tensor) -> Tensor:
        """Mark the tokens of samples ids [B, L] that are read, and so are decisions."""
        return torch.ones_like(ids, dtype=torch.bool)

    def order_of(self, row: Tensor, rng: Rng, score: bool) -> Tensor:
        """Choose an order [B, L] in which the sampler could have written the tokens of rows named
        ``row`` [B]; ``score``: it will be scored in that order."""
        return torch.arange(self.length, device=row.device).expand(len(row), -1)

    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        row, group = rows_and_groups(prompts, copies, rng, self.device)
        cond = self.encode(prompts)
        hidden = torch.full((len(row), self.length), self.mask_id, device=self.device)
        size = self.chunk(len(row), lambda n: self._trial(hidden[:n], cond, group[:n]))
        parts = [self._sample(group[p], row[p], cond, rng) for p in chunks(len(row), size)]
        return Rollout.cat(parts).replace(prompts=tuple(prompts))

    @abstractmethod
    def _sample(self, group: Tensor, row: Tensor, cond: dict[str, Any], rng: Rng) -> Rollout:
        """Sample the rows named ``row`` [B], all in passes of this many rows."""

    @abstractmethod
    def _trial(self, ids: Tensor, cond: dict[str, Any], group: Tensor) -> None:
        """Make one pass of the largest kind, to measure what it allocates."""


class CausalPolicy(LogitsPolicy):
    """Draws tokens from left to right by a network of your own."""

    capabilities = replace(LogitsPolicy.capabilities, demonstrations=True)

    def dist(self, point: Point) -> Categorical:
        return Categorical(self._forward(point.state, rows_of(point.cond, point.group)))

    def _sample(self, group: Tensor, row: Tensor, cond: dict[str, Any], rng: Rng) -> Rollout:
        ids = torch.full((len(row), self.length), self.mask_id, device=row.device)
        order = torch.arange(self.length, device=row.device).expand_as(ids)
        logprob = torch.zeros(ids.shape, dtype=self.dtype, device=row.device)
        for step in range(self.length):
            dist = Categorical(self._forward(ids, rows_of(cond, group)))
            draw = dist.sample(rng.uniform(row, (self.length,), step))
            ids = torch.where(order == step, draw, ids)
            logprob = torch.where(order == step, dist.log_prob(draw), logprob)
        return Rollout(
            group=group,
            cond=cond,
            row_id=row,
            sample=ids,
            logprob=logprob,
            trajectory=TokenOrder(commit_step=order),
            mask=torch.ones_like(ids, dtype=torch.bool),
        )

    def _forward(self, ids: Tensor, cond: dict[str, Any]) -> Tensor:
        logits: Tensor = at_width(self.logits, max(self.padded(), len(ids)), ids, cond)
        return logits

    def _trial(self, ids: Tensor, cond: dict[str, Any], group: Tensor) -> None:
        self._forward(ids, rows_of(cond, group))


class AnswerTokens:
    """Scores independent categorical draws at the L positions of B answers from their hidden states
    [N, H] alone.

    ``log_prob`` of the point's own tokens comes with the forward pass; everything else is computed
    on request, under the weights of that time. All results are [B, L] and 0 outside ``where``.
    """

    def __init__(self, policy: Scorer, point: Point, where: Tensor, hidden: Tensor, scored: Scored):
        self.policy = policy
        self.target = point.target
        self.where = where
        self.hidden = hidden
        self.scored = scored
        self.warp = policy.warp
        self.snapshot = policy.weights.current

    def log_prob(self, ids: Tensor) -> Tensor:
        """Compute the log-probs [B, L] of token ids [B, L] that share their prefixes with the
        tokens scored."""
        if ids is self.target or torch.equal(ids, self.target):
            return self._spread(self.scored.logprob)
        return self._spread(self._rescored(ids, False).logprob)

    def entropy(self) -> Tensor:
        """Compute the entropies [B, L] of the warped distribution."""
        if self.scored.entropy is None:
            self.policy.entropies = True  # from now on with the forward pass
            self.scored = self._rescored(self.target, True)
        assert self.scored.entropy is not None
        return self._spread(self.scored.entropy)

    def kl(self, other_tokens: AnswerTokens) -> Tensor:
        """Compute KL(self || other) [B, L], exact, over the whole vocabulary.

        At the temperature of sampling, but without top-k and top-p: truncated supports differ, and
        then it is infinite.
        """
        whole = Warp(temperature=self.warp.temperature or 1.0, suppressed=self.warp.suppressed)
        with torch.no_grad():
            reference = other_tokens._head("full", whole)
        return self._spread(self._head("kl", reference, whole))

    def _rescored(self, ids: Tensor, entropies: bool) -> Scored:
        scored: Scored = self._head("rescore", selected(ids, self.where), self.warp, entropies)
        return scored

    def _head(self, work: str, *arguments: object) -> Any:
        """Run the head alone, under the weights that made the hidden states."""
        with self.policy.weights.using(self.snapshot):
            return self.policy.active()(work, self.hidden, *arguments)

    def _spread(self, values: Tensor) -> Tensor:
        return spread(values, self.where)


def somewhere(mask: Tensor) -> Tensor:
    """Return ``mask`` [B, L], or one decision where it holds none: every process makes its passes,
    also those that train nothing."""
    if on_host(mask).any():
        return mask
    mask = mask.clone()
    mask[0, 0] = True
    return mask
