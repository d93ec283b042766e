"""Stages choose, change or add rows of an iteration.

These modules register them in the order in which they act: first more samples of the same prompts,
then samples of other prompts, then answers of earlier iterations, last demonstrations.
"""

MODULES = (
    "adaptive_sampling",
    "adaptive_temperature",
    "diversity",
    "dynamic_sampling",
    "ground_truth",
    "length_limit",
    "partial_rollout",
    "refinement",
    "replay_buffer",
    "response_reuse",
    "self_instruct",
    "speculative",
    "temporal_contrast",
    "values",
    "visits",
    "written_answers",
)
