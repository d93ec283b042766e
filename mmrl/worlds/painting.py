"""Trains the tiny generators of image tokens: pictures as ids with captions, some of them those of
another picture."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mmrl.core.types import Prompt
from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import PainterRecipe
from mmrl.worlds.render import render
from mmrl.worlds.scenes import COLORS, PLACES, captions, is_held_out, singles
from samplers.noise import Rng

Network = TypeVar("Network", bound=nn.Module)
CLASSES = len(singles())  # a digit in a colour, perhaps at a place


class Lessons(NamedTuple):
    ids: Tensor  # [N, T] long
    caption: Tensor  # [N] long, into ``prompts``
    prompts: list[Prompt]  # P captions; none is held out


class Batch(NamedTuple):
    ids: Tensor  # [B, T]
    caption: Tensor  # [B] long; P stands for no caption
    wrong_caption: Tensor  # [B] long, a caption of another picture
    rng: Rng  # of this step


@torch.no_grad()
def prepare(encode: Callable[[Tensor], Tensor], recipe: PainterRecipe) -> Lessons:
    """Draw single digits and encode them once; ``encode`` makes ids [B, T] of images in -1..1."""
    prompts = [p for p in captions("single", 240, recipe.seed) if not is_held_out(p["text"])]
    caption = torch.arange(recipe.scenes) % len(prompts)
    images = render([prompts[i] for i in caption.tolist()], Rng.of(recipe.seed, "painting")).images
    ids = torch.cat([encode(2 * part - 1) for part in images.split(250)])
    return Lessons(ids, caption, prompts)


def teach(
    module: nn.Module,
    loss: Callable[[Batch], Tensor],
    lessons: Lessons,
    recipe: PainterRecipe,
    progress: Progress,
) -> None:
    """Train by AdamW with one cycle of the learning rate; captions are true at first, later some
    belong to another picture."""
    rng = Rng.of(recipe.seed, "painter")
    learnt = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learnt, recipe.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, total_steps=recipe.steps, pct_start=0.1
    )
    for step in progress.steps("painter", recipe.steps, optimizer, schedule):
        wrong = recipe.wrong_captions if step >= recipe.true_first * recipe.steps else 0.0
        # picture, another's caption, whether that is taken, whether none is
        u = rng.uniform(torch.arange(recipe.batch), (4,), step)
        row, wrong_row = (u[:, :2] * len(lessons.ids)).long().unbind(1)
        wrong_captions = lessons.caption[wrong_row]
        caption = torch.where(u[:, 2] < wrong, wrong_captions, lessons.caption[row])
        caption = torch.where(u[:, 3] < recipe.no_caption, len(lessons.prompts), caption)
        optimizer.zero_grad()
        loss(Batch(lessons.ids[row], caption, wrong_captions, rng.fold("step", step))).backward()
        nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        schedule.step()
    module.eval().requires_grad_(False)


class Composed(nn.Module):
    """Sums a class's embedding from those of digit, colour and place, so that classes that were
    never shown have a meaningful one: held-out captions stay out of pre-training. After
    pre-training every class has its own embedding."""

    which: Tensor

    def __init__(self, width: int):
        super().__init__()
        sizes = 10, len(COLORS), len(PLACES) + 1
        parts = list(itertools.product(*map(range, sizes)))  # the order of ``singles``
        starts = torch.tensor([0, sizes[0], sizes[0] + sizes[1]])
        which = torch.zeros(len(parts) + 1, sum(sizes) + 1)
        which[:-1].scatter_(1, torch.tensor(parts) + starts, 1.0)
        which[-1, -1] = 1.0
        self.register_buffer("which", which)
        self.parts = nn.Parameter(0.3 * torch.randn(which.shape[1], width))

    def forward(self, weight: Tensor) -> Tensor:
        return self.which @ self.parts


def compose(table: nn.Embedding) -> None:
    """Make an embedding of CLASSES + 1 rows a ``Composed`` one, until
    ``parametrize.remove_parametrizations``."""
    table.weight.requires_grad_(False)
    parametrize.register_parametrization(table, "weight", Composed(table.embedding_dim))


def labels(lessons: Lessons) -> Tensor:
    """Return the classes of the captions and of no caption, indices into ``singles``: [P + 1]
    long."""
    number = {prompt["text"]: i for i, prompt in enumerate(singles())}
    return torch.tensor([*(number[p["text"]] for p in lessons.prompts), CLASSES])


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean over all tokens of logits [B, T, V] against ids [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def seeded(seed: int, make: Callable[[], Network]) -> Network:
    """Build by ``make`` with this seed; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
