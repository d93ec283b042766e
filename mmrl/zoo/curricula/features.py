"""Features of prompts, for data sources that compare them or predict their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt

Array = NDArray[np.float64]


def features_of(prompts: Sequence[Prompt], path: Path | None, size: int, name: str) -> Array:
    """Return a unit vector for every prompt: from the file, or of its hashed words, [n, D]."""
    if path is None:
        from sklearn.feature_extraction.text import HashingVectorizer

        hashing = HashingVectorizer(n_features=1024, alternate_sign=False)
        words: Array = hashing.transform([str(p.get("text", "")) for p in prompts]).toarray()
        return words
    table = np.load(path, mmap_mode="r", allow_pickle=False)
    if table.ndim != 2 or len(table) != size:
        raise UserError(
            f"{name}.embeddings: {path} has the shape {list(table.shape)}; it needs a row for each "
            f"of the {size} prompts"
        )
    rows = np.asarray(table[[prompt["entry"] for prompt in prompts]], dtype=np.float64)
    scaled: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return scaled


class ValueModel:
    """Predicts the mean reward of a prompt, linearly in its features and a constant.

    ``learn`` takes the exact proximal step min_w sum (x'w - r)^2 + ridge |w - w_old|^2 over all
    prompts of an iteration at once, so their order does not matter. The weights start at 0, so
    every prediction is ``start`` before the first step.
    """

    def __init__(self, ridge: float, start: float):
        self.ridge = ridge
        self.start = start
        self.weights: Array | None = None

    def predict(self, features: Array) -> Array:
        """Predict the rewards [n] of prompts with features [n, D]."""
        if self.weights is None:
            return np.full(len(features), self.start)
        predicted: Array = self.start + with_constant(features) @ self.weights
        return predicted

    def learn(self, features: Array, rewards: Array) -> None:
        """Take in the mean rewards [n] of prompts."""
        if not len(rewards):
            return
        x = with_constant(features)
        gaps = rewards - self.predict(features)
        step = x.T @ np.linalg.solve(x @ x.T + self.ridge * np.eye(len(x)), gaps)
        self.weights = step if self.weights is None else self.weights + step

    def state_dict(self) -> dict[str, Any]:
        return {"weights": None if self.weights is None else self.weights.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        weights = state.get("weights")
        self.weights = None if weights is None else np.array(weights, dtype=np.float64)


def with_constant(features: Array) -> Array:
    """Append a constant feature 1."""
    return np.concatenate([features, np.ones((len(features), 1))], 1)
