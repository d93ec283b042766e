"""Trains the reader (for the reward) and the judge (for evaluation only): same task, different
scans and network."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.core.types import Prompt
from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import ReaderRecipe
from mmrl.worlds.render import Scenes, Split, render
from mmrl.worlds.scenes import CANVAS, COLORS, DIGITS, PLACES, SIZES, Thing, captions
from rewards.images.digit_reader import Reader
from samplers.noise import Rng


def train_reader(folder: Path, recipe: ReaderRecipe, progress: Progress) -> None:
    """Fit a reader on rendered scenes of one split, with turned and sheared digits, blur and noise,
    and save it."""
    rng = Rng.of(recipe.seed, "reader")
    config = {
        "image_size": CANVAS,
        "channels": recipe.channels,
        "kernel": recipe.kernel,
        "pool": recipe.pool,
        "digits": DIGITS,
        "colors": list(COLORS),
        "sizes": list(SIZES),
        "places": PLACES,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        reader = Reader(config)
    prompts = captions("mixed", 2000, recipe.seed)
    prompts = (prompts * (recipe.scenes // len(prompts) + 1))[: recipe.scenes]
    scenes = render(prompts, rng, recipe.split, wobble=0.6)
    truth = targets(scenes)
    optimizer = torch.optim.AdamW(reader.parameters(), recipe.lr, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=recipe.steps)
    for step in progress.steps(f"{recipe.split}'s eyes", recipe.steps, optimizer, schedule):
        rows = (
            rng.fold("rows").uniform(torch.arange(recipe.batch), (), step) * recipe.scenes
        ).long()
        images = disturb(scenes.images[rows], rng.fold("disturb", step))
        loss = reading_loss(reader(images), [value[rows] for value in truth])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    reader.save(folder)


def targets(scenes: Scenes) -> tuple[Tensor, Tensor, Tensor]:
    """Return cell [B, 3] (-1: no object), offset in cells [B, 3, 2], names [B, 3, 3] (digit,
    colour, size; -1: not said)."""
    x, y, side = scenes.placed.unbind(-1)
    present = ~x.isnan()
    spot = torch.stack([x, y], -1).nan_to_num(0) / Reader.stride  # [B, 3, 2] in cells
    corner = spot.floor().clamp(0, CANVAS // Reader.stride - 1)
    cell = torch.where(
        present, corner[..., 1] * (CANVAS // Reader.stride) + corner[..., 0], -1
    ).long()
    names = torch.full((*x.shape, 3), -1)
    for b, prompt in enumerate(scenes.prompts):
        names[b, : len(prompt["objects"])] = torch.tensor(
            [_names(item) for item in prompt["objects"]]
        )
    for k, size in enumerate(SIZES.values()):
        names[..., 2] = torch.where(side == size, k, names[..., 2])
    return cell, spot - corner - 0.5, names


def _names(item: Thing) -> list[int]:
    return [item["digit"], list(COLORS).index(item["color"]), -1]


def disturb(images: Tensor, rng: Rng) -> Tensor:
    """Blur half the pictures and add a little noise to all, so that imperfect generated images are
    read like scans."""
    rows = torch.arange(len(images))
    u = rng.uniform(rows, (2,)).float()[:, :, None, None, None]
    soft = F.avg_pool2d(F.pad(images, (1, 1, 1, 1)), 3, 1)
    images = images.lerp(soft, 0.6 * u[:, 0] * (u[:, 0] > 0.5))
    return (images + 0.08 * u[:, 1] * rng.normal(rows, tuple(images.shape[1:]), 1)).clamp(0, 1)


def reading_loss(grid: tuple[Tensor, ...], truth: list[Tensor]) -> Tensor:
    """Add the losses of presence (binary, neighbours of a centre left out), offset, and names."""
    presence, offset, *names = grid
    cell, shift, named = truth
    side = presence.shape[-1]
    mark = torch.zeros(len(cell), side * side + 1).scatter_(
        1, torch.where(cell < 0, side * side, cell), 1.0
    )
    mark = mark[:, :-1].view(-1, 1, side, side)
    # the cells around a centre are neither right nor wrong
    clear = (F.max_pool2d(mark, 3, 1, 1) == mark).float()
    pull = F.binary_cross_entropy_with_logits(
        presence, mark, reduction="none", pos_weight=torch.tensor(4.0)
    )
    loss = (pull * (clear + 0.1 * (1 - clear))).sum() / len(cell)
    rows, slots = torch.nonzero(cell >= 0, as_tuple=True)
    own_cell = cell[rows, slots]
    away = shift[rows, slots]
    loss = loss + 4 * F.mse_loss(offset.flatten(2)[rows, :, own_cell], away)
    # Names are trained at the four cells nearest to the centre: it may lie on a border, and the
    # peak in any of them.
    x = own_cell % side + away[:, 0].floor()
    y = own_cell // side + away[:, 1].floor()
    for dx, dy in ((0, 0), (0, 1), (1, 0), (1, 1)):
        near = ((y + dy).clamp(0, side - 1) * side + (x + dx).clamp(0, side - 1)).long()
        for logits, target in zip(names, named[rows, slots].unbind(-1)):
            predictions = logits.flatten(2)[rows, :, near]
            loss = loss + F.cross_entropy(predictions, target, ignore_index=-1, reduction="sum") / (
                4 * len(own_cell)
            )
    return loss


@torch.no_grad()
def accuracy(reader: Reader, prompts: list[Prompt], rng: Rng, split: Split) -> dict[str, float]:
    """Return the share of right digits, colours, sizes, centres within 3 pixels, and picture
    counts, on scans of ``split``."""
    scenes = render(prompts, rng, split)
    detections = reader.detect(scenes.images)
    cell, _, named = targets(scenes)
    gap = (detections.center[:, :, None] - scenes.placed[:, None, :, :2]).norm(dim=-1)  # [B, M, 3]
    gap = gap.nan_to_num(1e3) + 1e3 * (detections.confidence < 0.5)[..., None]
    near, which = gap.min(1)  # [B, 3]
    present = cell >= 0
    right = {"place": (near < 3)[present]}
    for k, name in enumerate(("digit", "color", "size")):
        guess = getattr(detections, name).argmax(-1).gather(1, which)  # [B, 3]
        right[name] = (guess == named[..., k])[present & (named[..., k] >= 0)]
    right["count"] = (detections.confidence > 0.5).sum(1) == present.sum(1)
    return {name: float(value.float().mean()) for name, value in right.items()}
