"""Replays answers of earlier iterations in place of groups without a gradient (AVATAR).

A group whose rewards are all equal has no advantage. It is replaced by a remembered one whose
rewards differ, with the log-probs recorded when it was sampled: the ratio of such a row is that of
the current weights to the sampling weights, clipped by the surrogate as usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Gt, Le
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.effects import Effects
from mmrl.core.numbers import Count
from mmrl.core.registry import STAGES
from mmrl.core.types import Rewards, Rollout
from mmrl.rollout.stages import Drawn, Sample, group_sizes
from mmrl.zoo.stages.answer_memory import (
    OldAnswers,
    Remembered,
    fits,
    gathered,
    marked,
    packed,
    remembered,
)
from mmrl.zoo.stages.dynamic_sampling import exchanged, flat_groups


@STAGES.register("replay_buffer")
@dataclass
class ReplayBuffer(OldAnswers):
    """Replays answers of earlier iterations in place of groups of equal rewards.

    ``share``: the largest share of an iteration's groups that is replaced; on every process one
    stays. ``size``: groups remembered per process; those whose rewards differ least are dropped
    first. ``age``: iterations after which an answer is forgotten. ``times``: how often a group is
    replayed."""

    share: Annotated[float, Gt(0), Le(1)] = 0.5
    size: Count = 256
    age: Count = 8
    times: Count = 1
    saved_as = "replay_buffer"
    effects = Effects(returns_rows=True)

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        """Replace groups of equal rewards by remembered ones, if there are any; then remember the
        others."""
        self.memory.forget(iteration - self.age)
        count = len(drawn.rollout.prompts)
        # one stays, so that every process has a group of this iteration to measure
        flat = flat_groups(drawn)[: min(int(self.share * count + 1e-9), count - 1)]
        places, best = self._match(flat, group_sizes(drawn.rollout), drawn.rollout)
        fresh = self._worth(drawn, iteration)
        mixed = replace(drawn, rollout=marked(drawn.rollout, False))
        if best:
            mixed = exchanged(mixed, self._recalled(best, mixed.rollout), places)
        for entry in best:
            entry.times += 1
        left = [entry for entry in self.memory.entries if entry.times < self.times]
        self.memory.entries = sorted(
            [*left, *fresh], key=lambda entry: (-entry.spread(), -entry.iteration)
        )[: self.size]
        ages = sum(iteration - entry.iteration for entry in best)
        device = drawn.rollout.group.device
        sums = distributed.all_sum(
            torch.tensor([len(best), ages, len(self.memory.entries)], device=device).double()
        ).tolist()
        return mixed, {
            "reuse/groups": sums[0],
            "reuse/age": sums[1] / max(sums[0], 1),
            "reuse/remembered": sums[2],
        }

    def _match(
        self, flat: Sequence[int], sizes: Sequence[int], rollout: Rollout
    ) -> tuple[list[int], list[Remembered]]:
        """Find the best remembered group of the same size for each of the groups ``flat``, if there
        is one."""
        left = sorted(
            self.memory.entries,
            key=lambda entry: (-entry.spread(), -entry.iteration, entry.index),
        )
        places = []
        entries = []
        for group in flat:
            fitting = (
                entry
                for entry in left
                if len(entry.rollout) == sizes[group] and fits(entry, rollout)
            )
            if entry := next(fitting, None):
                left = [rest for rest in left if rest is not entry]
                places.append(group)
                entries.append(entry)
        return places, entries

    def state_dict(self) -> tuple[dict[str, Tensor], Any]:
        """Return the entries of all processes; a collective call."""
        return packed(gathered(self.memory.entries))

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Any) -> None:
        """Restore the entries of this process; with another number of processes, its share."""
        super().load_state_dict(tensors, plain)
        rank, processes = distributed.world()
        every = self.memory.entries
        self.memory.entries = [entry for entry in every if entry.rank % processes == rank]

    def _worth(self, drawn: Drawn, iteration: int) -> list[Remembered]:
        """Make entries of the groups of ``drawn`` whose rewards differ."""
        rollout = drawn.rollout
        entries = []
        useless = set(flat_groups(drawn))
        for group, index in enumerate(self.indices(rollout)):
            rows = (rollout.group == group).nonzero()[:, 0]
            if index >= 0 and group not in useless and len(rows) > 1:
                entry = remembered(drawn, rows, index, iteration)
                if not entry.total().isnan().any():
                    entries.append(entry)
        return entries

    def _recalled(self, chosen: Sequence[Remembered], rollout: Rollout) -> Drawn:
        """Recall the chosen answers, with their rewards."""
        whole = self.recalled(chosen, rollout)
        names = chosen[0].rewards
        rewards = {
            name: torch.cat([entry.rewards[name] for entry in chosen]).to(rollout.logprob)
            for name in names
        }
        return Drawn(whole, self.policy.decode(whole), Rewards(rewards, names.weights))
