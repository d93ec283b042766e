"""Defines what monitors see of an iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mmrl.core.types import Media, Rewards, Rollout


@dataclass(frozen=True)
class Sampled:
    """Holds what the policy sampled itself in an iteration: no ground-truth or replayed answers."""

    iteration: int  # from 0
    media: Media
    rollout: Rollout  # with the masks and advantages that are trained on
    rewards: Rewards  # as the rewards gave them
    shaped: Rewards  # as they were compared
    # with the groups that were replaced; shaped where none was
    everything: tuple[Rollout, Rewards]
    metrics: Mapping[str, float]  # of the stages and the monitors before


Monitor = Callable[[Sampled], dict[str, float]]
