"""Fits a head on frozen features of pictures to ratings or pairs, for the reward ``fitted_head``.

Ratings: ridge regression. Pairs: Bradley and Terry's model, logistic regression of the difference
of features. Both with the penalty chosen by cross-validation. Or a small network. Held-out data,
whole groups at a time, gives the head's accuracy with an interval.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.statistics import clustered
from rewards.heads.embedding import Head
from rewards.heads.fit_heads import Recipe, fit_preferences, fit_ratings
from rewards.heads.fitted_head import ABOUT, WEIGHTS, PictureFeatures
from rewards.heads.ratings import Ratings, load_frames

PENALTIES = tuple(10.0**i for i in range(-3, 4))  # of a mean over rows, on standardised features
FOLDS = 5
LEAST = 10  # groups, below which nothing can be held out
RESAMPLED = 1000  # of the held-out groups, for intervals
Fit = Callable[[Tensor, Tensor, float], Tensor]  # rows [N, E], targets [N], penalty -> weights [E]


@dataclass(frozen=True)
class HeadRecipe:
    """Holds how a head is fitted. ``hidden``: widths of a small network's layers; none: linear."""

    hidden: tuple[int, ...] = ()
    steps: int = 500
    held_out: float = 0.2
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """Holds a head's score on held-out rows: accuracy on pairs, Spearman correlation on ratings,
    with 95 % intervals over groups."""

    name: str
    value: float
    low: float
    high: float
    rows: int
    groups: int

    def sentence(self) -> str:
        return (
            f"{self.name} on {self.rows} held-out rows ({self.groups} groups): {self.value:.3f} "
            f"[{self.low:.3f}, {self.high:.3f}]"
        )


