"""Defines ``segmentation``: IoU of the answer's mask and the ground truth."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mmrl.core.media.pictures import is_pil
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from rewards.answers.coords import Unscorable, answer_space, convert, extent, scale, truth_space
from rewards.answers.reading import UNPARSEABLE, Parsed, fenced, final, loose_json, reals, worst
from rewards.answers.shapes import boxes
from rewards.answers.verifiable import Verdict, Verifiable, need, tagged
from rewards.base.files import NoPath, of_a_request, open_picture
from rewards.card import card

POLYGONS = ("polygon", "polygons", "segmentation", "points", "contour")
LARGEST = 4096 * 4096  # pixels of a mask


@REWARDS.register("segmentation")
@card(
    media="text",
    needs="mask",
    pictures="mask",
    low=0,
    high=1,
    source="COCO masks (pycocotools); gIoU of LISA is the mean over samples",
)
class Segmentation(Verifiable):
    """Compare masks by IoU: polygons, COCO run lengths or boxes. Both empty: 1; one empty: 0.

    ``mask`` of the prompt: a picture or its path (every pixel but 0 belongs to it), an array [H,
    W], COCO run lengths ``{"size": [h, w], "counts": ...}``, or polygons ``[[x, y, x, y, ...],
    ...]`` in the space of the ground truths. The answer: ``[[x, y], ...]``, ``{"polygon":
    [...]}``, a list of polygons, run lengths of the original's size, or boxes. Polygons are filled
    as in COCO (pycocotools), in pixels of the original image.
    """

    spatial = True

    def judge(self, text: str, prompt: Prompt) -> Verdict:
        right = true_mask(prompt)
        height, width = right.shape
        answer = final(text)
        parsed = _answer(answer.value, (width, height), prompt)
        if parsed.value is None:
            return Verdict(0.0, "unparseable")
        mask = parsed.value
        status = worst(answer.status, parsed.status)
        either = int((mask | right).sum())
        if not either:
            return Verdict(1.0, status)
        return Verdict(
            int((mask & right).sum()) / either,
            status if mask.any() else worst(status, "degenerate"),
        )

    def ground_truth(self, prompt: Prompt) -> str:
        from pycocotools.mask import encode

        run_lengths = encode(np.asfortranarray(true_mask(prompt).astype(np.uint8)))
        return tagged(
            json.dumps(
                {"size": list(run_lengths["size"]), "counts": run_lengths["counts"].decode()}
            )
        )

    def wrong_answers(self, prompt: Prompt) -> dict[str, str]:
        from pycocotools.mask import encode

        right = true_mask(prompt)
        answers = {}
        for name, mask in (
            ("everything", np.ones_like(right)),
            ("nothing", np.zeros_like(right)),
            ("inverted", ~right),
        ):
            if not (mask == right).all():
                code = encode(np.asfortranarray(mask.astype(np.uint8)))
                answers[name] = tagged(
                    json.dumps({"size": list(code["size"]), "counts": code["counts"].decode()})
                )
        return answers


def true_mask(prompt: Prompt) -> np.ndarray:
    """Return the right mask, bool [H, W], in pixels of the original."""
    value = need(prompt, "mask")
    if isinstance(value, str) or is_pil(value):
        return _read(value)
    if isinstance(value, dict):
        mask = _run_lengths(value)
        if mask is None:
            raise Unscorable('"mask" is a record, but not {"size": [height, width], "counts": ...}')
        return mask
    if isinstance(value, list) and not _zeros_and_ones(value) and (rings := _rings(value)):
        size = extent(prompt, "original")
        if size is None:
            raise Unscorable(
                '"mask" is polygons, and the size of the image is not known: give '
                '"width" and "height"'
            )
        factors = scale(prompt, truth_space(prompt), "original")
        return _fill([convert(ring, factors) for ring in rings], size)
    mask = np.asarray(value)
    if mask.ndim != 2 or mask.dtype == object:
        raise Unscorable(
            f'"mask" has shape {list(mask.shape)}; expected [H, W], run lengths, polygons or a path'
        )
    return mask.astype(bool)


def _zeros_and_ones(value: list[Any]) -> bool:
    """Tell whether rows form a mask, not the corners of polygons: of equal length, and only
    integers 0 and 1."""
    rows = [row for row in value if isinstance(row, list)]
    return (
        1 < len(rows) == len(value)
        and len({len(row) for row in rows}) == 1
        and all(isinstance(v, int) and v in (0, 1) for row in rows for v in row)
    )


def _read(picture: Any) -> np.ndarray:
    """Return where a picture, or an image file, is not 0."""
    named = isinstance(picture, str)
    try:
        if named and of_a_request():
            raise NoPath
        return _of_file(picture) if named else _lit(picture)
    except (OSError, ValueError) as error:
        which = f" {picture}" if named else ""
        raise Unscorable(f'"mask"{which} cannot be read: {error}') from error


@lru_cache(maxsize=256)
def _of_file(path: str) -> np.ndarray:
    with open_picture(path) as image:
        return _lit(image)


def _lit(image: Any) -> np.ndarray:
    lit: np.ndarray = np.asarray(image.convert("L")) > 0
    return lit


def _answer(body: str, size: tuple[float, float], prompt: Prompt) -> Parsed[np.ndarray]:
    parsed = loose_json(fenced(body)) if fenced(body) != "[]" else Parsed([])
    value = parsed.value
    if value == []:
        return Parsed(np.zeros((int(size[1]), int(size[0])), dtype=bool))
    if isinstance(value, dict) and "counts" in value:
        mask = _run_lengths(value, size)
        return Parsed(mask, parsed.status) if mask is not None else UNPARSEABLE
    factors = scale(prompt, answer_space(prompt), "original")
    rings = _rings(value) if value is not None else []
    status = parsed.status
    if not rings:
        corners = boxes(body)
        status = corners.status
        rings = [
            (x0, y0, x1, y0, x1, y1, x0, y1)
            for x0, y0, x1, y1 in (s.values for s in corners.value or [])
        ]
    rings = [convert(ring, factors) for ring in rings]
    rings = [ring for ring in rings if all(math.isfinite(v) for v in ring)]
    return Parsed(_fill(rings, size), status) if rings else UNPARSEABLE


def _rings(value: Any) -> list[tuple[float, ...]]:
    """Return polygons as flat x, y, x, y ... of at least three corners; a list of four numbers is a
    box, not a polygon."""
    if isinstance(value, dict):
        low = {str(key).casefold(): v for key, v in value.items()}
        return next((_rings(low[key]) for key in POLYGONS if key in low), [])
    if not isinstance(value, list) or not value:
        return []
    if all(isinstance(v, list) and len(v) == 2 for v in value) and len(value) >= 3:
        value = [[v for pair in value for v in pair]]
    elif not isinstance(value[0], (list, dict)):
        value = [value]
    rings: list[tuple[float, ...]] = []
    for part in value:
        if isinstance(part, dict) or (
            isinstance(part, list) and part and isinstance(part[0], list)
        ):
            rings += _rings(part) if not (isinstance(part, list) and len(part) < 3) else []
        elif isinstance(part, list) and len(part) >= 6 and len(part) % 2 == 0:
            numbers = reals(part)
            rings += [numbers] if numbers is not None else []
    return rings


def _fill(rings: list[tuple[float, ...]], size: tuple[float, float]) -> np.ndarray:
    """Fill the union of polygons, bool [H, W], cut at the border of the image."""
    from pycocotools.mask import frPyObjects, merge

    width, height = (int(round(v)) for v in size)
    if width * height > LARGEST:
        raise Unscorable(f"a mask of {width} x {height} pixels is more than {LARGEST}")
    cut = [
        [min(max(v, 0.0), float((width, height)[i % 2])) for i, v in enumerate(ring)]
        for ring in rings
    ]
    runs = _runs(merge(frPyObjects(cut, height, width))["counts"].decode())
    assert runs is not None  # pycocotools has written them
    return _unroll(runs, (height, width))


def _run_lengths(
    value: dict[str, Any], size: tuple[float, float] | None = None
) -> np.ndarray | None:
    """Decode COCO run lengths, compressed or not, to bool [H, W]; None if broken or of another
    size."""
    shape = value.get("size")
    counts = value.get("counts")
    if not (
        isinstance(shape, list)
        and len(shape) == 2
        and all(isinstance(v, int) and v > 0 for v in shape)
    ):
        return None
    if shape[0] * shape[1] > LARGEST or (
        size is not None and tuple(shape) != (int(size[1]), int(size[0]))
    ):
        return None
    runs = counts if isinstance(counts, list) else _runs(counts)
    if (
        runs is None
        or not all(isinstance(v, int) and v >= 0 for v in runs)
        or sum(runs) != shape[0] * shape[1]
    ):
        return None
    return _unroll(runs, shape)


def _unroll(runs: list[int], shape: Sequence[int]) -> np.ndarray:
    """Expand runs of 0, 1, 0 ... down the columns -> bool [H, W]."""
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(shape[1], shape[0]).T


def _runs(text: Any) -> list[int] | None:
    """Decode COCO's compressed run lengths: 5 bits a character, from the fourth run on, differences
    to the run two before.

    Not decoded by pycocotools, whose C code trusts its input: here a model wrote it.
    """
    if not isinstance(text, str):
        return None
    runs: list[int] = []
    value = shift = 0
    for letter in text:
        bits = ord(letter) - 48
        if not 0 <= bits < 64 or shift > 50:
            return None
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return runs if not shift else None
