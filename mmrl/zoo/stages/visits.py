"""Measures how far the policy has moved since it last answered a prompt, by scoring those answers
again: the drift by which single-stream SPO forgets (Xu and Ding 2025)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mmrl.core import distributed
from mmrl.core.numbers import Count
from mmrl.core.registry import STAGES
from mmrl.core.types import Rollout
from mmrl.data.base import Curriculum
from mmrl.rollout.collect import rescored
from mmrl.rollout.stages import Drawn, Sample, Setup
from mmrl.zoo.stages.answer_memory import OldAnswers, fits, gathered, longest_ago, remembered


@STAGES.register("policy_drift")
@dataclass
class Visits(OldAnswers):
    """Measures how far the policy has moved since it last answered a prompt (single-stream SPO).

    The last answers are remembered and scored again at the next visit.

    ``answers``: how many of a prompt's last visit are remembered; each costs a pass at the next.
    ``size``: prompts whose answers are remembered; those answered longest ago are dropped first.

    The advantage (by the record ``drift`` [B], nats) and the data source get D: |log p_then - log
    p_now|, the mean over an answer's decisions, then over the remembered answers; 0 at the first
    visit. Every process remembers the answers of all.
    """

    answers: Count = 1
    size: Count = 65536
    saved_as = "policy_drift"

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        self.behavior = setup.behavior

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        rollout = drawn.rollout
        self.refuse_trees(rollout, "remembered")
        origins = self.indices(rollout)
        moved = self._moved(rollout, origins)
        self._tell(rollout, moved)
        self._remember(drawn, origins, iteration)
        drifts = torch.zeros(len(origins), dtype=torch.float64)
        drifts[list(moved)] = torch.tensor(list(moved.values()), dtype=torch.float64)
        of_rows = drifts.to(rollout.logprob)[rollout.group]
        sums = distributed.all_sum(
            torch.tensor([sum(moved.values()), len(moved)], device=rollout.group.device).double()
        ).tolist()
        rollout = rollout.recorded("drift", of_rows, of_prompts=True)
        return replace(drawn, rollout=rollout), {
            "policy_drift/mean": sums[0] / max(sums[1], 1),
            "policy_drift/prompts": sums[1],
        }

    def _moved(self, rollout: Rollout, origins: Sequence[int]) -> dict[int, float]:
        """Compute D of the groups whose prompts were answered before; a collective call."""
        present = set(rollout.group.tolist())
        last = {entry.index: entry for entry in self.memory.entries}
        known = {
            group: last[index]
            for group, index in enumerate(origins)
            if group in present and index in last and fits(last[index], rollout)
        }
        old = self.recalled([*known.values()], rollout) if known else rollout
        chosen = torch.full_like(old.group, bool(known), dtype=torch.bool)
        with self.behavior():
            now = rescored(self.policy, old, chosen)
        if not known:
            return {}
        change = torch.where(old.mask, (now - old.logprob).abs(), 0.0).double()
        of_rows = change.sum(1) / old.mask.sum(1).clamp(min=1)
        sums = of_rows.new_zeros(len(known)).index_add(0, old.group, of_rows)
        means = sums / old.group.bincount(minlength=len(known))
        return dict(zip(known, means.tolist(), strict=True))

    def _tell(self, rollout: Rollout, moved: Mapping[int, float]) -> None:
        rows = [
            [rollout.prompts[group]["entry"], value]
            for group, value in moved.items()
            if "entry" in rollout.prompts[group]
        ]
        values = distributed.all_gather_json(rows, rollout.group.device)
        if isinstance(self.prompts, Curriculum):
            self.prompts.see("drift", {int(entry): value for entry, value in values})

    def _remember(self, drawn: Drawn, origins: Sequence[int], iteration: int) -> None:
        """Remember the first answers of this iteration to every prompt, of all processes."""
        rollout = drawn.rollout
        marks = (rollout.provenance.is_replayed, rollout.provenance.is_ground_truth)
        foreign = torch.zeros_like(rollout.group, dtype=torch.bool)
        for rows_marked in marks:
            foreign = foreign if rows_marked is None else foreign | rows_marked
        rows: dict[int, list[int]] = {}
        names = zip(rollout.row_id.tolist(), rollout.group.tolist(), foreign.tolist(), strict=True)
        for row, (_, group, skipped) in sorted(enumerate(names), key=lambda item: item[1][0]):
            of_prompt = rows.setdefault(origins[group], [])
            if not skipped and len(of_prompt) < self.answers:
                of_prompt.append(row)
        device = rollout.group.device
        local = [
            remembered(drawn, torch.tensor(of_prompt, device=device), index, iteration)
            for index, of_prompt in rows.items()
            if index >= 0 and of_prompt
        ]
        self.memory.add(gathered(local), 1, longest_ago(self.size))
