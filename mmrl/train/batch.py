"""Defines the record of what an iteration collected."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.core.types import Rewards, Rollout


@dataclass(frozen=True)
class Batch:
    """Holds what an iteration collected, ready to be trained on."""

    iteration: int  # from 0
    rollout: Rollout  # with advantages; what is not trained on is masked
    rewards: Rewards  # of its rows, as compared
    # all rows that the policy sampled, also replaced ones, and their rewards
    sampled: tuple[Rollout, Rewards]
    group_sizes: tuple[int, ...]  # rows of each prompt of the iteration, on all processes
    idle_row: Rollout  # [1] what a process without rows passes through the network
    longest: int  # decisions of the longest row on any process
    pass_rows: int | None  # rows of the passes that sampled
    metrics: dict[str, float]  # of stages and monitors
