"""Starts answers with the accepted prefix of earlier ones: speculative rollouts (Liu et al. 2025,
SPEC-RL)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.effects import Effects
from mmrl.core.errors import called
from mmrl.core.numbers import Count, Positive
from mmrl.core.registry import STAGES
from mmrl.core.types import Copies, Prompt, per_prompt
from mmrl.policies.base import Drafts, RolloutContext
from mmrl.policies.draft_verification import all_logprobs
from mmrl.rollout.stages import Drawn, Sample, Setup
from mmrl.zoo.stages.answer_memory import (
    OldAnswers,
    Remembered,
    gathered,
    longest_ago,
    token_rows,
)


@STAGES.register("speculative")
@dataclass
class SpeculativeRollouts(OldAnswers):
    """Starts each answer with the accepted prefix of the previous answer to the prompt (SPEC-RL).

    ``lenience``: a token is kept with probability min(1, lenience p / q), p its probability under
    the current weights and q under the sampling weights; the paper's e^0.5 keeps more tokens than
    exact speculative sampling. ``exact``: the first rejected token is replaced by a draw from
    max(0, p - q), so that with lenience 1 answers have the policy's distribution; this stores q of
    every token, [tokens, vocabulary]. false: drawn from p, as published. ``size``: prompts whose
    last answers are remembered; ``age``: iterations after which they are forgotten.

    Answer k to a prompt starts from its previous answer k; every process remembers the answers of
    all. An answer that is accepted as a whole costs one forward pass and no sampling.
    """

    lenience: Positive = 1.0
    exact: bool = True
    size: Count = 4096
    age: Count = 64
    saved_as = "speculative"
    effects = Effects(
        idle_without_samples=True,
        changes_sampling=True,
        begins_answers=True,
        exchanges_rows=True,
        in_dry_run=False,
    )

    @classmethod
    def unfit(cls, options: Any, policy: Any) -> Iterator[tuple[str, str]]:
        if not (policy.capabilities.drafts and policy.capabilities.one_pass):
            yield (
                "",
                f"{called(policy)} cannot begin with an earlier answer; it is for models that draw "
                f"tokens one after the other",
            )

    def setup(self, setup: Setup) -> None:
        super().setup(setup)
        self.behavior = setup.behavior
        self.accepted: list[Tensor] = []
        self.iteration = 0

    def begin(self, iteration: int) -> None:
        super().begin(iteration)
        self.iteration = iteration
        self.accepted = []
        self.memory.forget(iteration - self.age)

    def context(self, context: RolloutContext) -> RolloutContext:
        return replace(context, drafts=self.drafts)

    def drafts(self, prompts: Sequence[Prompt], copies: Copies) -> Drafts | None:
        """Return the last answers for ``copies`` samples of each prompt; None if no process has
        any."""
        places = [self.places.get(id(prompt), -1) for prompt in prompts]
        # answers of this iteration, or to a prompt sampled twice, would be duplicates
        last = {e.index: e for e in self.memory.entries if e.iteration < self.iteration}
        known = [None if i in places[:n] else last.get(i) for n, i in enumerate(places)]
        device = self.policy.device
        if not distributed.largest(int(any(entry is not None for entry in known)), device):
            return None
        sizes = per_prompt(copies, len(prompts))
        drafts = self.memory.drafts(known, sizes, self.lenience, device)
        return replace(drafts, accepted=self.accepted)

    def observe(self, prompts: Sequence[Prompt], drawn: Drawn) -> None:
        """Remember what was sampled, of all processes; a collective call."""
        rollout = drawn.rollout
        rows = token_rows(rollout)
        if (truth := rollout.provenance.is_ground_truth) is not None:
            rows = rows.replace(mask=rows.mask & ~truth[:, None])
        if self.exact:
            size = self.policy.pass_sizes.rows or len(rollout)
            with self.behavior():
                rows = rows.recorded("full", all_logprobs(self.policy, rollout, size))
        local = [
            Remembered(
                self.places[id(prompt)], self.iteration, rows[rollout.group == place].to("cpu")
            )
            for place, prompt in enumerate(prompts)
            if id(prompt) in self.places
        ]
        every = gathered(sorted(local, key=lambda entry: entry.index))
        self.memory.add(every, 1, longest_ago(self.size))

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        counts = torch.cat(self.accepted) if self.accepted else torch.zeros(0, 2).long()
        drafts = counts[:, 1] > 0
        whole = drafts & (counts[:, 0] >= counts[:, 1])
        local = torch.stack([counts[:, 0].sum(), counts[:, 1].sum(), drafts.sum(), whole.sum()])
        sums = distributed.all_sum(local.double().to(drawn.rollout.group.device)).tolist()
        return drawn, {
            "speculative/accepted": sums[0] / max(sums[1], 1),
            "speculative/drafts": sums[2],
            "speculative/whole": sums[3],
        }
