"""Compares a sample with all samples of its prompt, including those that are not trained on."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmrl.advantages.groups import finished, measured
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout


@ADVANTAGES.register("all_samples")
def all_samples(
    rewards: Rewards | Tensor,
    rollout: Rollout,
    *,
    std: Literal["prompt", "none"] = "prompt",
    eps: float = 1e-6,
) -> Tensor:
    """Compare with all samples of the prompt, trained on or not: Reinforce-Ada's global statistics.

    Xiong et al. 2025: (reward - mean) / (std + eps), with the mean and std (population) of all
    samples that the rounds of ``adaptive_sampling`` drew for the prompt, since the group chosen
    from them is balanced on purpose; without rounds, of the group. The reward is the weighted sum;
    shaping, such as by a KL, is known for the chosen samples only, and its mean effect is added to
    the mean of all (our reading). std: of the prompt, or none (the reward less the mean). eps:
    added to the std.
    """
    if eps < 0:
        raise UserError(f"advantage: eps must not be negative, it is {eps}")
    double, groups = measured(rewards, rollout)
    total = double.total()
    if rollout.all_samples is None:
        mean = groups.mean(total)[groups.index]
        spread = groups.variance(total, 0).sqrt()[groups.index]
    else:
        mean = rollout.all_samples.mean.to(total)
        spread = rollout.all_samples.std.to(total)
    advantage = total - mean
    if std == "prompt":
        # equal rewards have advantage 0, however their mean was rounded
        level = spread <= 1e-12
        advantage = torch.where(level, torch.zeros_like(total), advantage / (spread + eps))
    return finished(advantage, rewards, groups.present)
