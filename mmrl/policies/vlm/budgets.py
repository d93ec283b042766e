"""Keeps prompts within their token budgets: images are scaled down, or prompts dropped, and
reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.core.broken_rows import BrokenRows
from mmrl.core.errors import UserError
from mmrl.core.media.pictures import opened
from mmrl.core.types import Prompt
from mmrl.policies.vlm.media import Budgets, images_of, where

TRIES = 12  # with ever smaller images
STUCK = 3  # tries without effect, as with processors of fixed size or tiles
SHOWN = 5  # rows named in a report


@dataclass(frozen=True)
class Cost:
    """Counts the tokens of a prompt: those of images and frames, and all."""

    images: int
    tokens: int


class TooLong(UserError):
    """Signals a prompt that exceeds its budget however small its images."""


class Shrink:
    """Searches the scale at which a prompt's images fit the budget."""

    def __init__(self, budgets: Budgets):
        self.budgets = budgets
        self.image_costs: list[int] = []

    def next(self, cost: Cost, shrinkable: bool, name: str) -> float:
        """Return the factor for pixels after a try of this cost; 1: it fits. Raises TooLong."""
        over = [
            (kind, used, limit)
            for kind, used, limit in (
                ("image_tokens", cost.images, self.budgets.image_tokens),
                ("prompt_tokens", cost.tokens, self.budgets.prompt_tokens),
            )
            if limit is not None and used > limit
        ]
        if not over:
            return 1
        self.image_costs.append(cost.images)
        allowed = min(limit - (used - cost.images) for _, used, limit in over)
        stuck = (
            len(self.image_costs) > STUCK
            and self.image_costs[-1] == self.image_costs[-1 - STUCK]
            or len(self.image_costs) > TRIES
        )
        if self.budgets.overlong != "resize" or not shrinkable or allowed <= 0 or stuck:
            kind, used, limit = over[0]
            why = ", and making its images smaller does not help" if stuck else ""
            raise TooLong(
                f"{name}: {used} {kind.replace('_', ' ')}, more than budgets.{kind} = {limit}{why}"
            )
        return max(0.2, 0.97 * allowed / max(cost.images, 1))


def admit(
    prompts: Sequence[Prompt], budgets: Budgets, measure: Callable[[Prompt], tuple[Cost, float]]
) -> Admitted:
    """Return the prompts that fit, or fit with smaller images. Reads images and videos only if a
    budget of tokens is set.

    Raises BrokenRows for those that do not fit where ``budgets.overlong`` is "error".
    """
    fitting = []
    shrunk = []
    dropped: dict[int, str] = {}
    counted = budgets.image_tokens is not None or budgets.prompt_tokens is not None
    for place, prompt in enumerate(prompts):
        scale = 1.0
        if counted:
            try:
                scale = measure(prompt)[1]
            except TooLong as error:
                dropped[place] = str(error)
                continue
        fitting.append(prompt)
        if scale < 1 or budgets.max_pixels is not None and _largest(prompt) > budgets.max_pixels:
            shrunk.append(where(prompt))
    if dropped and budgets.overlong == "error":
        raise BrokenRows(dropped, len(prompts))
    return Admitted(fitting, tuple(_notes(len(prompts), shrunk, [*dropped.values()])))


@dataclass(frozen=True)
class Admitted:
    """Holds the admitted prompts, and a report of changed and dropped ones."""

    prompts: list[Prompt]
    notes: tuple[str, ...]


def _notes(count: int, shrunk: list[str], dropped: list[str]) -> list[str]:
    notes = []
    for rows, what in (
        (shrunk, "have images that are scaled down"),
        (dropped, "are left out as too long"),
    ):
        if rows:
            rest = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
            notes.append(
                f"budgets: {len(rows)} of {count} prompts {what}: {'; '.join(rows[:SHOWN])}{rest}"
            )
    return notes


def _largest(prompt: Prompt) -> int:
    """Return the pixels of a prompt's largest image, from the file's header."""
    return max((_pixels(source) for source in images_of(prompt)), default=0)


def _pixels(source: Any) -> int:
    from PIL import Image

    image = source if isinstance(source, Image.Image) else opened(source)
    width, height = image.size
    return int(width * height)
