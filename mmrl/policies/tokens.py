"""Shared by all token models: a decision is a categorical draw.

The recorded path, guidance of scores, dummy passes of idle processes, and distributions over large
vocabularies, computed on request.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import distributed
from mmrl.core.distributions import Categorical, check_shape
from mmrl.core.divergences import REVERSE, Divergence
from mmrl.core.errors import UserError
from mmrl.core.host import indices, on_host, selected, sent, spread
from mmrl.core.sharding import sharded
from mmrl.core.types import Copies, Media, Point, Prompt, Rollout, TokenOrder
from mmrl.policies.base import (
    NO_CONTEXT,
    RolloutContext,
    rows_and_groups,
    rows_of,
)
from mmrl.policies.capabilities import Capabilities
from mmrl.policies.contracts import Demonstrates, Replays, WarpsLogits
from mmrl.policies.demonstrations import sourced
from mmrl.policies.draft_verification import FREE, drafted, verified
from mmrl.policies.scores import Scored, Scorer, group_divergence, recorded
from samplers.batching import at_width, chunks
from samplers.noise import Rng
from samplers.warp import EntropyScale, Warp


class TokenPolicy(Replays, WarpsLogits):
    """Trains a policy whose decisions are tokens. One pass scores all tokens of a row, unless a
    family overrides this."""

    capabilities = Capabilities("categorical")
    entropies: bool = False  # computed in every scoring pass once one was requested
    warp: Warp  # of sampling and scoring

    def __init__(
        self,
        net: nn.Module,
        record_self_certainty: bool = False,
        record_divergence: bool = False,
        **options: Any,
    ):
        """record_self_certainty: record the model's confidence in every token, for the reward
        self_certainty and the advantage recorded. record_divergence: record the divergence of a
        group's distributions at each position, by one more pass over the samples, for the advantage
        focal."""
        super().__init__(net, **options)
        self.record_divergence = record_divergence
        options_by_name = {
            "entropy": self.record_entropy,
            "self_certainty": record_self_certainty,
        }
        # recorded quantities of the distribution of every decision
        self.quantities = tuple(name for name, chosen in options_by_name.items() if chosen)

    def with_recorded(self, rollout: Rollout, values: Tensor) -> Rollout:
        """Add the recorded quantities of every decision, ``values`` [B, K, R] in the order of
        ``quantities``."""
        by_name = dict(zip(self.quantities, values.to(rollout.logprob).unbind(-1), strict=True))
        order = rollout.tokens.replace(self_certainty=by_name.get("self_certainty"))
        return rollout.replace(entropy=by_name.get("entropy"), trajectory=order)

    def with_unknown(self, rollout: Rollout) -> Rollout:
        """Fill with NaN what is recorded while decisions are drawn: these were not drawn."""
        shape = (*rollout.logprob.shape, len(self.quantities))
        rollout = self.with_recorded(rollout, rollout.logprob.new_full(shape, torch.nan))
        if self.record_divergence:
            rollout = rollout.replace(divergence=torch.zeros_like(rollout.logprob))
        return rollout

    def _cannot(self, why: str) -> UserError:
        return UserError(f"{type(self).__name__} {why}")

    @torch.no_grad()
    def with_divergence(self, rollout: Rollout, size: int) -> Rollout:
        """Record the divergence of each group's distributions at every position, in passes of at
        most ``size`` rows; rows of a group get the same value."""
        if not self.record_divergence:
            return rollout
        if rollout.edge_id is not None:
            raise self._cannot(
                "shares decisions in a tree, which are one distribution: leave out its option "
                "record_divergence or the tree"
            )
        spread = torch.zeros_like(rollout.logprob)
        group = on_host(rollout.group)
        if sharded(self.net):
            raise self._cannot(
                "compares distributions by as many passes as groups have rows, and processes that "
                "share weights must make the same: launch copies, or leave out its option "
                "record_divergence"
            )
        for g in group.unique().tolist():
            rows = sent((group == g).nonzero()[:, 0], spread.device)
            points = [next(iter(self.path(rollout[rows[p]]))) for p in chunks(len(rows), size)]
            spread[rows] = self._divergence(points).to(spread)
        return rollout.replace(divergence=spread)

    def _divergence(self, points: list[Point]) -> Tensor:
        """Compute the divergence [L] of the rows of one group, at ``points`` of one pass each."""
        where = torch.cat([point.mask for point in points])
        dists = [self.dist(point) for point in points]
        hidden = torch.cat([dist.states() for dist in dists if isinstance(dist, AnswerTokens)])

        def logits(part: slice) -> Tensor:
            values: Tensor = self.net("logits", hidden[:, part])
            return values

        vocab = logits(slice(0, 1)).shape[-1]
        return group_divergence(logits, where, vocab, self.warp)

    def path(self, rollout: Rollout) -> Iterator[Point]:
        yield Point(
            group=rollout.group,
            cond=rollout.cond,
            row_id=rollout.row_id,
            state=rollout.sample,
            target=rollout.sample,
            mask=rollout.mask,
            logprob=rollout.logprob,
            entropy=rollout.entropy,
            advantage=rollout.advantages(),
            advantage_parts=rollout.advantage_parts,
            num_decisions=rollout.mask.sum(1),
            provenance=rollout.provenance,
        )

    @contextmanager
    def untempered(self) -> Iterator[None]:
        before = self.warp
        if before is not None:  # a family may sample without one
            self.warp = Warp(suppressed=before.suppressed)
        try:
            with super().untempered():
                yield
        finally:
            self.warp = before

    @torch.no_grad()
    def scored(self, rollout: Rollout) -> Rollout:
        """Record the policy's log-probs of tokens that it did not sample, and the entropies of
        their distributions, if recorded."""
        logprob = torch.zeros_like(rollout.logprob)
        entropy = None if rollout.entropy is None else torch.zeros_like(rollout.entropy)
        size = min(self.pass_sizes.rows or len(rollout), len(rollout))
        for part, counts in self.pass_sizes.chunks(len(rollout), size):
            for point in self.path(rollout[part]):
                dist = self.dist(point)
                where = point.mask & counts
                scores = dist.log_prob(point.target).to(logprob)
                logprob[part] += torch.where(where, scores, 0.0)
                if entropy is not None:
                    entropy[part] += torch.where(where, dist.entropy().to(entropy), 0.0)
        return rollout.replace(logprob=logprob, entropy=entropy)

    def any_process(self, working: bool) -> bool:
        """Tell whether any process still has work, where all must make the same number of
        passes."""
        return bool(distributed.all_max(torch.tensor(float(working), device=self.device)))


class LogitsPolicy(TokenPolicy, Demonstrates):
    """Trains a policy of ``length`` tokens a sample, whose family encodes prompts and computes
    logits; ``mask_id`` is the mask token."""

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
        cond = self.encode(prompts)
        block = self.block_of(cond, group)
        rollout = Rollout(
            group=group,
            cond=cond,
            row_id=row,
            sample=ids,
            logprob=torch.zeros(ids.shape, dtype=self.dtype, device=ids.device),
            mask=self.read(ids, block) & present[:, None],
            trajectory=TokenOrder(commit_step=self.order_of(row, block, rng, score)),
            prompts=tuple(prompts),
        )
        rollout = self.with_unknown(sourced(rollout, present))
        return self.scored(rollout) if score else rollout

    def answer_ids(self, answers: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return the token ids [B, L] of answers, and which rows have one, [B] bool."""
        blank = torch.full((self.length,), self.mask_id, device=self.device)
        rows = [blank if answer is None else torch.as_tensor(answer) for answer in answers]
        present = torch.tensor([answer is not None for answer in answers], device=self.device)
        return torch.stack([row.to(blank) for row in rows]), present

    def block_of(self, cond: dict[str, Any], rows: Tensor) -> Tensor:
        """Return the block index of each position of a sample, [1 or B, L]; ``rows`` [B]: of the
        conditions."""
        return torch.zeros(1, self.length, dtype=torch.long, device=rows.device)

    def read(self, ids: Tensor, block: Tensor) -> Tensor:
        """Mark the tokens of samples ids [B, L] that are read, and so are decisions."""
        return torch.ones_like(ids, dtype=torch.bool)

    def order_of(self, row: Tensor, block: Tensor, rng: Rng, score: bool) -> Tensor:
        """Choose an order [B, L] in which the sampler could have drawn the tokens of rows named
        ``row`` [B], block after block; ``score``: they will be scored in that order."""
        return torch.arange(self.length, device=row.device).expand(len(row), -1)

    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        row, group = rows_and_groups(prompts, copies, rng, self.device)
        cond = self.encode(prompts)
        hidden = torch.full((len(row), self.length), self.mask_id, device=self.device)
        size = self.pass_sizes.to_sample(
            len(row), lambda n: self._trial(hidden[:n], cond, group[:n])
        )
        parts = [
            (self._sample(group[p], row[p], cond, rng), counts)
            for p, counts in self.pass_sizes.chunks(len(row), size)
        ]
        rollout = Rollout.cat([part for part, counts in parts if counts])
        return self.with_divergence(rollout.replace(prompts=tuple(prompts)), size)

    @abstractmethod
    def _sample(self, group: Tensor, row: Tensor, cond: dict[str, Any], rng: Rng) -> Rollout:
        """Sample the rows named ``row`` [B], all in passes of this many rows."""

    @abstractmethod
    def _trial(self, ids: Tensor, cond: dict[str, Any], group: Tensor) -> None:
        """Make one pass of the largest kind, to measure what it allocates."""


