"""Fits heads for the reward ``embedding_head`` to preferences or ratings.

    python -m mmrl.rewards.heads.fit_heads data.jsonl heads --clip ViT-L-14/openai --count 5

A line of the data is a pair, ``{"text": ..., "chosen": ..., "rejected": ...}``, or a rating,
``{"text": ..., "sample": ..., "ratings": {"aspect": number}}``; samples are files of pictures with
``--clip``, answers with ``--text-model``. Embeddings are computed once, so fitting takes seconds on
a CPU (Sun et al. 2025, arXiv:2502.04357). The heads of an ensemble differ by their seed and by
resampled data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nnf
import typer
from torch import Tensor, nn

from mmrl.core.errors import UserError
from rewards.base.json_lines import json_lines
from rewards.base.prompt import from_pil, read_picture
from rewards.heads.embedding import Activation, Encoder, Head

Loss = Callable[[Head, Tensor], Tensor]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Recipe:
    """Holds how heads are fitted: full batches, Adam."""

    count: int = 1  # heads; more than one are fitted to resampled data
    hidden: tuple[int, ...] = ()  # widths between input and output; none: a linear head
    activation: Activation = "relu"
    steps: int = 500
    learning_rate: float = 1e-2
    weight_decay: float = 1e-3
    seed: int = 0


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


def accuracy(heads: Sequence[Head], chosen: Tensor, rejected: Tensor) -> float:
    """Return the share of pairs [N, E] that the mean of the heads ranks correctly."""
    gaps = torch.stack([head(chosen) - head(rejected) for head in heads]).mean((0, 2))
    return float((gaps > 0).double().mean())


def read(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a .jsonl file. Raises UserError with the line of a mistake."""
    rows = []
    for number, row in json_lines(path):
        pair = isinstance(row, dict) and {"chosen", "rejected"} <= set(row)
        rated = isinstance(row, dict) and {"sample", "ratings"} <= set(row)
        if not pair and not rated:
            raise UserError(
                f'{path}:{number} has neither "chosen" and "rejected" nor "sample" and "ratings"'
            )
        rows.append(row)
    if not rows or len({"chosen" in row for row in rows}) > 1:
        raise UserError(f"{path} must hold pairs only or ratings only, and at least one")
    return rows


def embedded(encoder: Encoder, rows: Sequence[dict[str, Any]], field: str, folder: Path) -> Tensor:
    """Return embeddings [N, E] of a field of the rows; picture paths are relative to the data."""
    parts = []
    for row in rows:
        sample: Any = [str(row[field])]
        if encoder.clip is not None:
            picture = read_picture(folder / str(row[field]), field, "embedding_head")
            sample = from_pil(picture)[None]
        parts.append(encoder(sample, [row]).float().cpu())
    return torch.cat(parts)


def fit_file(
    data: Path, encoder: Encoder, recipe: Recipe, held_out: float = 0.1
) -> tuple[list[Head], dict[str, Any]]:
    """Fit heads to a file and measure them on its last rows, which are held out."""
    rows = read(data)
    cut = len(rows) - math.floor(len(rows) * held_out)
    if "chosen" in rows[0]:
        chosen = embedded(encoder, rows, "chosen", data.parent)
        rejected = embedded(encoder, rows, "rejected", data.parent)
        heads = fit_preferences(chosen[:cut], rejected[:cut], recipe)
        measured = accuracy(heads, chosen[cut:], rejected[cut:]) if cut < len(rows) else math.nan
        return heads, {"accuracy": measured}
    names = sorted({name for row in rows for name in row["ratings"]})
    ratings = torch.tensor([[row["ratings"].get(name, math.nan) for name in names] for row in rows])
    embeddings = embedded(encoder, rows, "sample", data.parent)
    heads = fit_ratings(embeddings[:cut], ratings[:cut], recipe)
    errors = (torch.stack([h(embeddings[cut:]) for h in heads]).mean(0) - ratings[cut:]).square()
    return heads, {"outputs": names, "squared_error": errors.nanmean(0).tolist()}


@app.command()
def main(
    data: Path,
    folder: Path,
    clip: str | None = None,
    text_model: str | None = None,
    features: str = "media",
    pool: str = "mean",
    count: int = 1,
    hidden: str = "",
    steps: int = 500,
    seed: int = 0,
) -> None:
    """Fit heads for embedding_head to a .jsonl file of preferences or ratings; write them to a
    folder."""
    if features not in ("media", "media_and_text") or pool not in ("mean", "last"):
        raise UserError("--features is media or media_and_text, --pool is mean or last")
    encoder = Encoder(
        clip,
        text_model,
        "media" if features == "media" else "media_and_text",
        "mean" if pool == "mean" else "last",
    )
    widths = tuple(int(width) for width in hidden.split(",") if width)
    heads, measured = fit_file(
        data, encoder, Recipe(count=count, hidden=widths, steps=steps, seed=seed)
    )
    folder.mkdir(parents=True, exist_ok=True)
    for i, head in enumerate(heads):
        head.save(folder / f"head_{i}.safetensors")
    print(json.dumps(measured))


if __name__ == "__main__":
    try:
        app()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
