"""Measures a policy on held-out prompts: mean reward with a confidence interval, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.config.options import EvaluateOptions
from mmrl.core import distributed
from mmrl.core.types import Media, Prompt, Rewards
from mmrl.policies.base import Policy, RolloutContext
from mmrl.run.set_metrics import mean_ap
from mmrl.scoring import Scorer
from samplers.noise import Rng

Z95 = 1.959964  # two-sided 95 % quantile of the normal distribution


@dataclass(frozen=True)
class Estimate:
    """Holds a mean over ``n`` samples and its 95 % confidence interval; the prompts are the
    independent units."""

    mean: float
    low: float
    high: float
    n: int


@torch.no_grad()
def sample(
    policy: Policy, prompts: Sequence[Prompt], copies: int, seed: int, guidance: float | None = None
) -> tuple[Media, list[Prompt]]:
    """Sample this process's share, with the noise that ``seed`` names: the same before and after
    training.

    Every process samples equally many, as sharded models need; what fills up the last ones is
    thrown away.
    """
    rank, size = distributed.world()
    share = -(-len(prompts) // size)
    first = rank * share
    local_prompts = list(prompts[first : first + share])
    rows = len(local_prompts) * copies
    with policy.evaluating(guidance):
        rng = Rng(Rng.of(seed, "evaluation").key, first)
        padded = [*local_prompts, *[prompts[0]] * (share - len(local_prompts))]
        # these are not trained on
        rollout = policy.rollout(padded, copies, rng, RolloutContext(reads="sample"))
        return policy.decode(rollout)[:rows], rollout.prompt_per_row()[:rows]


def evaluate(
    policy: Policy,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    options: EvaluateOptions,
    guidance: float | None = None,
) -> dict[str, Estimate]:
    """Estimate every reward under the current weights; a collective call.

    Of answers with boxes also mAP, on one process: a number of the whole set, so its interval is
    unbounded.
    """
    chosen = list(prompts[: options.prompts])
    media, row_prompts = sample(policy, chosen, options.num_samples, options.seed, guidance)
    with distributed.together():
        rewards: Rewards = scorer(media, row_prompts)
    whole = {name: distributed.all_gather_rows(value) for name, value in rewards.per_row().items()}
    estimates = {
        name: estimate(value.view(-1, options.num_samples)) for name, value in whole.items()
    }
    if (
        isinstance(media, list)
        and all(isinstance(answer, str) for answer in media)
        and distributed.world()[1] == 1
    ):
        infinite = float("inf")
        estimates |= {
            k: Estimate(v, -infinite, infinite, len(media))
            for k, v in mean_ap(media, row_prompts).items()
        }
    return estimates


def estimate(values: Tensor) -> Estimate:
    """Estimate a mean from rewards [P, copies], NaN where a sample could not be scored. Prompts are
    clusters: their means vary."""
    present = ~values.isnan()
    means = values.double().nanmean(1)[present.any(1)]  # [P']
    if not len(means):
        return Estimate(float("nan"), float("nan"), float("nan"), 0)
    mean = float(means.mean())
    spread = float(means.std() / len(means) ** 0.5) if len(means) > 1 else float("inf")
    return Estimate(mean, mean - Z95 * spread, mean + Z95 * spread, int(present.sum()))


def row(model: str, guidance: float | None, estimates: dict[str, Estimate]) -> dict[str, Any]:
    """Make one line of ``evaluation.json``."""
    return {
        "model": model,
        "guidance": guidance,
        "rewards": {name: asdict(e) for name, e in estimates.items()},
    }
