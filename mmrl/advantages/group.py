"""Group-relative advantages: every sample is compared with the other answers to its prompt.

Every function takes rewards, a tensor [B] or ``Rewards``, and the rollout that earned them, and
returns [B, 1], or [B, K] for rewards of steps. A sample with a reward that is not a finite number
is missing: it enters no statistic and its advantage is NaN, which takes the row out of training.
Groups may differ in size and live whole on one process.
"""

from __future__ import annotations

from typing import Literal

import torch
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
    zero_variance_groups: ZeroVariance = "keep",
    best_of: int | None = None,
) -> Tensor:
    """(reward - mean of the group) / std, every choice open.

    std: of the group, of all rewards, or none. eps: added to the std, its least value, or added to
    the variance. combine: several rewards are summed, then normalised; or each is normalised, then
    summed (aggregate), and then normalised over the batch (gdpo). zero_variance_groups: a group of
    equal rewards has advantage 0, or is dropped. best_of: train on the n/2 best and n/2 worst of
    each group only.
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
    return finished(advantage, rewards, keep)


@ADVANTAGES.register("flow_grpo")
@by_step
def flow_grpo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    std: Std = "global",
    zero_variance_groups: ZeroVariance = "keep",
    best_of: int | None = None,
) -> Tensor:
    """Flow-GRPO: mean of the group, std (population, plus 1e-4) of all rewards or of the group.

    Liu et al. 2025, "Flow-GRPO"; the published SD3.5 recipes use the global std, the paper's eq. 4
    the group's.
    """
    return group(
        rewards,
        rollout,
        std=std,
        ddof=0,
        eps=1e-4,
        zero_variance_groups=zero_variance_groups,
        best_of=best_of,
    )


@ADVANTAGES.register("dance_grpo")
@by_step
def dance_grpo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    combine: Combine = "sum",
    zero_variance_groups: ZeroVariance = "keep",
    best_of: int | None = None,
) -> Tensor:
    """DanceGRPO: mean and sample std (ddof 1, plus 1e-8) of the group; MixGRPO with combine:
    aggregate."""
    return group(
        rewards,
        rollout,
        ddof=1,
        eps=1e-8,
        combine=combine,
        zero_variance_groups=zero_variance_groups,
        best_of=best_of,
    )


@ADVANTAGES.register("gdpo")
@by_step
def gdpo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    eps: float = 1e-6,
    ddof: Literal[0, 1] = 0,
    eps_mode: EpsMode = "floor",
    zero_variance_groups: ZeroVariance = "keep",
    best_of: int | None = None,
) -> Tensor:
    """GDPO: each reward is normalised in its group, the weighted sum over the batch (std at least
    1e-6).

    For text, TRL has ddof 1 and adds 1e-4 to the std, ms-swift 1e-8.
    """
    return group(
        rewards,
        rollout,
        ddof=ddof,
        eps=eps,
        eps_mode=eps_mode,
        combine="gdpo",
        zero_variance_groups=zero_variance_groups,
        best_of=best_of,
    )


@ADVANTAGES.register("dr_grpo")
@by_step
def dr_grpo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    zero_variance_groups: ZeroVariance = "keep",
    best_of: int | None = None,
) -> Tensor:
    """Dr. GRPO: reward minus the mean of the group, no std (Liu et al. 2025, "Understanding
    R1-Zero-like training")."""
    return group(
        rewards, rollout, std="none", zero_variance_groups=zero_variance_groups, best_of=best_of
    )


@ADVANTAGES.register("rloo")
@by_step
def rloo(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    zero_variance_groups: ZeroVariance = "keep",
    best_of: int | None = None,
) -> Tensor:
    """RLOO: reward minus the mean of the *other* answers of the group (Ahmadian et al. 2024, "Back
    to basics").

    Equal to n / (n - 1) times the Dr. GRPO advantage in a group of n; 0 in a group of one.
    """
    double, groups = measured(rewards, rollout)
    size = groups.size()[groups.index]  # [B]
    centred = dr_grpo(
        Rewards(double, double.weights),
        rollout,
        zero_variance_groups=zero_variance_groups,
        best_of=best_of,
    )[:, 0]
    return finished(centred * size / (size - 1).clamp(min=1), rewards, torch.isfinite(centred))
