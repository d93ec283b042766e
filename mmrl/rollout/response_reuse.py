"""Puts right answers of earlier iterations in groups that have none: AR3PO's response reuse (Zhang
et al. 2025).

A reused answer keeps the log-probs recorded when it was sampled, as those of the replay buffer do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmrl.advantages.groups import measured
from mmrl.config.options import ResponseReuse
from mmrl.core import distributed
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt, Rewards
from mmrl.policies.base import Policy
from mmrl.rollout.collect import appended, media_of, together
from mmrl.rollout.replay_buffer import OldAnswers, Remembered, marked, packed, unpacked
from mmrl.rollout.stages import Drawn, Sample, Setup, outline


@STAGES.register("response_reuse")
@dataclass
class ReusedResponses(OldAnswers):
    """Replaces one answer of an all-wrong group by a right one of before
    (``train.response_reuse``).

    Every process remembers the last right answer to each of its prompts. It takes the place of the
    group's last answer (our reading). The reward it earned then still counts, so it must not depend
    on the iteration.
    """

    options: ResponseReuse
    policy: Policy
    prompts: Sequence[Prompt]
    entries: dict[int, Remembered] = field(default_factory=dict)
    saved_as = option = "response_reuse"

    @classmethod
    def build(cls, setup: Setup) -> ReusedResponses | None:
        options = setup.options.response_reuse
        return cls(options, setup.policy, setup.prompts) if options else None

    def begin(self, iteration: int) -> None:
        self.origins = {}

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        oldest = iteration - self.options.age
        self.entries = {i: e for i, e in self.entries.items() if e.iteration >= oldest}
        rollout = drawn.rollout
        double, groups = measured(drawn.rewards.per_row(), rollout)
        right = ((double.total() > self.options.threshold) & groups.present).cpu()
        wrong_groups = sorted(
            set(rollout.group.tolist()) - set(rollout.group.cpu()[right].tolist())
        )
        origins = {g: self.origins.get(id(p), -1) for g, p in enumerate(rollout.prompts)}
        reused = {g: self.entries[origins[g]] for g in wrong_groups if origins[g] in self.entries}
        ages = sum(iteration - entry.iteration for entry in reused.values())
        self._remember(drawn, right, origins, iteration)
        sums = distributed.all_sum(
            torch.tensor(
                [len(reused), ages, len(self.entries)], device=rollout.group.device
            ).double()
        ).tolist()
        return self._inserted(drawn, reused), {
            "response_reuse/groups": sums[0],
            "response_reuse/age": sums[1] / max(sums[0], 1),
            "response_reuse/remembered": sums[2],
        }

    def _remember(
        self, drawn: Drawn, right: Tensor, origins: Mapping[int, int], iteration: int
    ) -> None:
        """Remember the first right answer of this iteration to every prompt of the data."""
        rollout = drawn.rollout
        foreign = rollout.provenance.is_replayed
        fresh = right if foreign is None else right & ~foreign.cpu()
        first: dict[int, int] = {}
        group = rollout.group.tolist()
        for row in fresh.nonzero()[:, 0].tolist():
            if origins[group[row]] >= 0:
                first.setdefault(origins[group[row]], row)
        for index, row in first.items():
            rows = rollout[row : row + 1]
            stored = rows.replace(
                cond=None, prompts=(), group=torch.zeros_like(rows.group), all_samples=None
            ).to("cpu")
            rewards = {name: value[row : row + 1].cpu() for name, value in drawn.rewards.items()}
            self.entries.pop(index, None)  # the newest stand last
            self.entries[index] = Remembered(
                index, iteration, stored, Rewards(rewards, drawn.rewards.weights)
            )
        for index in list(self.entries)[: -self.options.size]:
            del self.entries[index]

    def _inserted(self, drawn: Drawn, reused: Mapping[int, Remembered]) -> Drawn:
        """Put the answers in the places of the last rows of their groups."""
        rollout = drawn.rollout
        if rollout.provenance.is_replayed is None:
            drawn = replace(drawn, rollout=marked(rollout, False))
            rollout = drawn.rollout
        if not reused:
            return drawn
        last = {g: row for row, g in enumerate(rollout.group.tolist()) if g in reused}
        device = rollout.group.device
        places = torch.tensor([last[g] for g in reused], device=device)
        whole = rollout
        for g, entry in reused.items():
            row = entry.rollout.to(device).replace(
                group=torch.tensor([g], device=device), row_id=rollout.row_id[last[g]][None]
            )
            # the moments of the prompt's own samples are those of the row it replaces
            row = row.replace(all_samples=rollout[last[g] : last[g] + 1].all_samples)
            whole = appended(whole, marked(row, True))
        count = len(rollout)
        order = torch.arange(count, device=device)
        order[places] = count + torch.arange(len(reused), device=device)
        old = [self.policy.decode(whole[count:])]
        media = together([drawn.media, *old])
        plain = drawn.rewards.per_row()
        lost = Rewards({name: value[places] for name, value in plain.items()}, plain.weights)
        rewards = {
            name: torch.cat([v, *(e.rewards[name].to(v) for e in reused.values())])[order]
            for name, v in drawn.rewards.items()
        }
        return replace(
            drawn,
            rollout=whole[order],
            media=media_of(media, order),
            rewards=Rewards(rewards, drawn.rewards.weights),
            unused=(*drawn.unused, (outline(rollout)[places], lost)),
        )

    def state_dict(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Return the answers if there is one process; several begin anew after a resume."""
        return packed(list(self.entries.values()))

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Any) -> None:
        entries = unpacked(tensors, plain, len(self.prompts))
        self.entries = {entry.index: entry for entry in entries}
