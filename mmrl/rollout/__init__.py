"""Collects samples and chooses which groups are trained on.

These modules register the stages, in the order in which they act: further samples of the same
prompts come first, then those of other prompts, then answers of earlier iterations, last those that
somebody else wrote.
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
