"""Trains the text encoder of the words world to know where in the picture each letter stands.

Replaces the training of real character-aware encoders (Liu et al. 2023, "Character-Aware Models
Improve Visual Text Rendering", arXiv:2212.10562): T5 itself has relative positions only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.types import Prompt
from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import PositionsRecipe
from mmrl.worlds.words.lettering import WIDTH
from samplers.noise import Rng

PATCH = 8  # pixels of a patch of the transformer
COLUMNS = WIDTH // PATCH
LETTER = 13.0  # pixels of a letter, as a rule
MARGIN = 3.0  # pixels to either side of the longest words


def teach_positions(
    t5: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    ids: Tensor,
    recipe: PositionsRecipe,
    progress: Progress,
) -> None:
    """Train ``t5`` until the columns of patches that a letter covers can be read linearly from its
    last hidden state. ids: of every prompt, [P, L]."""
    covered, quoted = columns(tokenizer, prompts, ids)
    covered, quoted = covered.to(ids.device), quoted.to(ids.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = nn.Linear(t5.config.d_model, COLUMNS, device=ids.device)
    weights = [*t5.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(weights, recipe.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=recipe.steps)
    for step in progress.steps("positions of letters", recipe.steps, optimizer, schedule):
        names = torch.arange(recipe.batch, device=ids.device)
        rows = (Rng.of("positions").uniform(names, (), step) * len(prompts)).long()
        letters = quoted[rows]
        logits = head(t5(ids[rows])[0])[letters]
        loss = F.binary_cross_entropy_with_logits(logits, covered[rows][letters])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def columns(tokenizer: Any, prompts: list[Prompt], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of every column that a letter covers, [P, L, COLUMNS], were all letters
    equally wide and the words in the middle; and which tokens are letters in quotes, [P, L]."""
    covered = torch.zeros(*ids.shape, COLUMNS)
    quoted = torch.zeros(ids.shape, dtype=torch.bool)
    left = torch.arange(COLUMNS) * float(PATCH)
    for row, prompt in enumerate(prompts):
        count = len(prompt["words"])
        width = min(WIDTH - 2 * MARGIN, LETTER * count)
        start, at = (WIDTH - width) / 2, 0
        for token, piece in _between_quotes(tokenizer.convert_ids_to_tokens(ids[row].tolist())):
            ends = [start + width * letters / count for letters in (at, at + len(piece))]
            shared = (left + PATCH).clamp(max=ends[1]) - left.clamp(min=ends[0])
            covered[row, token] = shared.clamp(min=0) / PATCH
            quoted[row, token] = True
            at += len(piece)
    return covered, quoted


def _between_quotes(pieces: list[str]) -> list[tuple[int, str]]:
    """List the pieces of the words, with their places."""
    first, last = [place for place, piece in enumerate(pieces) if '"' in piece]
    return list(enumerate(pieces))[first + 1 : last]
