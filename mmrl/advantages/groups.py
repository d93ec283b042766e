"""Computes statistics of groups of rows: any sizes, rows in any order, missing rows left out.

P counts the groups present among the rows, not the prompts of the whole iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.distributed import all_max
from mmrl.core.errors import UserError, suggest
from mmrl.core.types import Rewards, Rollout

SLACK = 1e-6  # of a bound, for rewards in half precision or summed


@dataclass(frozen=True)
class Groups:
    """Says which rows belong together and which of them count."""

    index: Tensor  # [B] long, 0..P-1
    present: Tensor  # [B] bool, False where the sample has no reward
    count: int  # P

    def sum(self, x: Tensor) -> Tensor:
        """Return the sums [P] of x [B] over the present rows."""
        return x.new_zeros(self.count).index_add(0, self.index[self.present], x[self.present])

    def size(self) -> Tensor:
        """Return the numbers [P] of present rows, long."""
        return torch.bincount(self.index[self.present], minlength=self.count)

    def mean(self, x: Tensor) -> Tensor:
        """Return the means [P] of x [B]; 0 for a group without present rows."""
        return self.sum(x) / self.size().clamp(min=1)

    def centred(self, x: Tensor) -> Tensor:
        """Return x [B] minus the mean of its group."""
        return x - self.mean(x)[self.index]

    def variance(self, x: Tensor, ddof: int) -> Tensor:
        """Return the variances [P] of x [B]; 0 for a group of ``ddof`` rows or fewer."""
        return self.sum(self.centred(x).square()) / (self.size() - ddof).clamp(min=1)

    def flat(self, x: Tensor) -> Tensor:
        """Tell in which groups [P] all present rewards are equal, so that nothing can be learnt;
        true of one row or none.

        Compared, not derived from the variance: the mean of equal numbers may round to another
        number.
        """
        low, high = self.extremes(x)
        return low >= high

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lowest and the highest [P] of x [B]; infinity and its negative for a group
        without present rows."""
        index = self.index[self.present]
        x = x[self.present]
        low = x.new_full((self.count,), torch.inf).scatter_reduce(0, index, x, "amin")
        high = x.new_full((self.count,), -torch.inf).scatter_reduce(0, index, x, "amax")
        return low, high


def named(rewards: Mapping[str, Tensor] | Tensor) -> Rewards:
    """Return the rewards by name; a bare tensor [B] is one reward of weight 1."""
    if isinstance(rewards, Tensor):
        return Rewards({"reward": rewards})
    return rewards if isinstance(rewards, Rewards) else Rewards(rewards)


def measured(rewards: Rewards | Tensor, rollout: Rollout) -> tuple[Rewards, Groups]:
    """Return the rewards in float64, and the groups of the rows whose rewards are all finite.

    A reward of weight 0 is a monitor: it is left out here, and its failures cost no sample.
    """
    rewards = named(rewards)
    for name, x in rewards.items():
        if x.ndim == 2 and rewards.weights[name]:
            raise UserError(
                f"reward {name!r} gives a number for every step, [B, K] = "
                f"{list(x.shape)}, and this advantage compares "
                "whole samples; use one that knows steps, such as process, group, "
                "flow_grpo, dance_grpo or gdpo"
            )
    rewards = Rewards({name: x for name, x in rewards.items() if x.ndim == 1}, rewards.weights)
    wrong = {name: tuple(x.shape) for name, x in rewards.items() if x.shape != rollout.group.shape}
    if wrong or not rewards:
        raise ValueError(
            f"rewards must be [B] = {tuple(rollout.group.shape)}, got {wrong or 'none'}"
        )
    group = rollout.group.to(next(iter(rewards.values())).device)
    names, index = group.unique(return_inverse=True)
    double = {name: x.detach().double() for name, x in rewards.items() if rewards.weights[name]}
    if not double:
        raise UserError(
            f"every reward has weight 0 ({', '.join(rewards)}): nothing to learn "
            f"from; give one a weight"
        )
    present = torch.stack([x.isfinite() for x in double.values()]).all(0)
    return Rewards(double, rewards.weights), Groups(index, present, len(names))


def reward_called(
    double: Rewards, name: str | None, advantage: str, option: str = "reward"
) -> Tensor:
    """Return one reward [B] by its name, unweighted, or the weighted sum of all for None; raise
    UserError, naming the advantage and its option, if there is no such reward."""
    if name is None:
        return double.total()
    if name not in double:
        raise UserError(
            f"advantage {advantage}: {option} is {name!r}, and no reward with a weight has that "
            f"name; {suggest(name, double)}"
        )
    return double[name]


def replaced(double: Rewards, name: str | None, shaped: Tensor, groups: Groups) -> Rewards:
    """Replace the reward called ``name``, or the sum of all for None, by a shaped one [B]; missing
    rows are NaN in every reward."""
    parts = {"shaped": shaped} if name is None else {**double, name: shaped}
    weights = None if name is None else double.weights
    return Rewards(
        {key: x.masked_fill(~groups.present, torch.nan) for key, x in parts.items()}, weights
    )


def in_range(
    double: Rewards, groups: Groups, low: float, high: float, advantage: str
) -> dict[str, Tensor]:
    """Return the rewards, of [low, high], as numbers of [0, 1]; raise UserError, on all processes,
    if one lies outside."""
    if low >= high:
        raise UserError(f"advantage {advantage}: low = {low} must be less than high = {high}")
    scaled = {name: (x - low) / (high - low) for name, x in double.items()}
    strange = [((x < -SLACK) | (x > 1 + SLACK)) & groups.present for x in scaled.values()]
    wrong = all_max(torch.stack([rows.any() for rows in strange]).double()).tolist()
    for name, is_wrong in zip(scaled, wrong, strict=True):
        if is_wrong:
            raise UserError(
                f"advantage {advantage} needs rewards between low = {low} and high = {high}, "
                f"and reward {name!r} has others; set low and high to its bounds"
            )
    return {name: x.clamp(0, 1) for name, x in scaled.items()}


def finished(advantage: Tensor, rewards: Mapping[str, Tensor] | Tensor, present: Tensor) -> Tensor:
    """Return an advantage, [B, 1] or [B, K], in the precision of the rewards (at least float32),
    NaN where the sample is missing."""
    dtype = torch.float32
    for reward in named(rewards).values():
        dtype = torch.promote_types(dtype, reward.dtype)
    masked = torch.where(present, advantage, torch.nan).to(dtype)
    return masked[:, None] if masked.ndim == 1 else masked
