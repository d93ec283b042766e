"""Reports what pictures lose by the centre crop, and how far they are upscaled, at a model's
training size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.core.media.pictures import PictureError, is_pil, opened, upright_size

ANSWERS = ("answer", "chosen", "rejected")  # fields of a row that are learned
MOST_MEASURED = 5000  # pictures whose headers are read
Size = tuple[int, int]  # height, width
MUCH = 0.1  # of a picture's area, or its sides


@dataclass(frozen=True)
class Framed:
    """Holds a picture's name, its size and its target size."""

    name: str
    size: Size
    target: Size

    @property
    def scale(self) -> float:
        """Return the factor by which it is upscaled."""
        return max(want / side for side, want in zip(self.size, self.target))

    @property
    def lost(self) -> float:
        """Return the share of its area that is cropped."""
        return 1 - math.prod(self.target) / (self.scale**2 * math.prod(self.size))


def sentence(pictures: Iterable[Framed]) -> str:
    """Count the pictures that lose much by cropping, and those that are much upscaled; "" if
    none."""
    listed = list(pictures)
    cut = [each for each in listed if each.lost > MUCH]
    enlarged = [each for each in listed if each.scale > 1 + MUCH]
    parts = []
    if cut:
        worst = max(cut, key=lambda each: each.lost)
        parts.append(
            f"{len(cut)} lose more than a tenth of their area to the cut ({worst.name} most, "
            f"{worst.lost:.0%} of {worst.size[1]} x {worst.size[0]})"
        )
    if enlarged:
        worst = max(enlarged, key=lambda each: each.scale)
        parts.append(f"{len(enlarged)} are enlarged ({worst.name} most, {worst.scale:.1f} times)")
    if not parts:
        return ""
    targets = sorted({each.target for each in listed})
    sizes = f"{targets[0][1]} x {targets[0][0]}" if len(targets) == 1 else f"{len(targets)} sizes"
    option = "more buckets" if len(targets) > 1 else "buckets, an option of the data,"
    helps = f"{option} keep proportions" if cut else "take larger pictures"
    return f"brought to {sizes}, of {len(listed)} pictures {' and '.join(parts)}; {helps}"


def framed(
    prompts: Sequence[Mapping[str, Any]], targets: Sequence[Size | None]
) -> Iterator[Framed]:
    """Read the sizes of the pictures that are learned, of a sample if there are many, and the
    nearest of ``targets``."""
    step = 1 + len(prompts) // MOST_MEASURED
    for prompt, target in list(zip(prompts, targets, strict=True))[::step]:
        for name in ANSWERS:
            value = prompt.get(name)
            file = value if isinstance(value, str) and value.startswith("/") else ""
            if target is None or not (file or is_pil(value)):
                continue
            with suppress(PictureError, OSError, ValueError):
                width, height = upright_size(opened(file) if file else value)
                yield Framed(Path(file).name or "one", (height, width), target)


def nearest(size: Size, buckets: Sequence[Size]) -> Size:
    """Return the bucket of the nearest aspect ratio; in a tie, that of the nearest area."""

    def apart(bucket: Size) -> tuple[float, float]:
        proportions = math.log(bucket[0] / bucket[1]) - math.log(size[0] / size[1])
        area = math.log(math.prod(bucket)) - math.log(math.prod(size))
        return abs(proportions), abs(area)

    return min(buckets, key=apart)