class CausalPolicy(LogitsPolicy):
    """Draws tokens from left to right by a custom network."""

    capabilities = replace(LogitsPolicy.capabilities, drafts=True)

    def _divergence(self, points: list[Point]) -> Tensor:
        logits = torch.cat([self.dist(point).logits for point in points])
        where = torch.cat([point.mask for point in points])
        return group_divergence(lambda part: logits[:, part], where, logits.shape[-1])

    def dist(self, point: Point) -> Categorical:
        return Categorical(self._forward(point.state, rows_of(point.cond, point.group)))

    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        drafts = context.drafts(prompts, copies) if context.drafts else None
        if drafts is None:
            return super().rollout(prompts, copies, rng, context)
        row, group = rows_and_groups(prompts, copies, rng, self.device)
        cond = self.encode(prompts)
        size = self.pass_sizes.rows or len(row)
        forced = verified(self, drafted(drafts, group, row, cond), drafts, rng, size)
        parts = [
            self._sample(group[p], row[p], cond, rng, forced.ids[p]) for p in chunks(len(row), size)
        ]
        rollout = Rollout.cat(parts).replace(prompts=tuple(prompts))
        return self.with_divergence(rollout, size)

    def _sample(
        self,
        group: Tensor,
        row: Tensor,
        cond: dict[str, Any],
        rng: Rng,
        forced: Tensor | None = None,
    ) -> Rollout:
        ids = torch.full((len(row), self.length), self.mask_id, device=row.device)
        order = torch.arange(self.length, device=row.device).expand_as(ids)
        logprob = torch.zeros(ids.shape, dtype=self.dtype, device=row.device)
        values: list[Tensor] = []
        for step in range(self.length):
            dist = Categorical(self._forward(ids, rows_of(cond, group)))
            draw = dist.sample(rng.uniform(row, (self.length,), step))
            draw = draw if forced is None else torch.where(forced == FREE, draw, forced)
            ids = torch.where(order == step, draw, ids)
            logprob = torch.where(order == step, dist.log_prob(draw), logprob)
            logits = dist.logits[:, step]
            values.append(recorded(self.quantities, logits, logits))
        rollout = Rollout(
            group=group,
            cond=cond,
            row_id=row,
            sample=ids,
            logprob=logprob,
            trajectory=TokenOrder(commit_step=order),
            mask=torch.ones_like(ids, dtype=torch.bool),
        )
        return self.with_recorded(rollout, torch.stack(values, 1))

    def _forward(self, ids: Tensor, cond: dict[str, Any]) -> Tensor:
        logits: Tensor = at_width(self.logits, max(self.pass_sizes.width(), len(ids)), ids, cond)
        return logits

    def _trial(self, ids: Tensor, cond: dict[str, Any], group: Tensor) -> None:
        self._forward(ids, rows_of(cond, group))


