"""Cuts long answers off after some tokens and continues them in later iterations, with the weights
of those: partial rollouts (Kimi team 2025, k1.5; Zhou et al. 2025, APRIL).

A group waits until all its answers are complete. It then replaces a group of that iteration that is
cut off, so every iteration trains on complete answers. Tokens keep the log-probs of their sampling
weights (``sampler_logprob``); ``logprob`` is that of the iteration that trains on them, and the
objective's ``importance_sampling`` corrects between the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError, called
from mmrl.core.numbers import Count
from mmrl.core.registry import STAGES
from mmrl.core.types import Completion, Copies, Prompt, Rewards, Rollout
from mmrl.data.base import Curriculum
from mmrl.policies.base import Drafts, RolloutContext
from mmrl.policies.contracts import LimitsLength
from mmrl.rollout.collect import media_of
from mmrl.rollout.stages import Drawn, Sample, Setup
from mmrl.zoo.stages.answer_memory import OldAnswers, Remembered, gathered, token_rows
from mmrl.zoo.stages.dynamic_sampling import exchanged
from samplers.noise import Rng


@STAGES.register("partial_rollout")
@dataclass
class PartialRollouts(OldAnswers):
    """Cuts long answers off and continues them in the next iterations (Kimi k1.5, APRIL).

    So no iteration waits for the longest answer. ``tokens``: of an answer in one iteration; the
    rest is sampled with the weights of the next (Kimi team 2025; Zhou et al. 2025).

    Groups wait until all their answers are complete, and then replace groups that are cut off; a
    group cut off without a replacement is not trained on. ``age``: the most iterations that a
    group may take; older ones are dropped.
    """

    tokens: Count
    age: Count = 8
    saved_as = "partial_rollout"
    effects = Effects(
        looks_at_samples=True,
        changes_sampling=True,
        exchanges_rows=True,
        writes_in_parts=True,
        in_dry_run=False,
    )

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        self.group_size = setup.options.group_size
        self.seed = setup.options.seed
        self.continued: list[Remembered | None] = []  # in the current call
        self.limits = LimitsLength.of(setup.policy)
        if why := self.limits.cannot_go_on():
            raise UserError(f"train.stages.partial_rollout: {why}")
        if isinstance(self.prompts, Curriculum):
            raise UserError(
                "train.stages.partial_rollout: the data chooses prompts by how the last ones went, "
                "which is not known of answers that wait; take data without a curriculum"
            )
        self.longest = self.limits.most_new_tokens()
        if self.tokens >= self.longest:
            raise UserError(
                f"train.stages.partial_rollout.tokens: {self.tokens} is no less than the policy's "
                f"max_new_tokens, {self.longest}, so that nothing would be cut off"
            )

    @classmethod
    def unfit(cls, options: Any, policy: Any) -> Iterator[tuple[str, str]]:
        if not (LimitsLength.kept_by(policy) and policy.capabilities.drafts):
            yield (
                "",
                f"{called(policy)} cannot go on with an answer that was cut off; it is for vlm",
            )

    def begin(self, iteration: int) -> None:
        super().begin(iteration)
        self.limits.set_max_new_tokens(self.tokens)

    def context(self, context: RolloutContext) -> RolloutContext:
        return replace(context, drafts=self._drafts) if self.continued else context

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        try:
            return self._groups(drawn, iteration, sample)
        finally:
            self.limits.set_max_new_tokens(self.longest)  # evaluation writes complete answers

    def _groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        drawn = with_sampler(drawn)
        cut = self._cut(drawn, 1)
        waiting = self._remembered(drawn, cut, iteration)
        places = list(cut)
        before = len(self.memory.entries)
        self.memory.forget(iteration - self.age)
        due = self.memory.entries
        dropped = before - len(due)
        for parts in range(1, math.ceil(self.longest / self.tokens)):
            resumed, entries = self._continue(
                [w for w in due if w.times == parts], parts, iteration, sample
            )
            if resumed is None:
                continue
            still = self._cut(resumed, parts + 1)
            real = range(len(entries))
            whole = [group for group in real if group not in still]
            taken, left = whole[: len(places)], whole[len(places) :]
            drawn = taken_over(drawn, resumed, taken, places[: len(taken)])
            places = places[len(taken) :]
            waiting += [
                replace(
                    entries[group], times=parts + (group in still), rollout=rows_of(resumed, group)
                )
                for group in real
                if group in still or group in left
            ]
        # of all processes, the oldest first
        self.memory.entries = sorted(gathered(waiting), key=lambda entry: entry.iteration)
        counts = torch.tensor([len(places), len(cut)], device=drawn.rollout.group.device)
        unfinished, late = distributed.all_sum(counts).tolist()
        return without_reward(drawn, places), {
            "partial/waiting": len(self.memory.entries),
            "partial/cut": late,
            "partial/untrained": unfinished,
            "partial/dropped": dropped,
        }

    def _remembered(self, drawn: Drawn, cut: list[int], iteration: int) -> list[Remembered]:
        origins = self.indices(drawn.rollout)
        return [
            Remembered(origins[group], iteration, rows_of(drawn, group), times=1)
            for group in cut
            if origins[group] >= 0
        ]

    def _cut(self, drawn: Drawn, parts: int) -> list[int]:
        """List the groups with an answer that is incomplete but below the length limit."""
        if parts * self.tokens >= self.longest:
            return []
        assert isinstance(drawn.media, list)
        pairs = zip(drawn.media, drawn.rollout.group.tolist(), strict=True)
        cut = (g for text, g in pairs if isinstance(text, Completion) and not text.finished)
        return sorted(set(cut))

    def _continue(
        self, entries: list[Remembered], parts: int, iteration: int, sample: Sample
    ) -> tuple[Drawn | None, list[Remembered]]:
        """Continue this process's share of groups that were cut off equally often. Every process
        samples equally many, with padding that is dropped; None if no process has any."""
        rank, size = distributed.world()
        local = entries[rank::size]
        most = -(-len(entries) // size)
        if not most:
            return None, []
        self.limits.set_max_new_tokens(min((parts + 1) * self.tokens, self.longest))
        filler = local or entries[:1]
        self.continued = [*local, *[None] * (most - len(local))]
        prompts = [self.prompts[(w or filler[0]).index] for w in self.continued]
        rng = replace(Rng.of(self.seed, iteration, "partial", parts), offset=rank * most)
        try:
            resumed = with_sampler(sample(prompts, rng, self.group_size))
        finally:
            self.continued = []
        return as_drawn(resumed, local), local

    def _drafts(self, prompts: Sequence[Prompt], copies: Copies) -> Drafts:
        """Return the prefixes of the groups under way, all of whose tokens are kept."""
        sizes = [self.group_size] * len(self.continued)
        return self.memory.drafts(self.continued, sizes, torch.inf, self.policy.device)


def with_sampler(drawn: Drawn) -> Drawn:
    """Record the log-probs that the tokens were drawn with, where they are not recorded yet."""
    known = drawn.rollout.provenance
    if known.sampler_logprob is not None:
        return drawn
    provenance = known.replace(sampler_logprob=drawn.rollout.logprob.clone())
    return replace(drawn, rollout=drawn.rollout.replace(provenance=provenance))


def as_drawn(resumed: Drawn, local: Sequence[Remembered]) -> Drawn:
    """Restore the sampling log-probs of the tokens of earlier iterations."""
    sampler = resumed.rollout.provenance.sampler_logprob
    assert sampler is not None
    sampler = sampler.clone()
    for group, entry in enumerate(local):
        rows = (resumed.rollout.group == group).nonzero()[:, 0]
        mask = entry.rollout.mask.to(sampler.device)
        width = mask.shape[1]
        drawn_with = entry.rollout.logprob.to(sampler)
        sampler[rows, :width] = torch.where(mask, drawn_with, sampler[rows, :width])
    provenance = resumed.rollout.provenance.replace(sampler_logprob=sampler)
    return replace(resumed, rollout=resumed.rollout.replace(provenance=provenance))


def rows_of(drawn: Drawn, group: int) -> Rollout:
    """Return the rows of a group to remember, as wide as its longest answer."""
    rows = token_rows(drawn.rollout)[drawn.rollout.group == group]
    longest = int(rows.mask.sum(1).max())
    return rows.map(lambda x: x[:, :longest] if x.ndim > 1 else x).to("cpu")


def taken_over(drawn: Drawn, resumed: Drawn, chosen: Sequence[int], places: Sequence[int]) -> Drawn:
    """Replace groups that were cut off by complete ones. The former leave no statistics: they will
    be sampled to their end."""
    if not chosen:
        return drawn
    order = torch.cat([(resumed.rollout.group == group).nonzero()[:, 0] for group in chosen])
    size = len(order) // len(chosen)
    group = torch.arange(len(chosen), device=order.device).repeat_interleave(size)
    cond = _conditions(resumed.rollout.cond, chosen)
    rollout = resumed.rollout[order].replace(
        group=group, cond=cond, prompts=tuple(resumed.rollout.prompts[g] for g in chosen)
    )
    rewards = {name: value[order] for name, value in resumed.rewards.items()}
    picked = Drawn(
        rollout, media_of(resumed.media, order), Rewards(rewards, resumed.rewards.weights)
    )
    return replace(exchanged(drawn, picked, list(places)), gave_way=drawn.gave_way)


def without_reward(drawn: Drawn, groups: Sequence[int]) -> Drawn:
    """Exclude groups from training: their answers are scored once complete."""
    if not groups:
        return drawn
    open_rows = torch.isin(
        drawn.rollout.group, torch.tensor(groups, device=drawn.rollout.group.device)
    )
    rewards = {
        name: torch.where(open_rows.view(-1, *[1] * (value.ndim - 1)), torch.nan, value)
        for name, value in drawn.rewards.items()
    }
    return replace(drawn, rewards=Rewards(rewards, drawn.rewards.weights))


def _conditions(cond: Any, chosen: Sequence[int]) -> Any:
    """Select the conditions of these prompts."""
    if isinstance(cond, list):
        return [cond[group] for group in chosen]
    if isinstance(cond, dict):
        return {key: _conditions(value, chosen) for key, value in cond.items()}
    return cond[torch.tensor(chosen, device=cond.device)] if isinstance(cond, Tensor) else cond
