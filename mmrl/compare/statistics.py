"""Estimates paired differences over prompts and seeds, and corrects for several comparisons.

Scores are a table [S, P], seeds down and prompts across, each cell the mean over the samples of a
prompt. Both seeds and prompts are drawn from many: another run and another prompt would differ. The
table is y_sp = mean + seed_s + prompt_p + rest_sp (crossed random effects), and its mean varies by

    var(seed) / S + var(prompt) / P + var(rest) / (S P),

which the mean squares of a two-way analysis of variance estimate without bias:
(M_seed + M_prompt - M_rest) / (S P). Never less is taken than M_seed / (S P) or M_prompt / (S P),
what seeds or prompts alone would give: with few seeds an estimate can be too small by chance.
The interval is Student's t, its degrees of freedom Satterthwaite's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Table = NDArray[np.float64]
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """Holds a mean over seeds and prompts with its 95 % confidence interval, and the two-sided
    p-value of "it is zero"."""

    mean: float
    low: float
    high: float
    p: float
    freedom: float  # degrees of freedom
    seeds: int
    prompts: int


def interval(table: Table) -> Interval:
    """Estimate the mean of a table [S, P] over seeds and prompts. With one seed it holds for that
    seed only, with one prompt for that prompt; of a single cell nothing is known."""
    seeds, prompts = table.shape
    mean = float(table.mean())
    variance, freedom = spread(table)
    if not freedom:
        return Interval(mean, -np.inf, np.inf, 1.0, 0.0, seeds, prompts)
    error = float(np.sqrt(variance))
    if not error and mean:  # equal differences in every cell: how much others vary is not seen
        return Interval(mean, -np.inf, np.inf, 1.0, 0.0, seeds, prompts)
    half = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, freedom)) if error else 1.0
    return Interval(mean, mean - half, mean + half, p, freedom, seeds, prompts)


def spread(table: Table) -> tuple[float, float]:
    """Estimate the variance of the mean of a table [S, P] and its degrees of freedom; 0 of them
    where nothing varies that could be measured."""
    seeds, prompts = table.shape
    centred = table - table.mean()
    by_seed = centred.mean(1)
    by_prompt = centred.mean(0)
    rest = centred - by_seed[:, None] - by_prompt
    cells = seeds * prompts
    squares = (
        prompts * float((by_seed**2).sum()) / max(seeds - 1, 1),
        seeds * float((by_prompt**2).sum()) / max(prompts - 1, 1),
        float((rest**2).sum()) / max((seeds - 1) * (prompts - 1), 1),
    )
    freedoms = (seeds - 1, prompts - 1, (seeds - 1) * (prompts - 1))
    if seeds == 1 or prompts == 1:
        return (max(squares[:2]) / cells, float(max(freedoms[:2])))
    crossed = squares[0] + squares[1] - squares[2]
    summed = sum(m**2 / f for m, f in zip(squares, freedoms, strict=True))
    candidates = [(m, float(f)) for m, f in zip(squares[:2], freedoms[:2], strict=True)]
    if summed:
        candidates.append((crossed, crossed**2 / summed))
    largest, freedom = max(candidates)
    return largest / cells, max(freedom, 1.0)


def paired(first: Table, second: Table) -> Interval:
    """Estimate the mean of ``second - first``, paired by seed and prompt. Prompts with a NaN in
    either are left out."""
    difference = second - first
    whole = difference[:, np.isfinite(difference).all(0)]
    if not whole.size:
        return Interval(np.nan, -np.inf, np.inf, 1.0, 0.0, len(difference), 0)
    return interval(whole)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for being several (Holm 1979): in order of size, the i-th smallest of m times
    m - i + 1, never less than those before it, at most 1."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
