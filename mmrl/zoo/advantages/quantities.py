"""Measures rows by what a rollout records: length, probability, reward per decision."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.advantages.groups import named
from mmrl.core.errors import UserError, suggest
from mmrl.core.types import Rewards, Rollout, TokenOrder


def path_mask(rollout: Rollout) -> Tensor:
    """Return the decisions [B, K] that lead to each row, bool, shared ones included."""
    return rollout.path_mask()


def length(rollout: Rollout) -> Tensor:
    """Return the number of decisions [B] of every row, float64."""
    return path_mask(rollout).sum(1).double()


def sequence_logprob(rollout: Rollout) -> Tensor:
    """Return the log-prob [B] of every row under the weights that sampled it, float64."""
    return torch.where(path_mask(rollout), rollout.logprob, 0.0).double().sum(1)


def surprisal(rollout: Rollout) -> Tensor:
    """Return the mean of -log p [B] over a row's decisions, nats, an unbiased estimate of their
    entropy; 0 for a row without decisions."""
    return -sequence_logprob(rollout) / length(rollout).clamp(min=1)


def self_certainty(rollout: Rollout) -> Tensor:
    """Return the mean self-certainty [B] of a row's tokens; raise UserError where the policy does
    not record it."""
    recorded = (
        rollout.trajectory.self_certainty if isinstance(rollout.trajectory, TokenOrder) else None
    )
    if recorded is None:
        raise UserError(
            "the advantage needs 'self_certainty', which this policy does not record; set "
            "policy.record_self_certainty if it has that option, or take surprisal"
        )
    mask = path_mask(rollout)
    return torch.where(mask, recorded, 0.0).double().sum(1) / mask.sum(1).clamp(min=1)


def entropy(rollout: Rollout) -> Tensor:
    """Return the mean entropy [B] of the distributions a row's decisions were drawn from, nats,
    float64; raise UserError where the policy does not record it."""
    mask = path_mask(rollout)
    return torch.where(mask, rollout.entropies(), 0.0).double().sum(1) / mask.sum(1).clamp(min=1)


OF_ROLLOUTS = {
    "length": length,
    "logprob": sequence_logprob,
    "surprisal": surprisal,
    "entropy": entropy,
    "self_certainty": self_certainty,
}


def quantity(name: str, rewards: Rewards | Tensor, rollout: Rollout) -> Tensor:
    """Measure the rows [B], float64: "reward" (the weighted sum), "reward_per_token", "length",
    "logprob", "surprisal", "entropy", "self_certainty", or a reward by its name, watched ones
    (weight 0) included."""
    by_name = named(rewards).per_row()
    if name in by_name:
        return by_name[name].double()
    if name in OF_ROLLOUTS:
        return OF_ROLLOUTS[name](rollout).to(next(iter(by_name.values())).device)
    if name not in ("reward", "reward_per_token"):
        known = ["reward", "reward_per_token", *OF_ROLLOUTS, *by_name]
        raise UserError(
            f"advantage filtered: by is {name!r}, which is neither a reward nor a quantity; "
            f"{suggest(name, known)}"
        )
    total = by_name.total().double()
    return total if name == "reward" else total / length(rollout).to(total.device).clamp(min=1)
