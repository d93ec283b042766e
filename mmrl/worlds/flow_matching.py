"""Trains the networks of the embedded world by flow matching: images and videos alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import FlowRecipe, WanRecipe, WordsRecipe
from samplers.noise import Rng

Recipe = TypeVar("Recipe", FlowRecipe, WanRecipe, WordsRecipe)


class Draw(NamedTuple):
    """Holds one batch: examples, captions, noise, and times on the way to the noise."""

    row: Tensor  # [B] long
    caption: Tensor  # [B] long
    x: Tensor  # [B, *]
    noise: Tensor  # [B, *]
    t: Tensor  # [B] in 0..1

    def state(self) -> Tensor:
        """Return [B, *]: the latents at t on the line to the noise."""
        return self.x.lerp(self.noise, self.t.view(-1, *[1] * (self.x.ndim - 1)))


def draw(latents: Tensor, captions: Tensor, empty: int, recipe: Recipe, rng: Rng) -> Draw:
    """Draw examples, captions (some of another example, some ``empty``), noise and t, which is
    logit-normal (Esser 2024, eq. 19)."""
    names = torch.arange(recipe.batch)
    # [B, 4]: example, another's caption, whether that is taken, whether none is
    u = rng.fold("u").uniform(names, (4,))
    row, wrong_row = (u[:, :2] * len(latents)).long().unbind(1)
    caption = captions[torch.where(u[:, 2] < recipe.wrong_captions, wrong_row, row)]
    caption = torch.where(u[:, 3] < recipe.no_caption, empty, caption)
    x = latents[row]
    normal = rng.fold("noise").normal(names, (x[0].numel() + 1,))
    return Draw(row, caption, x, normal[:, 1:].view_as(x), normal[:, 0].sigmoid())


def descend(
    transformer: Any,
    loss_of: Callable[[Recipe, Rng], Tensor],
    recipe: Recipe,
    rng: Rng,
    steps: Progress,
    what: str,
) -> None:
    """Train by AdamW with one cycle of the learning rate; wrong captions come late."""
    optimizer = torch.optim.AdamW(
        transformer.parameters(), recipe.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, total_steps=recipe.steps, pct_start=0.1
    )
    for step in steps.steps(what, recipe.steps, optimizer, schedule):
        wrong = recipe.wrong_captions if step >= recipe.true_first * recipe.steps else 0.0
        loss = loss_of(replace(recipe, wrong_captions=wrong), rng.fold(step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    transformer.eval().requires_grad_(False)
