"""Begins answers with what the weights of now accept of earlier ones: speculative rollouts (Liu et
al. 2025, SPEC-RL)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmrl.config.options import Speculative
from mmrl.core import distributed
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError, called
from mmrl.core.registry import STAGES
from mmrl.core.types import Copies, Prompt, per_prompt
from mmrl.policies.base import Drafts, Policy, RolloutContext
from mmrl.policies.draft_verification import all_logprobs
from mmrl.rollout.stages import Drawn, Sample, Setup
from mmrl.zoo.stages.answer_memory import OldAnswers

NAMES = ("ids", "mask", "logprob", "full")  # of what is stored of a prompt's answers


@STAGES.register("speculative")
@dataclass
class SpeculativeRollouts(OldAnswers):
    """Hands the last answers to each prompt to the policy as drafts (``train.speculative``).

    Answer k to a prompt begins with what is accepted of its answer k before; every process
    remembers those of all. An answer that is accepted whole costs one pass and is not sampled.
    """

    options: Speculative
    policy: Policy
    prompts: Sequence[Prompt]
    behavior: Callable[[], AbstractContextManager[Any]] = nullcontext
    stored: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by place of the prompt
    sampled_at: dict[int, int] = field(default_factory=dict)
    accepted: list[Tensor] = field(default_factory=list)
    iteration: int = 0
    saved_as = option = "speculative"
    effects = Effects(
        idle_without_samples=True,
        changes_sampling=True,
        begins_answers=True,
        exchanges_rows=True,
        in_dry_run=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        can = self.policy.capabilities
        if not (can.drafts and can.one_pass):
            raise UserError(
                f"train.speculative: {type(self.policy).__name__} cannot begin with an earlier "
                f"answer; it is for models that draw tokens one after the other"
            )

    @classmethod
    def unfit(cls, options: Any, policy: Any) -> Iterator[tuple[str, str]]:
        if not (policy.capabilities.drafts and policy.capabilities.one_pass):
            yield (
                "",
                f"{called(policy)} cannot begin with an earlier answer; it is for models that draw "
                f"tokens one after the other",
            )

    @classmethod
    def build(cls, setup: Setup) -> SpeculativeRollouts | None:
        options = setup.options.speculative
        return cls(options, setup.policy, setup.prompts, setup.behavior) if options else None

    def begin(self, iteration: int) -> None:
        self.iteration = iteration
        self.origins = {}
        self.accepted = []
        for index in [i for i, at in self.sampled_at.items() if iteration - at > self.options.age]:
            del self.stored[index], self.sampled_at[index]

    def context(self, context: RolloutContext) -> RolloutContext:
        return replace(context, drafts=self.drafts)

    def drafts(self, prompts: Sequence[Prompt], copies: Copies) -> Drafts | None:
        """Return the last answers to so many samples of each prompt; None if none is known on any
        process."""
        sizes = per_prompt(copies, len(prompts))
        places = [self.places.get(id(prompt), -1) for prompt in prompts]
        # answers of this iteration, or to a prompt that is asked twice, would be copies of others
        known = [
            self.stored[i]
            if i in self.stored and self.sampled_at[i] < self.iteration and i not in places[:n]
            else None
            for n, i in enumerate(places)
        ]
        device = self.policy.device
        some = distributed.largest(int(any(answers is not None for answers in known)), device)
        like = next((answers for answers in self.stored.values()), None)
        if not some or like is None:
            return None
        names = [name for name in NAMES if name in like]
        longest = max(answers["ids"].shape[1] for answers in self.stored.values())
        rows = {
            name: torch.cat(
                [
                    _rows(answers, name, size, longest, like)
                    for answers, size in zip(known, sizes, strict=True)
                ]
            ).to(device)
            for name in names
        }
        lenience = torch.full((sum(sizes),), self.options.lenience, device=device)
        return Drafts(**rows, lenience=lenience, accepted=self.accepted)

    def observe(self, prompts: Sequence[Prompt], drawn: Drawn) -> None:
        """Remember what was sampled, of all processes; a collective call."""
        rollout = drawn.rollout
        truth = rollout.provenance.is_ground_truth
        mask = rollout.mask if truth is None else rollout.mask & ~truth[:, None]
        columns = {"ids": rollout.sample, "mask": mask, "logprob": rollout.logprob}
        if rollout.provenance.sampler_logprob is not None:
            columns["logprob"] = rollout.provenance.sampler_logprob
        if self.options.exact:
            size = self.policy.fixed_batch_rows or len(rollout)
            with self.behavior():
                columns["full"] = all_logprobs(self.policy, rollout, size)
        group = rollout.group.cpu()
        local: dict[str, Tensor] = {}
        for place, prompt in enumerate(prompts):
            index = self.places.get(id(prompt), -1)
            if index >= 0:
                rows = (group == place).nonzero()[:, 0].to(rollout.group.device)
                local |= {f"{index}/{name}": value[rows].cpu() for name, value in columns.items()}
        for part in distributed.all_gather_tensors(local):
            self._store(part)

    def _store(self, tensors: Mapping[str, Tensor]) -> None:
        answers: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            number, _, name = key.partition("/")
            answers.setdefault(int(number), {})[name] = value
        for index in sorted(answers):
            self.stored.pop(index, None)  # the newest stand last
            self.stored[index] = answers[index]
            self.sampled_at[index] = self.iteration
        for index in list(self.stored)[: -self.options.size]:
            del self.stored[index], self.sampled_at[index]

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

    def state_dict(self) -> tuple[dict[str, Tensor], Any]:
        tensors = {
            f"{index}/{name}": value.contiguous()
            for index, answers in self.stored.items()
            for name, value in answers.items()
        }
        return tensors, {"order": [[index, self.sampled_at[index]] for index in self.stored]}

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Any) -> None:
        self.stored, self.sampled_at = {}, {}
        for index, iteration in (plain or {}).get("order", ()):
            if index < len(self.prompts):
                keys = {name: f"{index}/{name}" for name in NAMES}
                self.stored[index] = {n: tensors[key] for n, key in keys.items() if key in tensors}
                self.sampled_at[index] = iteration


def _rows(
    answers: Mapping[str, Tensor] | None,
    name: str,
    size: int,
    longest: int,
    like: Mapping[str, Tensor],
) -> Tensor:
    """Return ``size`` rows of what is stored of a prompt, zeros where there is nothing."""
    table = like[name].new_zeros(size, longest, *like[name].shape[2:])
    if answers is not None:
        stored = answers[name][:size]
        table[: len(stored), : stored.shape[1]] = stored
    return table