def fit_head(
    ratings: Ratings, folder: Path, features: PictureFeatures, recipe: HeadRecipe
) -> Measured:
    """Fit a head to ratings or pairs and write it to a folder. UserError, before anything is
    embedded, if there are too few separate groups."""
    train, test = split(ratings.groups, recipe)
    embedded = embed(ratings, features)
    head, penalty = fit(ratings, embedded, train, recipe)
    measured = measure(ratings, head, embedded, test, recipe.seed)
    folder.mkdir(parents=True, exist_ok=True)
    head.save(folder / WEIGHTS)
    about: dict[str, Any] = {
        "kind": features.kind,
        "model": features.model,
        "fitted_to": "pairs" if ratings.paired else "ratings",
        "rows": len(train),
        "penalty": penalty,
        "hidden": list(recipe.hidden),
        "held_out": vars(measured),
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return measured


def split(groups: Tensor, recipe: HeadRecipe) -> tuple[Tensor, Tensor]:
    """Draw whole groups to hold out; return the training rows and the held-out rows."""
    names = groups.unique()
    if len(names) < LEAST:
        raise UserError(
            f"{len(groups)} rows in {len(names)} groups: rows that share a picture or a prompt are "
            f"held out together, and {LEAST} groups are needed; rate pictures of more prompts"
        )
    generator = torch.Generator().manual_seed(recipe.seed)
    order = names[torch.randperm(len(names), generator=generator)]
    count = min(max(round(recipe.held_out * len(names)), 2), len(names) - 2)
    held = torch.isin(groups, order[:count])
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


@torch.no_grad()
def embed(ratings: Ratings, features: PictureFeatures) -> Tensor:
    """Embed every picture once: [N, 1 or 2, E] float64; for a video, the mean over frames."""
    known: dict[Path, Tensor] = {}
    for file in dict.fromkeys(file for files in ratings.files for file in files):
        known[file] = features(load_frames(file)).double().mean(0).cpu()
    return torch.stack([torch.stack([known[file] for file in files]) for files in ratings.files])


def fit(
    ratings: Ratings, embedded: Tensor, train: Tensor, recipe: HeadRecipe
) -> tuple[Head, float | None]:
    """Fit to the rows ``train``; returns the head and the chosen penalty, None for a network."""
    rows = embedded[train]  # [n, 1 or 2, E]
    targets = ratings.targets[train]
    if recipe.hidden:
        network = Recipe(
            hidden=recipe.hidden, activation="gelu", steps=recipe.steps, seed=recipe.seed
        )
        if not ratings.paired:
            return fit_ratings(rows[:, 0].float(), targets[:, None].float(), network)[0], None
        ordered = torch.cat([rows, rows[targets == 0.5].flip(1)])  # a tie counts in both directions
        return fit_preferences(ordered[:, 0].float(), ordered[:, 1].float(), network)[0], None
    flat = rows.flatten(0, 1)
    mean = flat.mean(0)
    std = flat.std(0, correction=0).clamp(min=1e-6)
    if ratings.paired:
        inputs, offset, solve = (rows[:, 0] - rows[:, 1]) / std, 0.0, logistic
    else:
        offset = float(targets.mean())
        inputs, solve = (rows[:, 0] - mean) / std, ridge
    penalty = best_penalty(inputs, targets - offset, ratings.groups[train], solve, recipe.seed)
    layer = nn.Linear(inputs.shape[1], 1)
    head = Head([layer])
    with torch.no_grad():
        layer.weight.copy_(solve(inputs, targets - offset, penalty)[None])
        layer.bias.fill_(offset)
    head.mean.copy_(mean)
    head.std.copy_(std)
    return head.eval().requires_grad_(False), penalty


def ridge(rows: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """Minimise mean (row w - target)^2 + penalty |w|^2 / E exactly."""
    count, width = rows.shape
    gram = rows.T @ rows / count + penalty / width * torch.eye(width, dtype=rows.dtype)
    solution: Tensor = torch.linalg.solve(gram, rows.T @ targets / count)
    return solution


def logistic(rows: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """Minimise the mean cross-entropy of sigmoid(row w) + penalty |w|^2 / 2 E by L-BFGS."""
    weights = torch.zeros(rows.shape[1], dtype=rows.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        error = nnf.binary_cross_entropy_with_logits(rows @ weights, targets)
        value = error + penalty * weights.square().sum() / 2 / len(weights)
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weights.detach()


def best_penalty(rows: Tensor, targets: Tensor, groups: Tensor, solve: Fit, seed: int) -> float:
    """Choose the penalty with the least error on folds of whole groups."""
    names = groups.unique()
    generator = torch.Generator().manual_seed(seed + 1)
    order = names[torch.randperm(len(names), generator=generator)]
    folds = [torch.isin(groups, part) for part in order.chunk(min(FOLDS, len(names)))]

    def error(penalty: float) -> float:
        total = 0.0
        for fold in folds:
            scores = rows[fold] @ solve(rows[~fold], targets[~fold], penalty)
            if solve is logistic:
                losses = nnf.binary_cross_entropy_with_logits(
                    scores, targets[fold], reduction="sum"
                )
            else:
                losses = (scores - targets[fold]).square().sum()
            total += float(losses)
        return total

    return min(PENALTIES, key=error)


@torch.no_grad()
def measure(ratings: Ratings, head: Head, embedded: Tensor, test: Tensor, seed: int) -> Measured:
    """Measure a head on held-out rows, with an interval in which a group counts as one trial: by
    ``mmrl.core.statistics``, or by resampling groups. Ties are excluded from accuracy."""
    groups = ratings.groups[test]
    scores = head(embedded[test].float()).squeeze(-1).double()  # [n, 1 or 2]
    targets = ratings.targets[test]
    if ratings.paired:
        decided = targets != 0.5
        gaps = (scores[:, 0] - scores[:, 1])[decided]
        right = (gaps > 0).double() + 0.5 * (gaps == 0).double()
        value = float(right.mean()) if len(right) else math.nan
        apart = [right[groups[decided] == name].tolist() for name in groups[decided].unique()]
        if not apart:
            return Measured("accuracy", value, math.nan, math.nan, 0, 0)
        known = clustered(apart, binary=True)
        return Measured("accuracy", value, known.low, known.high, len(right), len(apart))

    def figure(rows: Tensor) -> float:
        return spearman(scores[rows, 0], targets[rows])

    ends = resampled(groups, figure, seed)
    value = figure(torch.arange(len(groups)))
    return Measured("Spearman's correlation", value, *ends, len(groups), len(groups.unique()))


def spearman(scores: Tensor, targets: Tensor) -> float:
    """Compute the rank correlation; NaN if either is constant."""
    from scipy import stats

    if len(scores) < 3 or len(scores.unique()) < 2 or len(targets.unique()) < 2:
        return math.nan
    return float(stats.spearmanr(scores.numpy(), targets.numpy()).statistic)


def resampled(groups: Tensor, figure: Callable[[Tensor], float], seed: int) -> tuple[float, float]:
    """Return the bootstrap 95 % interval of a figure over groups; NaN if too few draws have one."""
    members = [(groups == name).nonzero()[:, 0] for name in groups.unique()]
    generator = torch.Generator().manual_seed(seed + 2)
    values = []
    for _ in range(RESAMPLED if members else 0):
        drawn = torch.randint(len(members), (len(members),), generator=generator)
        value = figure(torch.cat([members[i] for i in drawn.tolist()]))
        values += [value] if math.isfinite(value) else []
    if len(values) < RESAMPLED // 2:
        return math.nan, math.nan
    low, high = torch.tensor(values).double().quantile(torch.tensor([0.025, 0.975]).double())
    return float(low), float(high)
