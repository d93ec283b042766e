"""Collects samples and chooses which groups are trained on.

Importing the room registers the stages, in the order in which they act: dynamic sampling comes
before the replay buffer.
"""

from mmrl.rollout import dynamic_sampling, ground_truth, length_limit, replay_buffer

__all__ = ["dynamic_sampling", "ground_truth", "length_limit", "replay_buffer"]
