"""The gate of an iteration's first step: how far re-scored log-probs may lie from the recorded
ones.

On that step the weights are those that sampled, so the two differ by rounding alone, and whatever
is more than rounding biases the gradient. The ratio of fresh points cannot show it: it is 1 by
definition (``Point.old``).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mmrl.config.options import TrainOptions

# Gaussian decisions: sampler and score are one function, and published clips go down to 2e-6
EXACT = 1e-6
# token log-probs, of a cached decoder against one pass; in half precision or not
TOKENS = {False: 1e-4, True: 2e-2}


def tolerance(options: TrainOptions, policy: Any, objective: Any) -> float | None:
    """The largest gap that ``train.logprob_tolerance`` lets through, in nats; None: none is looked
    at.

    "auto" is, for Gaussian decisions, what the clip of the ratio can bear, in every precision; for
    tokens a rounding error of their precision, which guidance multiplies.
    """
    if options.logprob_tolerance != "auto":
        return options.logprob_tolerance
    if policy.decisions == "gaussian":
        summed = math.prod(policy.shape) if policy.logprob_reduction == "sum" else 1
        return min(EXACT * summed, min(objective.clip_bounds) / 10)
    return TOKENS[rounded(options, policy)] * amplified(policy)


def on_average(options: TrainOptions, policy: Any) -> bool:
    """Whether the mean gap is compared and not the largest: in half precision single unlikely
    tokens are far off."""
    return policy.decisions == "categorical" and rounded(options, policy)


def rounded(options: TrainOptions, policy: Any) -> bool:
    """Whether passes compute in half precision, or read weights that are stored in it."""
    return options.precision != "fp32" or halved(policy)


def rescores(options: TrainOptions, policy: Any, steps: int) -> bool:
    """Whether ``train.recompute_old_logprob`` scores rollouts of so many optimizer ``steps`` once
    more.

    "auto": where tokens were sampled with a cache and are scored in one pass, in half precision,
    and a step after the first would take the difference of the two roundings for a ratio. Gaussian
    decisions have none.
    """
    if options.recompute_old_logprob != "auto":
        return options.recompute_old_logprob
    cached = policy.decisions == "categorical" and getattr(policy, "one_pass", True)
    return cached and steps > 1 and rounded(options, policy)


def halved(policy: Any) -> bool:
    """Whether weights are stored in half precision."""
    return any(
        p.dtype in (torch.bfloat16, torch.float16) for p in policy.weights.module.parameters()
    )


def amplified(policy: Any) -> float:
    """By how much guidance enlarges the rounding error of logits: s z_c + (1 - s) z_u, two
    independent errors."""
    scale = getattr(policy, "guidance_scale", 1.0)
    if scale == 1 or getattr(policy, "logprob_guidance", "guided") == "conditional":
        return 1.0
    return math.hypot(scale, 1 - scale)