class AnswerTokens:
    """Scores independent categorical draws at the L positions of B answers from their hidden states
    [N, H] alone.

    ``log_prob`` of the point's own tokens comes with the forward pass; everything else is computed
    on request, under the weights of that pass. All results are [B, L] and 0 outside ``where``.
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
            self.policy.entropies = True  # computed with the forward pass from now on
            self.scored = self._rescored(self.target, True)
        assert self.scored.entropy is not None
        return self._spread(self.scored.entropy)

    def states(self) -> Tensor:
        """Return the hidden states [B, L, H], 0 where no decision is scored."""
        every = self.hidden.new_zeros(self.where.numel(), self.hidden.shape[-1])
        every = every.index_copy(0, indices(self.where), self.hidden)
        states: Tensor = every.view(*self.where.shape, -1)
        return states

    def kl(self, other_tokens: AnswerTokens | ToldTokens, by: Divergence = REVERSE) -> Tensor:
        """Compute KL(self || other) [B, L], or another divergence, exact, over the whole
        vocabulary.

        At the temperature of sampling, but without top-k and top-p: truncated supports differ, and
        then it is infinite.
        """
        whole = self.warp.untruncated
        place = self._places()
        with torch.no_grad():
            reference = other_tokens.all_logprobs(whole)
        return self._spread(self._head("kl", reference, whole, by, *place))

    def all_logprobs(self, warp: Warp) -> Tensor:
        """Compute the log-probs of all tokens [N, V] at a warp."""
        every: Tensor = self._head("full", warp, *(self._places() if warp.schedule else ()))
        return every

    def asks(self) -> list[Any]:
        return [asdict(self.warp.untruncated)]

    def shown(self, asks: list[Any]) -> dict[str, Tensor]:
        (warp,) = asks
        return {"logprobs": self.all_logprobs(warp_of(warp))}

    def reference(self, shown: dict[str, Tensor]) -> ToldTokens:
        logprobs = shown["logprobs"]
        check_shape(logprobs, (len(self.hidden), *logprobs.shape[1:][:1]))
        return ToldTokens(logprobs)

    def _rescored(self, ids: Tensor, entropies: bool) -> Scored:
        chosen = selected(ids, self.where)
        scored: Scored = self._head("rescore", chosen, self.warp, entropies, *self._places())
        return scored

    def _places(self) -> tuple[Tensor, ...]:
        """Return the positions [N] of the decisions in their answers where the warp depends on
        them."""
        return (places(self.where),) if self.warp.schedule else ()

    def _head(self, work: str, *arguments: object) -> Any:
        """Run the head alone, under the weights that made the hidden states."""
        with self.policy.weights.using(self.snapshot):
            return self.policy.active()(work, self.hidden, *arguments)

    def _spread(self, values: Tensor) -> Tensor:
        return spread(values, self.where)


@dataclass(frozen=True)
class ToldTokens:
    """Holds a remote model's log-probs of all tokens at N decisions."""

    logprobs: Tensor  # [N, V]

    def all_logprobs(self, warp: Warp) -> Tensor:
        """Return them: they were computed at the requested warp."""
        return self.logprobs


def warp_of(plain: Any) -> Warp:
    """Parse a warp from plain data. Raises ValueError or TypeError where it is invalid."""
    scale = plain.pop("scale")
    plain |= {name: tuple(plain[name]) for name in ("suppressed", "schedule")}
    return Warp(**plain, scale=None if scale is None else EntropyScale(**scale))


def places(where: Tensor) -> Tensor:
    """Return the column of every decision in ``where`` [B, L], [N] long."""
    columns = torch.arange(where.shape[1], device=where.device)
    return selected(columns.expand_as(where), where)


def somewhere(mask: Tensor) -> Tensor:
    """Return ``mask`` [B, L], with one decision if it holds none: every process makes its passes,
    even if it trains nothing."""
    if on_host(mask).any():
        return mask
    mask = mask.clone()
    mask[0, 0] = True
    return mask
