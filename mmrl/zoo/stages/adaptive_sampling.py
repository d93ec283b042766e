"""Samples a prompt in rounds until its rewards give a signal: Reinforce-Ada (Xiong et al. 2025),
and the adaptive rollout of AR3PO (Zhang et al. 2025).

Rounds depend on the iteration and on how many prompts still need samples, counted over all
processes: training is the same on any number of them, and after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.groups import measured
from mmrl.core import distributed
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError
from mmrl.core.numbers import Count
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt, Rewards
from mmrl.rollout.collect import appended, evenly, media_of, together
from mmrl.rollout.stages import Drawn, Sample, Setup, Stage, group_sizes, moments, outline
from samplers.noise import Rng

NEGATIVE, POSITIVE, MISSING = range(3)


@STAGES.register("adaptive_sampling")
@dataclass
class AdaptiveSampling(Stage):
    """Samples a prompt again, in rounds, until its rewards give a signal (Reinforce-Ada).

    ``rounds``: the most additional ones. ``round_size``: samples of a prompt in each; null:
    ``train.group_size``. ``until``: balanced: half of a group's size are positive and half
    negative; positive: one is positive. ``threshold``: a total reward above it is positive.

    A prompt is done when enough of its samples are positive and negative. As many samples are
    trained on as the group has rows, half of them positive if possible, the earliest first. Their
    ``all_samples`` has the moments of all.
    """

    rounds: Count = 3
    round_size: Count | None = None
    until: Literal["balanced", "positive"] = "balanced"
    threshold: float = 0.5
    effects = Effects(looks_at_samples=True, exchanges_rows=True, renames_rows=True)

    def setup(self, setup: Setup) -> None:
        self.seed = setup.options.seed
        self.copies = self.round_size or setup.options.group_size
        # prompts as the policy returned them in this iteration -> as in the data
        self.origins: dict[int, tuple[Prompt, Prompt]] = {}

    def begin(self, iteration: int) -> None:
        self.origins = {}

    def observe(self, prompts: Sequence[Prompt], drawn: Drawn) -> None:
        for prompt, returned in zip(prompts, drawn.rollout.prompts, strict=True):
            self.origins[id(returned)] = (returned, prompt)

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        if drawn.rollout.edge_id is not None:
            raise UserError(
                "train.stages.adaptive_sampling: the samples of a tree share their beginnings and "
                "cannot be chosen one by one; sample without policy.tree"
            )
        sizes = torch.tensor(group_sizes(drawn.rollout))
        pool = drawn
        device = drawn.rollout.group.device
        samples = 0
        rounds = 0
        for number in range(self.rounds):
            active = self.active(pool, sizes)
            share = evenly(len(active), device)
            if not share.total:
                break
            rng = Rng.of(self.seed, iteration, "adaptive", number)
            round_groups = [*active, *[0] * share.idle]
            prompts = [self.origins[id(drawn.rollout.prompts[g])][1] for g in round_groups]
            further = sample(prompts, replace(rng, offset=share.offset), self.copies)
            pool = together_with(pool, further, active)
            samples += share.total * self.copies
            rounds += 1
        left = torch.tensor(len(self.active(pool, sizes)), device=device)
        return chosen(drawn, pool, self.labels(pool), sizes), {
            "adaptive/samples": samples,
            "adaptive/rounds": rounds,
            "adaptive/left": int(distributed.all_sum(left)),
        }

    def labels(self, pool: Drawn) -> Tensor:
        """Label samples negative, positive or unscored, [B] long on the CPU."""
        double, groups = measured(pool.rewards.per_row(), pool.rollout)
        positive = (double.total() > self.threshold).long()
        return torch.where(groups.present, positive, MISSING).cpu()

    def active(self, pool: Drawn, sizes: Tensor) -> list[int]:
        """List the groups that need more samples."""
        counts = label_counts(self.labels(pool), pool.rollout.group.cpu(), len(sizes))
        if self.until == "positive":
            wanting = counts[:, POSITIVE] == 0
        else:
            wanting = counts[:, :MISSING].amin(1) < sizes // 2
        groups: list[int] = (wanting & (sizes > 0)).nonzero()[:, 0].tolist()
        return groups


def label_counts(label: Tensor, group: Tensor, groups: int) -> Tensor:
    """Count the negative, positive and unscored rows of every group, [P, 3] long."""
    return torch.bincount(group * 3 + label, minlength=groups * 3).view(groups, 3)


def balanced(label: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    """Choose ``sizes`` [P] rows of every group, half of them positive if possible, earlier rows
    first, unscored ones last: [B] bool."""
    negative, positive, _ = label_counts(label, group, len(sizes)).unbind(1)
    scored = torch.minimum(sizes, negative + positive)
    quota = torch.minimum(torch.maximum(scored // 2, scored - negative), positive)
    quotas = torch.stack([scored - quota, quota, sizes - scored], 1).flatten()
    key = group * 3 + label
    order = key.argsort(stable=True)
    count = torch.bincount(key, minlength=len(quotas))
    rank = torch.empty_like(key)
    rank[order] = torch.arange(len(key)) - (count.cumsum(0) - count)[key[order]]
    return rank < quotas[key]


def together_with(pool: Drawn, further: Drawn, groups: Sequence[int]) -> Drawn:
    """Add further samples, whose first groups are ``groups`` of the pool; the rest are dropped."""
    if not groups:
        return pool
    rows = (further.rollout.group < len(groups)).nonzero()[:, 0]
    names = torch.tensor(groups, device=rows.device)
    added = further.rollout[rows]
    rewards = {
        name: torch.cat([value, further.rewards[name][rows]])
        for name, value in pool.rewards.items()
    }
    return replace(
        pool,
        rollout=appended(pool.rollout, added.replace(group=names[added.group])),
        media=together([pool.media, media_of(further.media, rows)]),
        rewards=Rewards(rewards, pool.rewards.weights),
    )


def chosen(drawn: Drawn, pool: Drawn, label: Tensor, sizes: Tensor) -> Drawn:
    """Choose as many rows of every group of the pool as ``drawn`` had; they take its row names."""
    group = pool.rollout.group.cpu()
    keep = balanced(label, group, sizes)
    rows = keep.nonzero()[:, 0]
    rows = rows[group[rows].argsort(stable=True)]
    names = drawn.rollout.row_id.cpu().sort().values
    owner = drawn.rollout.group.cpu()[drawn.rollout.row_id.cpu().argsort()]
    names = names[owner.argsort(stable=True)]
    order = names.argsort()
    device = drawn.rollout.group.device
    index = rows[order].to(device)
    dropped = (~keep).nonzero()[:, 0].to(device)
    plain = pool.rewards.per_row()
    unused = Rewards({name: value[dropped] for name, value in plain.items()}, plain.weights)
    whole = pool.rollout.replace(all_samples=moments(pool.rollout, pool.rewards))
    return replace(
        drawn,
        rollout=whole[index].replace(row_id=names[order].to(device)),
        media=media_of(pool.media, index),
        rewards=Rewards({n: v[index] for n, v in pool.rewards.items()}, pool.rewards.weights),
        unused=((outline(pool.rollout)[dropped], unused),) if len(dropped) else (),
    )
