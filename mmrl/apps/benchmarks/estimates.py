"""Estimates totals with 95 % intervals by the rule of ``mmrl.core.statistics``, with prompts as the
independent units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mmrl.core.statistics import clustered

Groups = Sequence[Sequence[float]]  # values of the samples of each prompt


@dataclass(frozen=True)
class Total:
    """Holds a mean with its 95 % interval, its numbers of samples and prompts, and the method of
    the interval."""

    mean: float
    low: float
    high: float
    samples: int
    prompts: int
    interval: str


NOTHING = Total(math.nan, math.nan, math.nan, 0, 0, "none")


def total(groups: Groups) -> Total:
    """Estimate the mean over all samples, clustered by prompt. NaN is left out."""
    known = finite(groups)
    if not known:
        return NOTHING
    estimate = clustered(known)
    binary = {value for group in known for value in group} <= {0.0, 1.0}
    kind = "none" if math.isinf(estimate.low) else "Gaffke" if binary else "Student"
    samples = sum(map(len, known))
    return Total(estimate.mean, estimate.low, estimate.high, samples, len(known), kind)


def mean_of_categories(categories: Sequence[Groups]) -> Total:
    """Estimate the mean of several categories' means. Their intervals are combined by MOVER (Zou
    and Donner 2008): root of the sum of squares over their number."""
    parts = [part for part in map(total, categories) if part.samples]
    if not parts:
        return NOTHING
    mean = math.fsum(part.mean for part in parts) / len(parts)
    below = math.hypot(*(part.mean - part.low for part in parts)) / len(parts)
    above = math.hypot(*(part.high - part.mean for part in parts)) / len(parts)
    kind = "none" if math.isinf(below) else "MOVER"
    counts = (sum(part.samples for part in parts), sum(part.prompts for part in parts))
    return Total(mean, mean - below, mean + above, *counts, kind)


def finite(groups: Groups) -> list[list[float]]:
    known = [[float(value) for value in group if math.isfinite(value)] for group in groups]
    return [group for group in known if group]
