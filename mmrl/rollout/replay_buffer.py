"""Trains on answers of earlier iterations again, where the answers of this one teach nothing
(AVATAR).

A group whose rewards are all equal has no advantage. It is replaced by a remembered one whose
rewards differ, with the log-probs recorded when it was sampled: the ratio of such a row is that of
the weights now over those of then, which the surrogate clips as it clips any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmrl.config.options import Reuse
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.registry import STAGES
from mmrl.core.types import Media, Prompt, Provenance, Rewards, Rollout, TokenOrder
from mmrl.policies.base import Policy
from mmrl.rollout.collect import joined, together
from mmrl.rollout.dynamic_sampling import exchanged, flat_groups
from mmrl.rollout.stages import Drawn, Sample, Setup, Stage, group_sizes

# what is kept of a rollout
ROWS = (
    "row_id",
    "sample",
    "logprob",
    "entropy",
    "divergence",
    "mask",
    "commit_step",
    "self_certainty",
    "question_gain",
    "last_logprob",
    "routes",
    "sampler_logprob",
    "is_ground_truth",
)


@dataclass
class Remembered:
    """Holds the answers of one group."""

    index: int  # of its prompt in the data
    iteration: int  # in which it was sampled
    rollout: Rollout  # its rows, on the CPU, without condition
    rewards: Rewards
    used: int = 0

    def spread(self) -> float:
        return float(self.rewards.per_row().total().double().std(correction=0))


class OldAnswers(Stage):
    """Remembers answers by their prompts' places in the data, for policies that can be shown old
    answers again. ``option``: of ``train`` that asks for it."""

    option: str
    policy: Policy
    prompts: Sequence[Prompt]

    def __post_init__(self) -> None:
        if not self.policy.capabilities.replay:
            raise UserError(
                f"train.{self.option}: {type(self.policy).__name__} cannot be shown old answers "
                f"again; it is for vlm"
            )
        self.places = {id(prompt): i for i, prompt in enumerate(self.prompts)}
        # of prompts as the policy returned them in this iteration
        self.origins: dict[int, int] = {}

    def observe(self, prompts: Sequence[Prompt], drawn: Drawn) -> None:
        for prompt, returned in zip(prompts, drawn.rollout.prompts, strict=True):
            # prompts that are changed on the way, by hints for instance, have other answers
            if id(prompt) in self.places:
                self.origins[id(returned)] = self.places[id(prompt)]


@STAGES.register("replay_buffer")
@dataclass
class ReplayBuffer(OldAnswers):
    """Replaces groups that teach nothing by old answers of the same process
    (``train.replay_buffer``).

    ``prompts``: the data, whose entries are remembered by their places.
    """

    options: Reuse
    policy: Policy
    prompts: Sequence[Prompt]
    entries: list[Remembered] = field(default_factory=list)
    saved_as = "memory"
    option = "replay_buffer"

    @classmethod
    def build(cls, setup: Setup) -> ReplayBuffer | None:
        options = setup.options.replay_buffer
        return cls(options, setup.policy, setup.prompts) if options else None

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        """Replace groups of equal rewards by remembered ones, as far as there are any; then
        remember the others."""
        self.entries = [
            entry for entry in self.entries if iteration - entry.iteration <= self.options.age
        ]
        count = len(drawn.rollout.prompts)
        # one stays, so that every process has something of this iteration to measure
        flat = flat_groups(drawn)[: min(int(self.options.share * count + 1e-9), count - 1)]
        places, best = self._match(flat, group_sizes(drawn.rollout))
        fresh = self._worth(drawn, iteration)
        mixed = replace(drawn, rollout=marked(drawn.rollout, False))
        if best:
            mixed = exchanged(mixed, self._recalled(best), places)
        for entry in best:
            entry.used += 1
        left = [entry for entry in self.entries if entry.used < self.options.times]
        self.entries = sorted(
            [*left, *fresh], key=lambda entry: (-entry.spread(), -entry.iteration)
        )[: self.options.size]
        self.origins = {}
        ages = sum(iteration - entry.iteration for entry in best)
        device = drawn.rollout.group.device
        sums = distributed.all_sum(
            torch.tensor([len(best), ages, len(self.entries)], device=device).double()
        ).tolist()
        return mixed, {
            "reuse/groups": sums[0],
            "reuse/age": sums[1] / max(sums[0], 1),
            "reuse/remembered": sums[2],
        }

    def _match(
        self, flat: Sequence[int], sizes: Sequence[int]
    ) -> tuple[list[int], list[Remembered]]:
        """Find the best remembered group of the same size for each of the groups ``flat``, as far
        as there is one."""
        left = sorted(
            self.entries, key=lambda entry: (-entry.spread(), -entry.iteration, entry.index)
        )
        places = []
        entries = []
        for group in flat:
            fitting = (entry for entry in left if len(entry.rollout) == sizes[group])
            if entry := next(fitting, None):
                left = [rest for rest in left if rest is not entry]
                places.append(group)
                entries.append(entry)
        return places, entries

    def state_dict(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Return the entries if there is one process; several begin anew after a resume."""
        return packed(self.entries)

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Any) -> None:
        self.entries = unpacked(tensors, plain, len(self.prompts))

    def _worth(self, drawn: Drawn, iteration: int) -> list[Remembered]:
        """Make entries of the groups of ``drawn`` that could teach something later."""
        rollout = drawn.rollout
        entries = []
        useless = set(flat_groups(drawn))
        for group, prompt in enumerate(rollout.prompts):
            rows = (rollout.group == group).nonzero()[:, 0]
            rewards = Rewards(
                {n: value[rows].cpu() for n, value in drawn.rewards.items()}, drawn.rewards.weights
            )
            known = id(prompt) in self.origins and not rewards.per_row().total().isnan().any()
            if known and group not in useless and len(rows) > 1:
                stored = (
                    rollout[rows]
                    .replace(cond=None, prompts=(), group=torch.zeros_like(rows), all_samples=None)
                    .to("cpu")
                )
                entries.append(Remembered(self.origins[id(prompt)], iteration, stored, rewards))
        return entries

    def _recalled(self, chosen: Sequence[Remembered]) -> Drawn:
        """Recall the chosen answers, to prompts that are encoded anew."""
        conds, prompts = self.policy.recall([self.prompts[entry.index] for entry in chosen])
        device = conds[0]["input_ids"].device
        parts = [
            marked(entry.rollout.to(device).replace(cond=[cond], prompts=(prompt,)), True)
            for entry, cond, prompt in zip(chosen, conds, prompts, strict=True)
        ]
        media: Media = together([self.policy.decode(part) for part in parts])
        names = chosen[0].rewards
        rewards = {
            name: torch.cat([entry.rewards[name] for entry in chosen]).to(device) for name in names
        }
        return Drawn(joined(parts), media, Rewards(rewards, names.weights))


