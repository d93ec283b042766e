"""Checks, on an iteration's first step, how far re-scored log-probs lie from the recorded ones.

On that step the current weights are the sampling weights, so the two differ by rounding alone, and
any larger difference biases the gradient. The ratio of fresh points cannot show it: it is 1 by
definition (``Point.old``).
"""

from __future__ import annotations

import math

import torch

from mmrl.config.options import TrainOptions
from mmrl.core import distributed
from mmrl.core.metrics import Meter
from mmrl.objectives.base import Objective
from mmrl.policies.base import Policy
from mmrl.policies.contracts import FollowsProcess, Guided

# Gaussian decisions: sampler and score are one function, and published clips go down to 2e-6
EXACT = 1e-6
# token log-probs, of a cached decoder against one pass; in half precision or not. In bf16
# SmolLM2-135M is 0.043 off on average, of which half is its logits' rounding (docs/results/real.md)
TOKENS = {False: 1e-4, True: 6e-2}


def check(
    options: TrainOptions, policy: Policy, objective: Objective, observed: Meter, iteration: int
) -> None:
    """Stop a run whose re-scored log-probs are further from the recorded ones than
    ``train.logprob_tolerance`` allows; a collective call.

    ``observed`` has the ``log_ratio`` of the first step, or of the re-scoring.
    """
    average = on_average(options, policy)
    allowed = tolerance(options, policy, objective)
    gap = observed.size("log_ratio") if average else observed.top("log_ratio")
    if allowed is None or gap <= allowed:
        return
    raise distributed.StopAll(
        f"iteration {iteration}: re-scored log-probs differ from the recorded ones by {gap:.2e} "
        f"{'on average' if average else 'at most'}, more than train.logprob_tolerance = "
        f"{allowed:.0e} allows, although the weights are the same. The gradient would be biased. "
        "Usual causes: dropout or other randomness in the network, a rollout computed in another "
        "precision or attention backend than the update, latents stored more coarsely than scored. "
        "Try train.precision=fp32; set train.logprob_tolerance to a larger number to accept the "
        "gap, or to null to ignore it"
    )


def tolerance(options: TrainOptions, policy: Policy, objective: Objective) -> float | None:
    """Return the largest gap that ``train.logprob_tolerance`` allows, in nats; None turns the check
    off.

    "auto": for Gaussian decisions, what the clip of the ratio tolerates, in every precision; for
    tokens, a rounding error of their precision, which guidance amplifies.
    """
    if options.logprob_tolerance != "auto":
        return options.logprob_tolerance
    if policy.capabilities.decisions == "gaussian":
        dimensions = policy.summed_dimensions if isinstance(policy, FollowsProcess) else 1
        return min(EXACT * dimensions, min(objective.clip_bounds) / 10)
    return TOKENS[rounded(options, policy)] * amplified(policy)


def on_average(options: TrainOptions, policy: Policy) -> bool:
    """Tell whether the mean gap is compared, not the largest: in half precision single unlikely
    tokens are far off."""
    return policy.capabilities.decisions == "categorical" and rounded(options, policy)


def rounded(options: TrainOptions, policy: Policy) -> bool:
    """Tell whether passes compute in half precision, or read weights that are stored in it."""
    return options.precision != "fp32" or halved(policy)


def rescores(options: TrainOptions, policy: Policy, steps: int) -> bool:
    """Tell whether ``train.recompute_old_logprob`` scores rollouts again before an update of
    ``steps`` optimizer steps.

    "auto": if tokens were sampled with a KV cache and are scored in one pass, in half precision,
    and later steps would mistake the difference in rounding for a ratio. Gaussian decisions have
    none.
    """
    if options.recompute_old_logprob != "auto":
        return options.recompute_old_logprob
    cached = policy.capabilities.decisions == "categorical" and policy.capabilities.one_pass
    return cached and steps > 1 and rounded(options, policy)


def halved(policy: Policy) -> bool:
    """Tell whether weights are stored in half precision."""
    return any(
        p.dtype in (torch.bfloat16, torch.float16) for p in policy.weights.module.parameters()
    )


def amplified(policy: Policy) -> float:
    """Return the factor by which guidance amplifies the rounding error of logits: s z_c + (1 - s)
    z_u, two independent errors."""
    if not isinstance(policy, Guided) or policy.logprob_guidance == "conditional":
        return 1.0
    return math.hypot(policy.guidance_scale, 1 - policy.guidance_scale)
