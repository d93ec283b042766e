"""Collects samples and chooses which groups are trained on.

Importing the room registers the stages, in the order in which they act: further samples of the same
prompts come first, then those of other prompts, then answers of earlier iterations, last those that
somebody else wrote.
"""

from mmrl.rollout import (
    adaptive_sampling,
    adaptive_temperature,
    diversity,
    dynamic_sampling,
    ground_truth,
    length_limit,
    partial_rollout,
    refinement,
    replay_buffer,
    response_reuse,
    self_instruct,
    speculative,
    temporal_contrast,
    values,
    visits,
    written_answers,
)

__all__ = [
    "adaptive_sampling",
    "adaptive_temperature",
    "diversity",
    "dynamic_sampling",
    "ground_truth",
    "length_limit",
    "refinement",
    "replay_buffer",
    "response_reuse",
    "self_instruct",
    "partial_rollout",
    "speculative",
    "temporal_contrast",
    "values",
    "visits",
    "written_answers",
]
