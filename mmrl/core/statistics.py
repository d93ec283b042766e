"""Estimates means and paired differences over prompts and seeds, and corrects for multiple
comparisons, for evaluations, reports and comparisons.

Scores are a table [S, P], seeds down and prompts across, each cell the mean over the samples of a
prompt. Both seeds and prompts are random effects: another run and another prompt would differ. The
table is y_sp = mean + seed_s + prompt_p + rest_sp (crossed random effects), and its mean has
variance

    var(seed) / S + var(prompt) / P + var(rest) / (S P),

which the mean squares of a two-way analysis of variance estimate without bias:
(M_seed + M_prompt - M_rest) / (S P), with Satterthwaite's degrees of freedom, not fewer than
those of the smaller of both (they fall to 1 where it is nearly 0). With few seeds that estimate
can be far too small by chance. So three Student's t intervals are computed, by this estimate, by
M_seed / (S P) and by M_prompt / (S P), for seeds or prompts alone, and the widest counts: in
simulations it covers at least 94 % whichever of them varies, while the first alone covers as little
as 87 %.

A variance that few prompts do not show is not assumed to be 0. Scores of 0 and 1, whose variance is
unknown if all are equal, get the interval of Gaffke (2005; Learned-Miller and Thomas 2019, "A new
confidence interval for the mean of a bounded random variable") over prompts: randomly weighted
means of the scores and one more, at its lower or upper bound. For one sample per prompt that is the
Clopper-Pearson interval, and the p-value of a difference that of the exact sign test. Other scores
whose differences are all equal get the sum of the two means' intervals, as if none of their
variance cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
LEVEL = 0.95
DRAWS = 20_000  # of the random weights
NOTHING = 1e-12  # relative spread that is only rounding


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


@dataclass(frozen=True)
class Student:
    """Holds the widest of several intervals by Student's t, of these standard errors and degrees of
    freedom; empty: nothing varies."""

    errors: tuple[tuple[float, float], ...] = ()

    def half(self) -> tuple[float, float]:
        """Return its half-width and degrees of freedom; 0 if nothing varies."""
        return max(((_quantile(f) * error, f) for error, f in self.errors), default=(0.0, 0.0))

    def p(self, mean: float) -> float:
        """Return the largest p-value of "it is zero"."""
        from scipy.special import stdtr  # scipy.stats takes a second to import

        return max((2 * float(stdtr(f, -abs(mean) / e)) for e, f in self.errors), default=1.0)


def _quantile(freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def interval(table: Table, binary: bool | None = None) -> Interval:
    """Estimate the mean of a table [S, P] over seeds and prompts; prompts with a NaN are left out.
    With one seed it holds for that seed only, with one prompt for that prompt; a single cell has no
    interval. ``binary``: the underlying scores are 0 or 1; None: inferred from the table."""
    table = table[:, np.isfinite(table).all(0)]
    return _of(table, (0.0, 1.0) if is_binary(table, binary) else None)


def paired(first: Table, second: Table, binary: bool | None = None) -> Interval:
    """Estimate the mean of ``second - first``, paired by seed and prompt. Prompts with a NaN in
    either are left out. ``binary``: as in ``interval``."""
    whole = np.isfinite(first + second).all(0)
    first = first[:, whole]
    second = second[:, whole]
    difference = second - first
    if is_binary(np.stack([first, second]), binary):
        return _of(difference, (-1.0, 1.0))
    if difference.size > 1 and not _student(difference, max_of(first, second)).errors:
        halves = [_student(table).half() for table in (first, second)]
        half, freedom = sum(half for half, _ in halves), halves[0][1]
        error = ((half / _quantile(freedom), freedom),) if half else ()
        return _by_student(difference, Student(error))
    return _of(difference)


def clustered(groups: Sequence[Sequence[float]], binary: bool | None = None) -> Interval:
    """Estimate the mean of all values of groups, such as the samples of prompts; the groups are the
    independent units. ``binary``: the values lie in 0..1; None: inferred.

    If groups differ in size, Student's t uses each one's contribution to the mean (the linearised
    ratio of sums, Cochran 1977).
    """
    sizes = np.array([len(group) for group in groups], dtype=np.float64)
    sums = np.array([np.sum(group) for group in groups], dtype=np.float64)
    mean = float(sums.sum() / sizes.sum())
    bits = is_binary(np.concatenate([np.asarray(group) for group in groups]), binary)
    shares = sums / sizes
    if not bits:
        shares = mean + (sums - mean * sizes) / sizes.mean()
    estimate = interval(shares[None], bits)
    low, high = min(estimate.low, mean), max(estimate.high, mean)
    return replace(estimate, mean=mean, low=low, high=high)


def is_binary(table: Table, said: bool | None) -> bool:
    """Tell whether scores are 0 or 1: as given, else inferred from the table."""
    return bool(np.isin(table, (0.0, 1.0)).all()) if said is None else said


def max_of(*tables: Table) -> float:
    return max((float(np.abs(table).max(initial=0.0)) for table in tables), default=0.0)


def _of(table: Table, bounds: tuple[float, float] | None = None) -> Interval:
    """Estimate the mean of a table without NaN; ``bounds``: of its cells, if they come from scores
    of 0 and 1."""
    seeds, prompts = table.shape
    if not table.size:
        return Interval(np.nan, -np.inf, np.inf, 1.0, 0.0, seeds, 0)
    by_student = _by_student(table, _student(table))
    if bounds is None or prompts == 1:
        return by_student
    low, high, p = bounded(table.mean(0), *bounds)
    if seeds > 1 and np.isfinite(by_student.low):  # seeds vary too
        low, high, p = min(low, by_student.low), max(high, by_student.high), max(p, by_student.p)
    return Interval(float(table.mean()), low, high, p, prompts - 1.0, seeds, prompts)


def _student(table: Table, scale: float = 0.0) -> Student:
    """Compute the standard errors of a table; ``scale``: of the underlying scores."""
    least = NOTHING * max(max_of(table), scale)
    errors = [(float(np.sqrt(variance)), freedom) for variance, freedom in spread(table)]
    return Student(tuple((error, freedom) for error, freedom in errors if error > least))


def _by_student(table: Table, width: Student) -> Interval:
    seeds, prompts = table.shape
    mean = float(table.mean())
    half, freedom = width.half()
    if not half:  # the variance of others is unknown
        return Interval(mean, -np.inf, np.inf, 1.0, 0.0, seeds, prompts)
    return Interval(mean, mean - half, mean + half, width.p(mean), freedom, seeds, prompts)


def bounded(values: Table, least: float, most: float) -> tuple[float, float, float]:
    """Return Gaffke's interval of the mean of the distribution of ``values`` [P] in [``least``,
    ``most``], and the p-value of "it is zero"."""
    atoms, counts = np.unique(values, return_counts=True)
    weight = np.random.default_rng(17).standard_gamma([*counts, 1], (DRAWS, len(atoms) + 1))
    weight /= weight.sum(1, keepdims=True)
    below, above = (weight @ np.append(atoms, bound) for bound in (least, most))
    tails = (int((below <= 0).sum()), int((above >= 0).sum()))
    p = min(1.0, 2 * (min(tails) + 1) / (DRAWS + 1))
    share = (1 - LEVEL) / 2
    return float(np.quantile(below, share)), float(np.quantile(above, 1 - share)), p


def spread(table: Table) -> list[tuple[float, float]]:
    """Estimate the variance of the mean of a table [S, P], with its degrees of freedom: by seeds,
    by prompts, by both as crossed effects. None for a single cell."""
    seeds, prompts = table.shape
    centred = table - table.mean()
    by_seed = centred.mean(1)
    by_prompt = centred.mean(0)
    rest = centred - by_seed[:, None] - by_prompt
    freedoms = (seeds - 1, prompts - 1, (seeds - 1) * (prompts - 1))
    squares = [
        float(total) / max(freedom, 1)
        for total, freedom in zip(
            (prompts * (by_seed**2).sum(), seeds * (by_prompt**2).sum(), (rest**2).sum()),
            freedoms,
            strict=True,
        )
    ]
    cells = seeds * prompts
    alone = zip(squares[:2], freedoms[:2], strict=True)
    estimates = [(m / cells, float(f)) for m, f in alone if f]
    crossed = squares[0] + squares[1] - squares[2]
    if freedoms[2] and crossed > 0:
        summed = sum(m**2 / f for m, f in zip(squares, freedoms, strict=True))
        estimates.append((crossed / cells, max(crossed**2 / summed, float(min(freedoms[:2])))))
    return estimates


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple tests (Holm 1979): the i-th smallest of m times m - i + 1, never
    less than those before it, at most 1."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
