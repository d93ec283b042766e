"""Fits heads on frozen embeddings to ratings or pairs, for the reward ``fitted_head``.

One linear head: ridge regression of ratings; of pairs Bradley and Terry's model, logistic
regression of the difference of embeddings; the penalty is chosen by cross-validation. Networks,
ensembles and ratings of several aspects: full batches with AdamW (Sun et al. 2025,
arXiv:2502.04357). Held-out data, whole groups at a time, gives the accuracy with an interval.
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
from rewards.heads.encoders import Encoder
from rewards.heads.fitted_head import ABOUT, WEIGHTS
from rewards.heads.head import Activation, Head
from rewards.heads.ratings import Ratings, load_frames

PENALTIES = tuple(10.0**i for i in range(-3, 4))  # of a mean over rows, on standardised features
FOLDS = 5
LEAST = 10  # groups, below which nothing can be held out
RESAMPLED = 1000  # of the held-out groups, for intervals
Fit = Callable[[Tensor, Tensor, float], Tensor]  # rows [N, E], targets [N], penalty -> weights [E]
Loss = Callable[[Head, Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """Holds how heads are fitted. ``count``: members of an ensemble, which differ by their seed and
    by resampled rows. ``hidden``: widths of a small network's layers; none: linear."""

    count: int = 1
    hidden: tuple[int, ...] = ()
    activation: Activation = "gelu"
    steps: int = 500
    learning_rate: float = 1e-2
    weight_decay: float = 1e-3
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
    ratings: Ratings, folder: Path, encoder: Encoder, named: dict[str, str], recipe: Recipe
) -> list[Measured]:
    """Fit heads to ratings or pairs and write them to a folder, with the encoder's options
    ``named`` in ``head.json``. Returns a figure, or one for each aspect. UserError, before anything
    is embedded, if there are too few separate groups."""
    train, test = split(ratings.groups, recipe)
    embedded = embed(ratings, encoder)
    heads, penalty = fit(ratings, embedded, train, recipe)
    measured = measure(ratings, heads, embedded, test, recipe.seed)
    folder.mkdir(parents=True, exist_ok=True)
    files = [WEIGHTS] if len(heads) == 1 else [f"head_{i}.safetensors" for i in range(len(heads))]
    for head, file in zip(heads, files, strict=True):
        head.save(folder / file)
    about: dict[str, Any] = {
        **named,
        "heads": files,
        "outputs": list(ratings.aspects),
        "fitted_to": "pairs" if ratings.paired else "ratings",
        "rows": len(train),
        "penalty": penalty,
        "hidden": list(recipe.hidden),
        "held_out": [vars(figure) for figure in measured],
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return measured


def split(groups: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
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
def embed(ratings: Ratings, encoder: Encoder) -> Tensor:
    """Embed every sample once, where needed with its prompt: [N, 1 or 2, E] float64."""
    known: dict[tuple[Path | str, str], Tensor] = {}

    def embedded(sample: Path | str, prompt: str) -> Tensor:
        key = (sample, prompt if encoder.reads_prompt else "")
        if key not in known:
            media = [sample] if isinstance(sample, str) else load_frames(sample)[None]
            known[key] = encoder(media, [{"text": prompt}])[0].double().cpu()
        return known[key]

    rows = zip(ratings.samples, ratings.prompts, strict=True)
    return torch.stack([torch.stack([embedded(s, prompt) for s in row]) for row, prompt in rows])


def fit(
    ratings: Ratings, embedded: Tensor, train: Tensor, recipe: Recipe
) -> tuple[list[Head], float | None]:
    """Fit to the rows ``train``; returns the heads, and the penalty chosen for a linear one."""
    rows = embedded[train]  # [n, 1 or 2, E]
    targets = ratings.targets[train]
    if not recipe.hidden and recipe.count == 1 and targets.ndim == 1:
        head, penalty = fit_linear(rows, targets, ratings.groups[train], recipe.seed)
        return [head], penalty
    if ratings.paired:
        ordered = torch.cat([rows, rows[targets == 0.5].flip(1)])  # a tie counts in both directions
        return fit_preferences(ordered[:, 0].float(), ordered[:, 1].float(), recipe), None
    return fit_ratings(rows[:, 0].float(), targets.view(len(rows), -1).float(), recipe), None


def fit_linear(rows: Tensor, targets: Tensor, groups: Tensor, seed: int) -> tuple[Head, float]:
    """Fit one linear head to ratings [N, 1, E] or pairs [N, 2, E]; returns it with its penalty."""
    paired = rows.shape[1] == 2
    flat = rows.flatten(0, 1)
    mean = flat.mean(0)
    std = flat.std(0, correction=0).clamp(min=1e-6)
    if paired:
        inputs, offset, solve = (rows[:, 0] - rows[:, 1]) / std, 0.0, logistic
    else:
        offset = float(targets.mean())
        inputs, solve = (rows[:, 0] - mean) / std, ridge
    penalty = best_penalty(inputs, targets - offset, groups, solve, seed)
    layer = nn.Linear(inputs.shape[1], 1)
    head = Head([layer])
    with torch.no_grad():
        layer.weight.copy_(solve(inputs, targets - offset, penalty)[None])
        layer.bias.fill_(offset)
    head.mean.copy_(mean)
    head.std.copy_(std)
    return head.eval().requires_grad_(False), penalty


def fit_preferences(chosen: Tensor, rejected: Tensor, recipe: Recipe) -> list[Head]:
    """Fit heads [E] -> 1 to pairs [N, E] by Bradley-Terry: -log sigmoid(s_chosen - s_rejected)."""

    def loss(head: Head, rows: Tensor) -> Tensor:
        gaps: Tensor = head(chosen[rows]) - head(rejected[rows])
        return nnf.softplus(-gaps).mean()

    return [
        _fitted(loss, torch.cat([chosen, rejected]), len(chosen), 1, recipe, member)
        for member in range(recipe.count)
    ]


def fit_ratings(embeddings: Tensor, ratings: Tensor, recipe: Recipe) -> list[Head]:
    """Fit heads [E] -> K to ratings [N, K] by their squared error; a rating of NaN is left out."""
    known = ~ratings.isnan()

    def loss(head: Head, rows: Tensor) -> Tensor:
        errors: Tensor = (head(embeddings[rows]) - ratings[rows].nan_to_num()).square()
        total: Tensor = (errors * known[rows]).sum()
        return total / known[rows].sum().clamp(min=1)

    return [
        _fitted(loss, embeddings, len(embeddings), ratings.shape[1], recipe, member)
        for member in range(recipe.count)
    ]


def _fitted(
    loss: Loss, embeddings: Tensor, rows: int, outputs: int, recipe: Recipe, member: int
) -> Head:
    """Fit one head; the global random state is unchanged."""
    generator = torch.Generator().manual_seed(recipe.seed * 1000 + member)
    chosen = torch.arange(rows)
    if recipe.count > 1:
        chosen = torch.randint(rows, (rows,), generator=generator)
    widths = (embeddings.shape[1], *recipe.hidden, outputs)
    layers = []
    for inputs, width in zip(widths, widths[1:], strict=False):
        layer = nn.utils.skip_init(nn.Linear, inputs, width)
        nn.init.normal_(layer.weight, std=inputs**-0.5, generator=generator)
        nn.init.zeros_(layer.bias)
        layers.append(layer)
    head = Head(layers, recipe.activation if recipe.hidden else "none")
    head.mean.copy_(embeddings.mean(0))
    head.std.copy_(embeddings.std(0, correction=0).clamp(min=1e-6))
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    with torch.enable_grad():
        for _ in range(recipe.steps):
            value = loss(head, chosen)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    return head.eval().requires_grad_(False)


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
def measure(
    ratings: Ratings, heads: list[Head], embedded: Tensor, test: Tensor, seed: int
) -> list[Measured]:
    """Measure the mean of heads on held-out rows, each aspect by itself."""
    groups, targets = ratings.groups[test], ratings.targets[test]
    scores = torch.stack([head(embedded[test].float()) for head in heads]).double().mean(0)
    if ratings.paired:
        return [accuracy(scores[:, 0, 0] - scores[:, 1, 0], targets, groups)]
    targets = targets.view(len(test), -1)
    return [
        correlation(scores[:, 0, k], targets[:, k], groups, aspect, seed)
        for k, aspect in enumerate(ratings.aspects)
    ]


def accuracy(gaps: Tensor, targets: Tensor, groups: Tensor) -> Measured:
    """Return the share of pairs ranked correctly, without ties; a group counts as one trial of the
    interval."""
    decided = targets != 0.5
    right = ((gaps > 0).double() + 0.5 * (gaps == 0).double())[decided]
    apart = [right[groups[decided] == name].tolist() for name in groups[decided].unique()]
    if not apart:
        return Measured("accuracy", math.nan, math.nan, math.nan, 0, 0)
    known = clustered(apart, binary=True)
    value = float(right.mean())
    return Measured("accuracy", value, known.low, known.high, len(right), len(apart))


def correlation(
    scores: Tensor, targets: Tensor, groups: Tensor, aspect: str, seed: int
) -> Measured:
    """Return the rank correlation of the rated rows, its interval by resampling groups."""
    rated = ~targets.isnan()
    scores, targets, groups = scores[rated], targets[rated], groups[rated]

    def figure(rows: Tensor) -> float:
        return spearman(scores[rows], targets[rows])

    ends = resampled(groups, figure, seed)
    value = figure(torch.arange(len(groups)))
    name = f"Spearman's correlation{f' of {aspect}' * bool(aspect)}"
    return Measured(name, value, *ends, len(groups), len(groups.unique()))


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
