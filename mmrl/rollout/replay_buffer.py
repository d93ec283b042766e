"""Answers of earlier iterations that are trained on again, where the answers of this one teach
nothing (AVATAR).

A group whose rewards are all equal has no advantage. It gives way to a remembered one whose rewards
differ, with the log-probs recorded when it was sampled: the ratio of such a row is that of the
weights now over those of then, which the surrogate clips as it clips any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmrl.config.options import Reuse
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.types import Media, Prompt, Rewards, Rollout
from mmrl.policies.base import Policy
from mmrl.rollout.collect import joined, together
from mmrl.rollout.dynamic_sampling import Drawn, exchanged, flat_groups

# what is kept of a rollout
ROWS = (
    "row_id",
    "sample",
    "logprob",
    "mask",
    "commit_step",
    "self_certainty",
    "sampler_logprob",
    "is_ground_truth",
)


@dataclass
class Remembered:
    """One group."""

    index: int  # of its prompt in the data
    iteration: int  # in which it was sampled
    rollout: Rollout  # its rows, on the CPU, without condition
    rewards: Rewards
    used: int = 0

    def spread(self) -> float:
        return float(self.rewards.per_row().total().double().std(correction=0))


@dataclass
class Memory:
    """Of one process. ``prompts``: the data, whose entries are remembered by their places."""

    options: Reuse
    policy: Policy
    prompts: Sequence[Prompt]
    groups: list[Remembered] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.policy.capabilities.replay:
            raise UserError(
                f"train.replay_buffer: {type(self.policy).__name__} cannot be shown old answers "
                f"again; it is for vlm"
            )
        self.places = {id(prompt): i for i, prompt in enumerate(self.prompts)}
        # of prompts as the policy returned them in this iteration
        self.origins: dict[int, int] = {}

    def told(self, prompts: Sequence[Prompt], drawn: Drawn) -> None:
        """``asked``: the prompts that ``drawn`` answers, as they stand in the data."""
        for prompt, returned in zip(prompts, drawn.rollout.prompts, strict=True):
            # prompts that are changed on the way, by hints for instance, are not
            if id(prompt) in self.places:
                self.origins[id(returned)] = self.places[id(prompt)]

    def exchange(self, drawn: Drawn, iteration: int) -> tuple[Drawn, dict[str, float]]:
        """The iteration's groups of equal rewards replaced by remembered ones, as far as there are
        any; then the others are remembered. Counts, over all processes, for the log."""
        self.groups = [
            entry for entry in self.groups if iteration - entry.iteration <= self.options.age
        ]
        count = len(
            drawn.rollout.prompts
        )  # one stays, so that every process has something of this iteration to measure
        flat = flat_groups(drawn)[: min(int(self.options.share * count + 1e-9), count - 1)]
        best = sorted(self.groups, key=lambda one: (-one.spread(), -one.iteration, one.index))[
            : len(flat)
        ]
        fresh = self._worth(drawn, iteration)
        mixed = replace(drawn, rollout=marked(drawn.rollout, False))
        if best:
            mixed = exchanged(mixed, self._recalled(best), flat[: len(best)])
        for entry in best:
            entry.used += 1
        left = [entry for entry in self.groups if entry.used < self.options.times]
        self.groups = sorted([*left, *fresh], key=lambda one: (-one.spread(), -one.iteration))[
            : self.options.size
        ]
        self.origins = {}
        ages = sum(iteration - entry.iteration for entry in best)
        device = drawn.rollout.group.device
        sums = distributed.all_sum(
            torch.tensor([len(best), ages, len(self.groups)], device=device).double()
        ).tolist()
        return mixed, {
            "reuse/groups": sums[0],
            "reuse/age": sums[1] / max(sums[0], 1),
            "reuse/remembered": sums[2],
        }

    def state(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Tensors and plain data. Of one process; several begin anew after a resume."""
        tensors = {}
        plain = []
        for n, entry in enumerate(self.groups if distributed.world()[1] == 1 else ()):
            tensors |= {
                f"{n}/{name}": x
                for name in ROWS
                if isinstance(x := getattr(entry.rollout, name), Tensor)
            }
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

    def load(self, tensors: dict[str, Tensor], plain: Sequence[dict[str, Any]]) -> None:
        self.groups = []
        for n, entry in enumerate(plain):
            if entry["index"] < len(self.prompts):
                rows = {name: tensors[f"{n}/{name}"] for name in ROWS if f"{n}/{name}" in tensors}
                rollout = Rollout(group=torch.zeros_like(rows["row_id"]), prompts=(), **rows)
                rewards = {name: tensors[f"{n}/reward/{name}"] for name in entry["weights"]}
                self.groups.append(
                    Remembered(
                        entry["index"],
                        entry["iteration"],
                        rollout,
                        Rewards(rewards, entry["weights"]),
                        entry["used"],
                    )
                )

    def _worth(self, drawn: Drawn, iteration: int) -> list[Remembered]:
        """The groups of ``drawn`` that could teach something later."""
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
                    .replace(cond=None, prompts=(), group=torch.zeros_like(rows))
                    .to("cpu")
                )
                entries.append(Remembered(self.origins[id(prompt)], iteration, stored, rewards))
        return entries

    def _recalled(self, chosen: Sequence[Remembered]) -> Drawn:
        """Their answers to prompts that are encoded anew."""
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


def marked(rollout: Rollout, stale: bool) -> Rollout:
    return rollout.replace(is_replayed=torch.full_like(rollout.group, stale, dtype=torch.bool))
