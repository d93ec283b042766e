"""Keeps account of what a data source read, left out, held out and met twice.

Sources report a ``Summary`` when they are built; ``collecting`` takes them, so that a run, a dry
run and ``mmrl data`` can say what will be trained on, whatever curricula lie around the sources.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from mmrl.core.broken_rows import first_of

SHOWN = 5  # rows in a message


@dataclass
class Summary:
    """Counts the rows of one source. ``dropped`` and ``filtered`` are no part of the others."""

    name: str
    read: int = 0
    dropped: list[str] = field(default_factory=list)  # "place: why", of broken rows
    filtered: Counter[str] = field(default_factory=Counter)  # condition -> rows
    undecided: Counter[str] = field(default_factory=Counter)  # why no pair -> pairs
    limited: bool = False  # not all rows were read
    train: int = 0
    held_out: int = 0
    split: str = ""  # how the held-out ones were chosen
    repeated: int = 0  # rows that are equal to another one
    digest: str = ""  # of the texts and answers of all rows
    stops: bool = False  # training would stop at the broken rows
    skips: bool = False  # broken rows are left out
    notes: Counter[str] = field(default_factory=Counter)  # what was done to pictures -> how many

    def lines(self) -> list[str]:
        """Say it in sentences, the first with all counts."""
        counts = [f"{self.read} rows read" + (", up to the limit" if self.limited else "")]
        if self.dropped:
            counts.append(f"{len(self.dropped)} broken and left out")
        if self.filtered:
            counts.append(f"{sum(self.filtered.values())} left out by filters")
        counts += [f"{count} {why}" for why, count in self.undecided.items()]
        how = f" ({self.split})" if self.split else ""
        counts.append(f"{self.train} to train on")
        counts.append(f"{self.held_out} held out{how}")
        if self.repeated:
            counts.append(f"{self.repeated} repeat another row")
        lost = [f"    left out: {problem}" for problem in self.dropped[:SHOWN]]
        if len(self.dropped) > SHOWN:
            lost.append(f"    and {len(self.dropped) - SHOWN} more (mmrl data CONFIG lists them)")
        notes = [f"{self.name}: {count} pictures: {note}" for note, count in self.notes.items()]
        return ["\n".join([f"{self.name}: {', '.join(counts)}", *lost]), *notes]


_collected: ContextVar[list[Summary] | None] = ContextVar("summaries of sources", default=None)
_lenient: ContextVar[bool] = ContextVar("broken rows are only listed", default=False)


@contextmanager
def collecting(lenient: bool = False) -> Iterator[list[Summary]]:
    """Collect the summaries of all sources that are built inside, in the order of building;
    ``lenient``: broken rows are listed in them instead of an error."""
    summaries: list[Summary] = []
    tokens = _collected.set(summaries), _lenient.set(lenient)
    try:
        yield summaries
    finally:
        _collected.reset(tokens[0])
        _lenient.reset(tokens[1])


def is_lenient() -> bool:
    """Tell whether broken rows are only to be listed."""
    return _lenient.get()


def report(summary: Summary) -> None:
    """Hand in the summary of a source that was just built."""
    summaries = _collected.get()
    if summaries is not None:
        summaries.append(summary)


def left_out(problems: list[str], count: int) -> None:
    """Warn of broken rows that are left out, where nobody collects summaries, which say so."""
    if _collected.get() is not None:
        return
    warnings.warn(
        f"{len(problems)} of {count} rows are broken:\n    {first_of(problems)}\n  left out",
        stacklevel=5,
    )
