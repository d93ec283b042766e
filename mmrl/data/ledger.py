"""Counts what a data source read, left out, held out and found twice.

Sources report a ``Summary`` when they are built; ``collecting`` takes them, so that a run, a dry
run and ``mmrl data`` can say what will be trained on, whatever curricula wrap the sources.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from mmrl.core.broken_rows import first_of, refuse, refuse_alike

SHOWN = 5  # rows in a message


@dataclass
class Summary:
    """Counts the rows of one source. ``dropped`` and ``filtered`` are not in the other counts."""

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
    skips: bool = False  # broken rows are left out
    notes: Counter[str] = field(default_factory=Counter)  # what was done to pictures -> how many

    @property
    def stops(self) -> bool:
        """Tell whether training stops at the broken rows."""
        return bool(self.dropped) and not self.skips

    @property
    def rows(self) -> int:
        """Return how many rows were examined."""
        return self.read - self.filtered.total()

    def lines(self) -> list[str]:
        """Describe the counts in sentences, the first with all of them."""
        counts = [f"{self.read} rows read" + (", up to the limit" if self.limited else "")]
        if self.dropped:
            counts.append(f"{len(self.dropped)} broken" + " and left out" * self.skips)
        if self.filtered:
            counts.append(f"{sum(self.filtered.values())} left out by filters")
        counts += [f"{count} {why}" for why, count in self.undecided.items()]
        how = f" ({self.split})" if self.split else ""
        counts.append(f"{self.train} to train on")
        counts.append(f"{self.held_out} held out{how}")
        if self.repeated:
            counts.append(f"{self.repeated} repeat another row")
        named = self.dropped if self.skips else []  # those that stop a run are listed elsewhere
        lost = [f"    left out: {problem}" for problem in named[:SHOWN]]
        if len(named) > SHOWN:
            lost.append(f"    and {len(named) - SHOWN} more (mmrl data CONFIG lists them)")
        notes = [f"{self.name}: {count} pictures: {note}" for note, count in self.notes.items()]
        return ["\n".join([f"{self.name}: {', '.join(counts)}", *lost]), *notes]


_collected: ContextVar[list[Summary] | None] = ContextVar("summaries of sources", default=None)


@contextmanager
def collecting() -> Iterator[list[Summary]]:
    """Collect the summaries of all sources that are built inside, in order. The caller then refuses
    broken rows (``refuse_broken``), with those found elsewhere."""
    summaries: list[Summary] = []
    token = _collected.set(summaries)
    try:
        yield summaries
    finally:
        _collected.reset(token)


def report(summary: Summary) -> None:
    """Report the summary of a source that was just built; outside ``collecting``, refuse broken
    rows, or warn of those that are left out."""
    summaries = _collected.get()
    if summaries is not None:
        summaries.append(summary)
        return
    refuse_broken([summary], summary.rows - len(summary.dropped))
    if summary.dropped:
        warnings.warn(
            f"{len(summary.dropped)} of {summary.rows} rows are broken:\n    "
            f"{first_of(summary.dropped)}\n  left out",
            stacklevel=5,
        )


def refuse_broken(summaries: Sequence[Summary], whole: int, unfit: Sequence[str] = ()) -> None:
    """Raise UserError with all broken rows in one list: those that sources dropped, and of the
    ``whole`` ones those that are ``unfit`` for the policy, "place: why". Rows of sources with
    ``broken: skip`` are left out, but for many that are broken alike; unfit ones where all sources
    have it."""
    count = whole + sum(len(summary.dropped) for summary in summaries)
    skips = bool(summaries) and all(summary.skips for summary in summaries)
    stopping = [problem for each in summaries if each.stops for problem in each.dropped]
    stopping += [] if skips else unfit
    if stopping:
        refuse(stopping, count)
    for summary in summaries:
        refuse_alike(summary.dropped, summary.rows)
    refuse_alike([*unfit], count)
