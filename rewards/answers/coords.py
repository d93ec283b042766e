"""Converts between the coordinates of a model's answers and those of a dataset.

Four spaces: ``original`` pixels of the image file, ``resized`` pixels of what the model saw,
``rel1000`` (0 to 1000) and ``rel1`` (0 to 1). ``prompt["view"]``, set by the policy, names the
space of its answers and the sizes of every image; ``prompt["space"]``, from the dataset, that of
the ground truths (default ``original``). Without a view, answers are taken in the space of the
ground truths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

CoordSpace = Literal["original", "resized", "rel1000", "rel1"]
# the last two belong to notations
RELATIVE = {"rel1000": 1000.0, "rel1": 1.0, "rel1024": 1024.0, "rel100": 100.0}
Extent = tuple[float, float]  # width and height


class Unscorable(Exception):
    """Signals that the prompt's ground truth is missing or broken: the sample is NaN, not 0."""


def truth_space(prompt: Mapping[str, Any]) -> str:
    return _known(prompt.get("space") or "original", "space")


def answer_space(prompt: Mapping[str, Any]) -> str:
    view = prompt.get("view")
    return (
        _known(view["coords"], "view.coords")
        if isinstance(view, Mapping) and "coords" in view
        else truth_space(prompt)
    )


def _known(space: Any, field: str) -> str:
    if space not in get_args(CoordSpace):
        raise Unscorable(
            f'"{field}" is {space!r}; expected one of {", ".join(get_args(CoordSpace))}'
        )
    return str(space)


def extent(prompt: Mapping[str, Any], space: str) -> Extent | None:
    """Return width and height of the image in a space; None if unknown. ``prompt["image_index"]``
    (default 0) says which image the coordinates belong to."""
    if space in RELATIVE:
        return RELATIVE[space], RELATIVE[space]
    index = prompt.get("image_index", 0)
    view = prompt.get("view") or {}
    sizes = view.get({"original": "sizes", "resized": "resized"}[space])
    if sizes and isinstance(index, int) and -len(sizes) <= index < len(sizes):
        return _size(sizes[index], space)
    return _own_size(prompt, index) if space == "original" else None


def _size(pair: Sequence[Any], space: str) -> Extent:
    try:
        width, height = (float(v) for v in pair)
    except (TypeError, ValueError) as error:
        raise Unscorable(
            f"the {space} size of the image is {pair!r}; expected [width, height]"
        ) from error
    if not (0 < width < math.inf and 0 < height < math.inf):
        raise Unscorable(
            f"the {space} size of the image is {pair!r}; expected two positive numbers"
        )
    return width, height


def _own_size(prompt: Mapping[str, Any], index: int) -> Extent | None:
    """Return ``width`` and ``height`` of the prompt, else the size of its PIL image; files are not
    opened."""
    if "width" in prompt and "height" in prompt:
        return _size((prompt["width"], prompt["height"]), "original")
    images = prompt.get("images") or ([prompt["image"]] if prompt.get("image") is not None else [])
    if (
        isinstance(images, Sequence)
        and isinstance(index, int)
        and -len(images) <= index < len(images)
    ):
        size = getattr(images[index], "size", None)
        return _size(size, "original") if isinstance(size, tuple) else None
    return None


def scale(prompt: Mapping[str, Any], source: str, target: str) -> Extent:
    """Return the factors of x and y from one space to another.

    Raises:
        Unscorable: the spaces differ and the size of the image is not known.
    """
    if source == target:
        return 1.0, 1.0
    start = extent(prompt, source)
    end = extent(prompt, target)
    if start is None or end is None:
        raise Unscorable(
            f"coordinates go from {source} to {target}, but the size of the image is not "
            f"known: the policy gives it in "
            '"view"; offline, put "width" and "height" into the prompt'
        )
    return end[0] / start[0], end[1] / start[1]


def convert(values: Iterable[float], factors: Extent) -> tuple[float, ...]:
    """Multiply x, y, x, y ... each by its factor."""
    return tuple(value * factors[i % 2] for i, value in enumerate(values))
