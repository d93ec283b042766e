"""Registers the monitors, functions that turn an iteration's samples into metrics.

A monitor is called with an iteration's samples, before training on them, on all processes. The
trainer calls the registered ones in order, then those of the run (gallery, alarms).
"""

from __future__ import annotations

import mmrl.advantages as advantages
from mmrl.core.registry import MONITORS
from mmrl.monitoring import completion_stats
from mmrl.monitoring.appearance import appearance
from mmrl.monitoring.diversity import portrait
from mmrl.rollout.collect import Sampled


@MONITORS.register("reward_statistics")
def reward_statistics(sampled: Sampled) -> dict[str, float]:
    """Measure means and spreads of the rewards, flat groups, samples without a reward."""
    rollout, rewards = sampled.everything
    return advantages.statistics(rewards, rollout)


@MONITORS.register("completion_lengths")
def completion_lengths(sampled: Sampled) -> dict[str, float]:
    """Measure the tokens of answers, of all and by reward, and the share truncated at the limit."""
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