def packed(entries: Sequence[Remembered]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return the entries for a checkpoint: tensors, and plain data; nothing where there are several
    processes."""
    tensors: dict[str, Tensor] = {}
    plain = []
    for n, entry in enumerate(entries if distributed.world()[1] == 1 else ()):
        fields = entry.rollout.row_tensors()
        tensors |= {f"{n}/{name}": fields[name] for name in ROWS if name in fields}
        tensors |= {f"{n}/reward/{name}": value for name, value in entry.rewards.items()}
        plain.append(
            {
                "index": entry.index,
                "iteration": entry.iteration,
                "used": entry.used,
                "weights": entry.rewards.weights,
            }
        )
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, plain


def unpacked(tensors: Mapping[str, Tensor], plain: Any, prompts: int) -> list[Remembered]:
    """Make entries of what ``packed`` returned, as far as the data still has their prompts."""
    entries = []
    for n, entry in enumerate(plain or ()):
        if entry["index"] < prompts:
            rows = {name: tensors[f"{n}/{name}"] for name in ROWS if f"{n}/{name}" in tensors}
            rewards = {name: tensors[f"{n}/reward/{name}"] for name in entry["weights"]}
            entries.append(
                Remembered(
                    entry["index"],
                    entry["iteration"],
                    _rollout(rows),
                    Rewards(rewards, entry["weights"]),
                    entry["used"],
                )
            )
    return entries


def _rollout(rows: dict[str, Tensor]) -> Rollout:
    """Make a rollout of one prompt from the tensors that a checkpoint has of it."""
    return Rollout(
        group=torch.zeros_like(rows["row_id"]),
        trajectory=TokenOrder(
            commit_step=rows["commit_step"],
            self_certainty=rows.get("self_certainty"),
            question_gain=rows.get("question_gain"),
            last_logprob=rows.get("last_logprob"),
            routes=rows.get("routes"),
        ),
        provenance=Provenance(
            sampler_logprob=rows.get("sampler_logprob"), is_ground_truth=rows.get("is_ground_truth")
        ),
        row_id=rows["row_id"],
        sample=rows["sample"],
        logprob=rows["logprob"],
        entropy=rows.get("entropy"),
        divergence=rows.get("divergence"),
        mask=rows["mask"],
    )


def marked(rollout: Rollout, replayed: bool) -> Rollout:
    """Mark the rows that are of an earlier iteration."""
    is_replayed = torch.full_like(rollout.group, replayed, dtype=torch.bool)
    return rollout.replace(provenance=rollout.provenance.replace(is_replayed=is_replayed))
