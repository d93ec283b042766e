"""Collects samples and chooses which groups are trained on.

Importing the room registers the stages, in the order in which they act: further samples of the same
prompts come first, then those of other prompts, then answers of earlier iterations.
"""

from mmrl.rollout import (
    adaptive_sampling,
    diversity,
    dynamic_sampling,
    ground_truth,
    length_limit,
    replay_buffer,
    response_reuse,
    self_instruct,
)

__all__ = [
    "adaptive_sampling",
    "diversity",
    "dynamic_sampling",
    "ground_truth",
    "length_limit",
    "replay_buffer",
    "response_reuse",
    "self_instruct",
]
