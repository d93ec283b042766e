"""Predicts a run's outcome from its mixture of data, and proposes the best mixture (MoDoMoDo).

``mmrl.apps.prepare.mixture`` calls this with evaluated runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mmrl.core.errors import UserError
from samplers.noise import Rng

Array = NDArray[np.float64]
Form = Literal["quadratic", "linear"]
RIDGES = tuple(10.0**power for power in range(-8, 1))
STARTS = 32  # random starts of the search, besides the corners and the middle


@dataclass(frozen=True)
class Surrogate:
    """Predicts the outcome of mixtures: score(w) = w' Q w, on weights w of sum 1.

    On these weights a + b'w + w'Cw, MoDoMoDo's surrogate, is one quadratic form (1 = (sum w)^2), so
    Q contains all of it; linear is b'w, with a absorbed. ``error``: the leave-one-out root mean
    squared error. ``spread``: standard deviation of the outcomes, the error of predicting their
    mean.
    """

    form: Form
    weights: Array  # of the features
    ridge: float
    error: float
    spread: float

    def predict(self, mixtures: Array) -> Array:
        """Predict the outcomes [N] of mixtures [N, m], each of sum 1."""
        predicted: Array = features(mixtures, self.form) @ self.weights
        return predicted


def features(mixtures: Array, form: Form) -> Array:
    """Return w_i [N, m], or w_i w_j for i <= j [N, m (m + 1) / 2]."""
    if form == "linear":
        return mixtures
    first, second = np.triu_indices(mixtures.shape[1])
    return mixtures[:, first] * mixtures[:, second]


def shares(weights: Array) -> Array:
    """Return weights [N, m] as shares of sum 1."""
    totals = weights.sum(1, keepdims=True)
    if not np.isfinite(weights).all() or (weights < 0).any() or (totals <= 0).any():
        raise UserError("weights of a mixture are 0 or more, and one of them is above 0")
    normalised: Array = weights / totals
    return normalised


def fit(mixtures: Array, outcomes: Array, form: Form = "quadratic") -> Surrogate:
    """Fit a surrogate by ridge regression, with the ridge chosen by leave-one-out error.

    mixtures [N, m], outcomes [N]. The outcomes' mean is not shrunk. Raises UserError for fewer than
    three mixtures, or no two that differ.
    """
    mixtures = shares(mixtures)
    if len(mixtures) < 3 or (mixtures == mixtures[0]).all():
        raise UserError(
            f"the outcome of a mixture is predicted from at least three runs of different "
            f"mixtures, got {len(mixtures)}; train with other data.mixture.weights"
        )
    table = features(mixtures, form)
    size = mixtures.shape[1]
    first, second = np.triu_indices(size)
    unit = np.ones(size) if form == "linear" else np.where(first == second, 1.0, 2.0)  # (sum w)^2
    errors = [_left_out(table, outcomes, unit, ridge) for ridge in RIDGES]
    best = int(np.argmin(errors))
    weights = _solved(table, outcomes, unit, RIDGES[best])
    return Surrogate(form, weights, RIDGES[best], errors[best], float(outcomes.std()))


def _solved(table: Array, outcomes: Array, unit: Array, ridge: float) -> Array:
    """Fit the distance from the outcomes' mean; ``unit`` are the weights that predict 1."""
    middle = outcomes.mean()
    matrix = table.T @ table + ridge * len(table) * np.eye(table.shape[1])
    weights: Array = np.linalg.solve(matrix, table.T @ (outcomes - middle)) + middle * unit
    return weights


def _left_out(table: Array, outcomes: Array, unit: Array, ridge: float) -> float:
    """Return the leave-one-out root mean squared error."""
    rows = np.arange(len(table))
    fits = [_solved(table[rows != row], outcomes[rows != row], unit, ridge) for row in rows]
    missed = [outcomes[row] - table[row] @ weights for row, weights in zip(rows, fits)]
    return float(np.sqrt(np.mean(np.square(missed))))


def best_mixture(surrogate: Surrogate, count: int, least: float = 0.0) -> Array:
    """Return the weights [count], sum 1, each at least ``least``, of the highest prediction.

    Runs SLSQP from the corners, the middle and uniformly random mixtures, as there may be several
    maxima.
    """
    if least * count > 1:
        raise UserError(f"{count} sources cannot have a share of at least {least:g} each")
    from scipy.optimize import minimize

    drawn = -np.log(Rng.of("mixtures").uniform(Rng.of(0).rows(STARTS, 1), (count,)).numpy())
    starts = np.concatenate([np.eye(count), np.ones((1, count)), drawn])
    free = 1 - least * count
    candidates = [least + free * start / start.sum() for start in starts]
    for start in list(candidates):
        solution = minimize(
            lambda w: -surrogate.predict(w[None])[0],
            start,
            method="SLSQP",
            bounds=[(least, 1.0)] * count,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        )
        inside = np.clip(solution.x, least, 1.0)
        candidates.append(least + free * (inside - least) / max((inside - least).sum(), 1e-12))
    values = surrogate.predict(np.array(candidates))
    best: Array = candidates[int(np.argmax(values))]
    return best
