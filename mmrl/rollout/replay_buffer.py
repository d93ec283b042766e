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

    def told(self, asked: Sequence[Prompt], drawn: Drawn) -> None:
        """``asked``: the prompts that ``drawn`` answers, as they stand in the data."""
        for one, seen in zip(asked, drawn.rollout.prompts, strict=True):
            # prompts that are changed on the way, by hints for instance, are not
            if id(one) in self.places:
                self.origins[id(seen)] = self.places[id(one)]

    def exchange(self, drawn: Drawn, iteration: int) -> tuple[Drawn, dict[str, float]]:
        """The iteration's groups of equal rewards replaced by remembered ones, as far as there are
        any; then the others are remembered. Counts, over all processes, for the log."""
        self.groups = [one for one in self.groups if iteration - one.iteration <= self.options.age]
        count = len(
            drawn.rollout.prompts
        )  # one stays, so that every process has something of this iteration to measure
        flat = flat_groups(drawn)[: min(int(self.options.share * count + 1e-9), count - 1)]
        best = sorted(self.groups, key=lambda one: (-one.spread(), -one.iteration, one.index))[
            : len(flat)
        ]
        fresh = self._worth(drawn, iteration)
        found = replace(drawn, rollout=marked(drawn.rollout, False))
        if best:
            found = exchanged(found, self._recalled(best), flat[: len(best)])
        for one in best:
            one.used += 1
        left = [one for one in self.groups if one.used < self.options.times]
        self.groups = sorted([*left, *fresh], key=lambda one: (-one.spread(), -one.iteration))[
            : self.options.size
        ]
        self.origins = {}
        ages = sum(iteration - one.iteration for one in best)
        device = drawn.rollout.group.device
        sums = distributed.all_sum(
            torch.tensor([len(best), ages, len(self.groups)], device=device).double()
        ).tolist()
        return found, {
            "reuse/groups": sums[0],
            "reuse/age": sums[1] / max(sums[0], 1),
            "reuse/remembered": sums[2],
        }

    def state(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Tensors and plain data. Of one process; several begin anew after a resume."""
        tensors = {}
        plain = []
        for n, one in enumerate(self.groups if distributed.world()[1] == 1 else ()):
            tensors |= {
                f"{n}/{name}": x
                for name in ROWS
                if isinstance(x := getattr(one.rollout, name), Tensor)
            }
            tensors |= {f"{n}/reward/{name}": value for name, value in one.rewards.items()}
            plain.append(
                {
                    "index": one.index,
                    "iteration": one.iteration,
                    "used": one.used,
                    "weights": one.rewards.weights,
                }
            )
        return {name: tensor.contiguous() for name, tensor in tensors.items()}, plain

    def load(self, tensors: dict[str, Tensor], plain: Sequence[dict[str, Any]]) -> None:
        self.groups = []
        for n, one in enumerate(plain):
            if one["index"] < len(self.prompts):
                rows = {name: tensors[f"{n}/{name}"] for name in ROWS if f"{n}/{name}" in tensors}
                rollout = Rollout(group=torch.zeros_like(rows["row_id"]), prompts=(), **rows)
                rewards = {name: tensors[f"{n}/reward/{name}"] for name in one["weights"]}
                self.groups.append(
                    Remembered(
                        one["index"],
                        one["iteration"],
                        rollout,
                        Rewards(rewards, one["weights"]),
                        one["used"],
                    )
                )

    def _worth(self, drawn: Drawn, iteration: int) -> list[Remembered]:
        """The groups of ``drawn`` that could teach something later."""
        rollout = drawn.rollout
        found = []
        useless = set(flat_groups(drawn))
        for group, prompt in enumerate(rollout.prompts):
            rows = (rollout.group == group).nonzero()[:, 0]
            rewards = Rewards(
                {n: value[rows].cpu() for n, value in drawn.rewards.items()}, drawn.rewards.weights
            )
            known = id(prompt) in self.origins and not rewards.per_row().total().isnan().any()
            if known and group not in useless and len(rows) > 1:
                kept = (
                    rollout[rows]
                    .replace(cond=None, prompts=(), group=torch.zeros_like(rows))
                    .to("cpu")
                )
                found.append(Remembered(self.origins[id(prompt)], iteration, kept, rewards))
        return found

    def _recalled(self, chosen: Sequence[Remembered]) -> Drawn:
        """Their answers to prompts that are encoded anew."""
        conds, seen = self.policy.recall([self.prompts[one.index] for one in chosen])
        device = conds[0]["input_ids"].device
        parts = [
            marked(one.rollout.to(device).replace(cond=[cond], prompts=(prompt,)), True)
            for one, cond, prompt in zip(chosen, conds, seen, strict=True)
        ]
        media: Media = together([self.policy.decode(part) for part in parts])
        names = chosen[0].rewards
        rewards = {
            name: torch.cat([one.rewards[name] for one in chosen]).to(device) for name in names
        }
        return Drawn(joined(parts), media, Rewards(rewards, names.weights))


def marked(rollout: Rollout, stale: bool) -> Rollout:
    return rollout.replace(is_replayed=torch.full_like(rollout.group, stale, dtype=torch.bool))
