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

ALL = "all"  # default category


@dataclass(frozen=True)
class Item:
    """Holds one item of a benchmark: its index in the official file, by which samples are named;
    its category; the prompt, with the scorer's fields; and its name in the official file, if any.
    """

    index: int
    category: str
    prompt: Prompt
    name: str = ""


@dataclass(frozen=True)
class Sample:
    """Holds a sample of an item: a picture file, or an answer. ``row``: other fields of its line in
    an answers file, such as ``view``."""

    item: Item
    number: int
    file: Path | None = None
    text: str = ""
    row: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """Holds a sample's score, 0 to 1 (any number for preference scores), NaN if it could not be
    scored; ``parts`` are further values of named categories, such as those of DPG's questions."""

    value: float
    parts: tuple[tuple[str, float], ...] = ()
    note: str = ""


class Benchmark(ABC):
    """Reads the official file of a benchmark and scores samples by its rule.

    A subclass sets ``items`` and writes ``score``. ``kind``: what is sampled. ``headline``: the
    main number: the mean over samples, or the mean of the categories' means. ``num_samples``:
    samples per prompt in the official protocol.
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
    """Return the path of the official file, or explain how to set it."""
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
