"""Estimates totals with 95 % intervals: Wilson's for shares, a bootstrap over prompts otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959964  # two-sided 95 % quantile of the normal distribution
DRAWS = 2_000  # of the bootstrap
Groups = Sequence[Sequence[float]]  # values of the samples of each prompt


@dataclass(frozen=True)
class Total:
    """Holds a mean with its 95 % interval, how many samples and prompts it is over, and how the
    interval was made."""

    mean: float
    low: float
    high: float
    samples: int
    prompts: int
    interval: str


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Return Wilson's interval of a share seen in ``count`` independent trials (Wilson 1927)."""
    square = Z95**2
    middle = (mean + square / (2 * count)) / (1 + square / count)
    half = math.sqrt(mean * (1 - mean) / count + square / (4 * count**2)) * Z95
    half /= 1 + square / count
    # 0 of n and n of n touch the border, which rounding would miss
    return (
        0.0 if mean == 0 else max(middle - half, 0.0),
        1.0 if mean == 1 else min(middle + half, 1.0),
    )


def total(groups: Groups) -> Total:
    """Estimate the mean over all samples; those of one prompt vary together, so that prompts are
    the independent units. NaN is left out.

    Shares with one sample a prompt have Wilson's interval, and so has what is 0 or 1 throughout,
    counted in prompts, of which a bootstrap would say that it cannot vary.
    """
    known = finite(groups)
    values = [value for group in known for value in group]
    if not values:
        return Total(math.nan, math.nan, math.nan, 0, 0, "none")
    mean = math.fsum(values) / len(values)
    share = set(values) <= {0.0, 1.0}
    if share and (len(values) == len(known) or len(set(values)) == 1):
        return Total(mean, *wilson(mean, len(known)), len(values), len(known), "Wilson")
    if len(known) == 1:
        return Total(mean, -math.inf, math.inf, len(values), 1, "none")
    low, high = np.quantile(resampled(known), [0.025, 0.975])
    return Total(mean, float(low), float(high), len(values), len(known), "bootstrap")


def mean_of_categories(categories: Sequence[Groups]) -> Total:
    """Estimate the mean of several categories' means, by a bootstrap over the prompts of each."""
    known = [finite(groups) for groups in categories]
    known = [groups for groups in known if groups]
    samples = sum(len(group) for groups in known for group in groups)
    prompts = sum(map(len, known))
    if not known:
        return Total(math.nan, math.nan, math.nan, 0, 0, "none")
    means = [np.mean([value for group in groups for value in group]) for groups in known]
    mean = float(np.mean(means))
    values = {value for groups in known for group in groups for value in group}
    if len(values) == 1 and mean in (0.0, 1.0):
        return Total(mean, *wilson(mean, prompts), samples, prompts, "Wilson")
    draws = np.mean([resampled(groups, part) for part, groups in enumerate(known)], axis=0)
    low, high = np.quantile(draws, [0.025, 0.975])
    return Total(mean, float(low), float(high), samples, prompts, "bootstrap")


def finite(groups: Groups) -> list[list[float]]:
    known = [[float(value) for value in group if math.isfinite(value)] for group in groups]
    return [group for group in known if group]


def resampled(groups: Groups, stream: int = 0) -> NDArray[np.float64]:
    """Return means [DRAWS] of prompts drawn with replacement; the same for the same groups."""
    sums = np.array([math.fsum(group) for group in groups])
    counts = np.array([len(group) for group in groups], dtype=np.float64)
    chance = np.random.default_rng([17, stream])
    means = np.empty(DRAWS)
    for start in range(0, DRAWS, 100):  # bounded memory whatever the number of prompts
        rows = chance.integers(0, len(groups), (100, len(groups)))
        means[start : start + 100] = sums[rows].sum(1) / counts[rows].sum(1)
    return means
