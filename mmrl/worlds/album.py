"""Draws pictures and clips for questions: digits of any size anywhere on paper lit from one corner.

Unlike the captions' scenes (``mmrl.worlds.render``) these have free positions and one to six
digits, so that finding and counting them is a task. The same three-way split of the scans applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.core.types import Prompt
from mmrl.worlds.render import Split, coverage, scans, tight_boxes
from mmrl.worlds.scenes import COLORS, Thing, thing
from samplers.noise import Rng

SIDE = 48  # pixels, width and height of a picture
MOST = 6  # digits in a picture
TRIES = 12  # places tried for a digit before it is left out
# of a clip; one frame is one second
CLIP_SIDE = 32
FRAMES = 4


class Style(NamedTuple):
    """Describes how a picture is composed."""

    fewest: int = 1
    most: int = 3  # most digits of a picture; one without room is left out
    small: float = 14.0  # side of the enlarged 8x8 scan, pixels
    large: float = 24.0


PLAIN = Style()


class Album(NamedTuple):
    images: Tensor  # uint8 [N, H, W, 3]
    # N: "objects" (digit, color), "boxes" [x0, y0, x1, y1] in pixels, "relation" None
    scenes: list[Prompt]


class Clips(NamedTuple):
    frames: Tensor  # uint8 [N, F, H, W, 3]
    # N: as in Album, and "seen": for every object its first frame and the one after its last
    scenes: list[Prompt]


def album(count: int, rng: Rng, split: Split, style: Style = PLAIN, wobble: float = 0.0) -> Album:
    """Draw ``count`` pictures, 48x48 pixels. Picture i depends on ``rng``, ``split`` and i
    alone."""
    page = _compose(count, rng, split, style, SIDE, wobble)
    boxes = iter(tight_boxes(page.ink[:, None]))
    scenes = [
        {"objects": o, "boxes": [next(boxes)[0] for _ in o], "relation": None} for o in page.objects
    ]
    return Album(_painted(page, page.ink), scenes)


def clips(count: int, rng: Rng, split: Split, wobble: float = 0.0) -> Clips:
    """Draw ``count`` clips of four frames of 32x32 pixels; every digit is seen in consecutive
    frames."""
    page = _compose(count, rng, split, Style(1, 3, 12.0, 16.0), CLIP_SIDE, wobble)
    runs = [(a, b) for a in range(FRAMES) for b in range(a + 1, FRAMES + 1) if b - a < FRAMES]
    visible = [
        runs[int(v * len(runs))] for v in page.draws[page.owner, page.slot, 9].tolist()
    ]  # [M]
    first, last = torch.tensor(visible)[:, :, None, None].unbind(1)
    frames = [_painted(page, page.ink * ((first <= now) & (now < last))) for now in range(FRAMES)]
    spans = iter(visible)
    scenes = [
        {"objects": o, "relation": None, "seen": [next(spans) for _ in o]} for o in page.objects
    ]
    return Clips(torch.stack(frames, 1), scenes)


class _Page(NamedTuple):
    """Holds N scenes with M digits in all."""

    ink: Tensor  # [M, H, W] coverage of each digit
    owner: Tensor  # [M] long, the scene it belongs to
    slot: Tensor  # [M] long, its row of the scene's draws
    objects: list[list[Thing]]  # N
    draws: Tensor  # [N, MOST + 1, 10] uniform; the last row belongs to the picture


def _compose(count: int, rng: Rng, split: Split, style: Style, side: int, wobble: float) -> _Page:
    rows = rng.rows(count, 1)
    u = rng.uniform(rows, (MOST + 1, 10)).float()
    spots = rng.fold("spots").uniform(rows, (MOST, TRIES, 2)).tolist()
    source = scans(split)
    pools = [torch.nonzero(source.labels == d)[:, 0].tolist() for d in range(10)]
    layout = []
    which = []
    owners = []
    objects = []
    for n, (draw, tries) in enumerate(zip(u.tolist(), spots)):
        digits = style.fewest + int(draw[-1][9] * (style.most - style.fewest + 1))
        placed = _place(digits, draw, tries, style, side)
        objects.append(
            [
                thing(int(draw[k][0] * 10), list(COLORS)[int(draw[k][1] * len(COLORS))])
                for k, _ in placed
            ]
        )
        layout += [spot for _, spot in placed]
        scans_of_digit = [pools[int(draw[k][0] * 10)] for k, _ in placed]
        which += [pool[int(draw[k][2] * len(pool))] for pool, (k, _) in zip(scans_of_digit, placed)]
        owners += [(n, k) for k, _ in placed]
    owner, slot = torch.tensor(owners).unbind(1)
    shake = wobble * (2 * u[owner, slot, 6:9] - 1)
    shapes = source.pixels[torch.tensor(which)], torch.tensor(layout), shake
    ink = [
        coverage(scan[:, None], spot[:, None], turn[:, None], side)[:, 0]
        for scan, spot, turn in zip(*(v.split(1000) for v in shapes))
    ]
    return _Page(torch.cat(ink), owner, slot, objects, u)


def _place(
    digits: int,
    draw: Sequence[Sequence[float]],
    tries: Sequence[Sequence[Sequence[float]]],
    style: Style,
    side: int,
) -> list[tuple[int, tuple[float, float, float]]]:
    """Return (slot of the draws, (x, y, side)) of every digit that found room; their squares do not
    overlap."""
    placed: list[tuple[int, tuple[float, float, float]]] = []
    for k in range(digits):
        size = style.small + draw[k][3] * (style.large - style.small)
        for x, y in tries[k]:
            spot = (size / 2 + x * (side - size), size / 2 + y * (side - size), size)
            if all(
                max(abs(spot[0] - o[0]), abs(spot[1] - o[1])) >= (size + o[2]) / 2
                for _, o in placed
            ):
                placed.append((k, spot))
                break
    return placed


def _painted(page: _Page, ink: Tensor) -> Tensor:
    """Paint the digits, as covered by ``ink`` [M, H, W], on their paper: uint8 [N, H, W, 3]."""
    count = len(page.draws)
    side = ink.shape[-1]
    colors = torch.tensor([COLORS[item["color"]] for row in page.objects for item in row])  # [M, 3]
    # [M, 3 and coverage, H, W]
    layers = torch.cat([ink[:, None] * colors[:, :, None, None], ink[:, None]], 1)
    layers = torch.zeros(count, 4, side, side).index_add_(0, page.owner, layers).clamp(0, 1)
    images = paper(count, side, page.draws[:, -1]).lerp(layers[:, :3], layers[:, 3:])
    return (images.clamp(0, 1) * 255).round().byte().movedim(1, -1).contiguous()


def paper(count: int, side: int, draw: Tensor) -> Tensor:
    """Return dark paper, a little redder to the right and bluer downwards, [N, 3, side, side];
    ``draw`` [N, 10] in 0..1."""
    ramp = torch.linspace(0, 1, side)
    strength = 0.3 + 0.05 * draw[:, :2, None, None].float()
    red = (strength[:, 0] * ramp[None, None, :]).expand(count, side, side)
    blue = (strength[:, 1] * ramp[None, :, None]).expand(count, side, side)
    return torch.stack([red, torch.full_like(red, 0.05), blue], 1)
