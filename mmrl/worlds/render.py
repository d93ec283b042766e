"""Draws scenes: real handwritten digits (8x8 scans of scikit-learn), enlarged, coloured and placed,
all at once."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmrl.core.types import Prompt
from mmrl.worlds.scenes import CANVAS, COLORS, PLACES, PLAIN, RELATIONS, SIZES
from samplers.noise import Rng

Split = Literal["generator", "reader", "judge"]
SPLITS = ("generator", "reader", "judge")
INK = 0.25  # coverage from which a pixel counts as ink
_NOWHERE = (float("nan"),) * 3
_CORNERS = [name for name in PLACES if name != "middle"]


class Scans(NamedTuple):
    pixels: Tensor  # [N, 8, 8] in 0..1, 1 is ink
    labels: Tensor  # [N] long
    origin: Tensor  # [N] long: position in scikit-learn's data set


class Scenes(NamedTuple):
    images: Tensor  # [B, 3, 32, 32] in 0..1, black paper
    # B, with "boxes": one [x0, y0, x1, y1] per object, pixels, x1 and y1 exclusive
    prompts: list[Prompt]
    # [B, 3, 3] centre x, centre y, side of every object in pixels; NaN where there is none
    placed: Tensor


@cache
def scans(split: Split) -> Scans:
    """Return 599 of the 1,797 scans. The three splits share none, so that memorising one does not
    help another."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = Rng.of("digits", "splits").permutation(len(digits.target))
    index = order[SPLITS.index(split) :: len(SPLITS)]
    return Scans(
        torch.from_numpy(digits.images).float()[index] / 16,
        torch.from_numpy(digits.target).long()[index],
        index,
    )


def render(
    prompts: list[Prompt], rng: Rng, split: Split = "generator", wobble: float = 0.0
) -> Scenes:
    """Draw every prompt once. Row i depends on ``rng`` and i alone.

    ``wobble`` 0..1 turns, shears and rescales the digits at random (1: up to 15 degrees, 0.25, 12
    %) and shifts them by up to two pixels: augmentation.
    """
    rows = rng.rows(len(prompts), 1)
    u = rng.uniform(rows, (3, 9)).float()  # [B, 3, 9] one row of draws per object
    source = scans(split)
    pools = [torch.nonzero(source.labels == d)[:, 0].tolist() for d in range(10)]
    spots = []
    which = []
    colors = []
    for prompt, draw in zip(prompts, u.tolist()):
        empty = range(len(prompt["objects"]), 3)
        chosen = [pools[item["digit"]] for item in prompt["objects"]]
        spots.append(_layout(prompt, draw) + [_NOWHERE for _ in empty])
        which.append(
            [pool[int(d[0] * len(pool))] for pool, d in zip(chosen, draw)] + [0 for _ in empty]
        )
        colors.append(
            [COLORS[item["color"]] for item in prompt["objects"]] + [(0.0, 0.0, 0.0) for _ in empty]
        )
    # [B, 3, 3], [B, 3, RGB]
    layout = torch.tensor(spots)
    paint = torch.tensor(colors)
    shake = wobble * (2 * u[..., 4:] - 1)
    layout[..., :2] += 2 * shake[..., 3:]
    ink = coverage(source.pixels[torch.tensor(which)], layout, shake[..., :3])  # [B, 3, H, W]
    images = torch.einsum("bkhw,bkc->bchw", ink, paint).clamp(0, 1)
    boxes = tight_boxes(ink)
    drawn = [{**p, "boxes": boxes[b][: len(p["objects"])]} for b, p in enumerate(prompts)]
    return Scenes(images, drawn, layout)


def _layout(prompt: Prompt, draw: list[list[float]]) -> list[tuple[float, float, float]]:
    """Return centre and side of every object. A digit fills a canvas quarter, so none overlap."""
    objects = prompt["objects"]
    first = draw[0]
    if len(objects) == 1:
        item = objects[0]
        return [
            _at(item["place"] or list(PLACES)[int(first[1] * 5)], SIZES.get(item["size"], PLAIN))
        ]
    if len(objects) == 2:
        relation = prompt["relation"] or RELATIONS[int(first[1] * 4)]
        side = ("left", "right")[int(first[2] * 2)]
        edge = ("top", "bottom")[int(first[2] * 2)]
        places = (
            [f"top {side}", f"bottom {side}"]
            if relation in ("above", "below")
            else [f"{edge} left", f"{edge} right"]
        )
        places = places[::-1] if relation in ("below", "right of") else places
        return [_at(place, PLAIN) for place in places]
    order = sorted(range(4), key=lambda i: draw[i % 3][1 + i // 3])
    return [_at(_CORNERS[i], PLAIN) for i in order[:3]]


def _at(place: str, side: float) -> tuple[float, float, float]:
    """Return centre and side of a digit that touches its corner; small ones stand a little away
    from it."""
    if place == "middle":
        return CANVAS / 2, CANVAS / 2, side
    near = max(side / 2, 8.0)
    return (
        CANVAS - near if "right" in place else near,
        CANVAS - near if "bottom" in place else near,
        side,
    )


def coverage(pixels: Tensor, layout: Tensor, wobble: Tensor, canvas: int = CANVAS) -> Tensor:
    """Return coverage 0..1 of each object, [B, K, H, W]: the scan [B, K, 8, 8] enlarged (bicubic)
    to its spot.

    layout [B, K, 3] is centre x, centre y and side in pixels (NaN: no object), wobble [B, K, 3]
    turn, shear and growth.
    """
    b, k = layout.shape[:2]
    x, y, side = layout.nan_to_num(1e3).flatten(0, 1).unbind(1)
    turn, shear, grow = wobble.flatten(0, 1).unbind(1)
    # half of the padded 12x12 scan, pixels
    angle = turn * torch.pi / 12
    scale = side * (1 + 0.12 * grow) / 8 * 6
    grid = torch.arange(canvas) + 0.5
    dx = grid[None, None] - x[:, None, None]
    dy = grid[None, :, None] - y[:, None, None]
    u = (dx * angle.cos()[:, None, None] + dy * angle.sin()[:, None, None]) / scale[:, None, None]
    v = (dy * angle.cos()[:, None, None] - dx * angle.sin()[:, None, None]) / scale[:, None, None]
    u = u + 0.25 * shear[:, None, None] * v
    # a blank margin, so that bicubic fades out
    padded = F.pad(pixels.flatten(0, 1)[:, None], (2, 2, 2, 2))
    ink = F.grid_sample(padded, torch.stack([u, v], -1), mode="bicubic", align_corners=False)
    return ink.clamp(0, 1).view(b, k, canvas, canvas)


def tight_boxes(ink: Tensor) -> list[list[list[int]]]:
    """Return tight boxes x0, y0, x1, y1 around the ink [B, K, H, W] of every object; x1 and y1
    exclusive."""
    inked = ink > INK
    side = ink.shape[-1]
    # [B, 3, W], [B, 3, H]
    columns = inked.any(-2).float()
    rows = inked.any(-1).float()
    low = torch.stack([columns.argmax(-1), rows.argmax(-1)], -1)
    high = side - torch.stack([columns.flip(-1).argmax(-1), rows.flip(-1).argmax(-1)], -1)
    return torch.cat([low, high], -1).tolist()
