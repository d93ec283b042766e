"""Registers the monitors, functions that turn an iteration's samples into metrics.

A monitor is called with what an iteration sampled, before it is trained on, on all processes alike.
The trainer calls the registered ones in order, then those that the run has added (gallery, alarms).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mmrl.advantages as advantages
from mmrl.core.registry import MONITORS
from mmrl.core.types import Media, Rewards, Rollout
from mmrl.monitoring import completion_stats
from mmrl.monitoring.appearance import appearance
from mmrl.monitoring.diversity import portrait


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


@MONITORS.register("reward_statistics")
def reward_statistics(sampled: Sampled) -> dict[str, float]:
    """Measure means and spreads of the rewards, flat groups, samples without a reward."""
    rollout, rewards = sampled.everything
    return advantages.statistics(rewards, rollout)


@MONITORS.register("completion_lengths")
def completion_lengths(sampled: Sampled) -> dict[str, float]:
    """Measure the tokens of answers, of all and by reward, and the share cut off at the limit."""
    lengths = completion_stats.lengths(sampled.media, sampled.rollout)
    return lengths | completion_stats.lengths_by_reward(
        sampled.media, sampled.rollout, sampled.rewards
    )


@MONITORS.register("diversity")
def diversity(sampled: Sampled) -> dict[str, float]:
    """Measure the distance of samples of one prompt, saturation and contrast of pictures."""
    return portrait(sampled.media, sampled.rollout.group)


@MONITORS.register("appearance")
def looks(sampled: Sampled) -> dict[str, float]:
    """Measure dark pixels, colour, edges and the entropy of colours of pictures and videos."""
    return appearance(sampled.media, sampled.rollout.group.device)
