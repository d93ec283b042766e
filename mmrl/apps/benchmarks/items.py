"""Defines what a benchmark is: items to answer, a rule that scores a sample, and its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mmrl.core.errors import UserError
from mmrl.core.registry import BENCHMARKS as BENCHMARKS
from mmrl.core.types import Prompt

ALL = "all"  # the category of a benchmark that has none


@dataclass(frozen=True)
class Item:
    """Holds one line of a benchmark: its place in the official file, by which samples are named;
    the category it is counted in; what is asked, with what the scorer needs; and the name it has in
    the official file, if it has one."""

    index: int
    category: str
    prompt: Prompt
    name: str = ""


@dataclass(frozen=True)
class Sample:
    """Holds a sample of an item: a picture's file, or an answer. ``row`` is what else its line of
    an answers file says, such as ``view``."""

    item: Item
    number: int
    file: Path | None = None
    text: str = ""
    row: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """Holds what a sample scored, 0 to 1 (of preference scores any number), NaN where it could not
    be scored; ``parts`` are further values of named categories, such as those of DPG's
    questions."""

    value: float
    parts: tuple[tuple[str, float], ...] = ()
    note: str = ""


class Benchmark(ABC):
    """Reads the official file of a benchmark and scores samples by its rule.

    A subclass sets ``items`` and writes ``score``. ``kind`` says what is sampled. ``headline`` says
    what the one number is: the mean over samples, or the mean of the categories' means.
    ``num_samples`` is how many samples a prompt has where the benchmark is followed to the letter.
    """

    kind: Literal["picture", "answer"] = "answer"
    headline: Literal["samples", "categories"] = "samples"
    measure = "accuracy"
    source = ""
    num_samples = 1
    items: list[Item]

    @abstractmethod
    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Score samples, in their order."""


def need_path(path: Path | None, name: str, what: str) -> Path:
    """Return the path of the official file, or say how to name it."""
    if path is None:
        raise UserError(f"--benchmark {name} needs {what}: add benchmark.path=FILE_OR_FOLDER")
    if not Path(path).exists():
        raise UserError(f"benchmark.path={path}: no such file or folder; expected {what}")
    return Path(path)


def numbered(rows: Sequence[tuple[str, Prompt, str]]) -> list[Item]:
    """Number (category, prompt, name) as items, in their order."""
    return [
        Item(i, category or ALL, prompt, name) for i, (category, prompt, name) in enumerate(rows)
    ]
