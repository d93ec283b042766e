"""Compares every sample with the other answers to its prompt: group-relative advantages.

Every function takes rewards, a tensor [B] or ``Rewards``, and the rollout that earned them, and
returns [B, 1], or [B, K] for rewards of steps. A sample with a reward that is not a finite number
is missing: it enters no statistic and its advantage is NaN, which takes the row out of training.
Groups may differ in size and live whole on one process.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from mmrl.advantages.groups import finished, measured
from mmrl.advantages.normalise import Combine, EpsMode, Std, combined, flat_rows
from mmrl.advantages.process import by_step
from mmrl.advantages.select import best_and_worst
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout

ZeroVariance = Literal["keep", "drop"]


@ADVANTAGES.register("group")
@by_step
def group(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    std: Std = "group",
    ddof: Literal[0, 1] = 0,
    eps: float = 1e-4,
    eps_mode: EpsMode = "add",
    combine: Combine = "sum",
    baseline: Literal["group", "others"] = "group",
    zero_variance_groups: ZeroVariance = "keep",
    best_of: int | None = None,
) -> Tensor:
    """Compare with the group: (reward - mean of the group) / std, with every choice an option.

    std: of the group, of all rewards, or none. eps: added to the std, its least value, or added to
    the variance. combine: several rewards are summed, then normalised; or each is normalised, then
    summed (aggregate), and then normalised over the batch (gdpo). baseline: the mean of the group,
    or of the others alone (leave one out: n / (n - 1) times the advantage; 0 in a group of one).
    zero_variance_groups: a group of equal rewards has advantage 0, or is dropped. best_of: train on
    the n/2 best and n/2 worst of each group only.

    ddof: of the std: 0 population, 1 sample. eps_mode: eps is added to the std, a lower bound of
    it, or added to the variance.
    """
    if eps < 0:
        raise UserError(f"advantage: eps must not be negative, it is {eps}")
    double, groups = measured(rewards, rollout)
    advantage = combined(double, groups, combine, std, ddof, eps, eps_mode)
    keep = groups.present
    if best_of is not None:
        keep = best_and_worst(advantage, groups, rollout.row_id, best_of)
    if zero_variance_groups == "drop":
        keep = keep & ~flat_rows(double, groups, combine)
    if baseline == "others":
        size = groups.size()[groups.index]  # [B]
        advantage = advantage * size / (size - 1).clamp(min=1)
    return finished(advantage, rewards, keep)
