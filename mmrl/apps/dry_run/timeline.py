"""Keeps the course of a tracked piece of work: the bytes of every part after each operation, and
where blocks begin; puts what equal blocks took in the place of stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Sizes = tuple[int, ...]  # bytes of each part, their sum last
Operation = tuple[float, float, bool]  # operations, bytes read and written, whether in half


SCRAP = 64  # bytes by which equal blocks may differ: numbers that Python drops sooner or later


class Uneven(Exception):
    """Says that blocks which look equal are not: nothing may be spared."""


class Event(NamedTuple):
    """Holds one call of torch: the bytes that are in use after it, and what it took; None: it moves
    no data."""

    sizes: Sizes
    operation: Operation | None


@dataclass
class Mark:
    """Marks where a block begins, ``direction`` forward or backward: the ``place``-th of ``row``,
    and ``key``, which equal blocks with equal inputs share."""

    direction: str
    row: tuple[int, int]
    place: int
    key: Any
    inner: bool = False  # neither the first nor the last of its row
    stands_in: bool = False
    after: bool = False  # on the way back, right after a stand-in
    at: int = -1  # of events
    sizes: Sizes = ()

    @property
    def replaced(self) -> bool:
        """Tell whether what its equals took is put in its place."""
        return self.stands_in or self.after

    def backward(self) -> Mark:
        return replace(self, direction="backward")


class Span(NamedTuple):
    """Holds what happened from one block's begin to the next one's, beside the bytes that were in
    use at its begin."""

    events: tuple[Event, ...]
    left: Sizes  # bytes more at its end


class Timeline:
    """Holds events and marks as they come; ``now`` tells the bytes in use."""

    def __init__(self, now: Callable[[], Sizes], checkpointing: bool = False):
        self.now = now
        self.checkpointing = checkpointing  # blocks are computed again on the way back
        # (storage, bytes) of trained weights that were converted
        self.casts: list[tuple[int, int]] = []
        self.events: list[Event] = []
        self.marks: list[Mark] = []
        self.ends_forward = -1  # number of events on the way there
        self.spans: dict[Any, list[Span]] = {}
        self.equal: dict[Any, Span] = {}  # by key, what two blocks took alike on the way there

    def mark(self, mark: Mark) -> None:
        """Note that a block begins here; the one before it is complete then."""
        mark.at = len(self.events)
        mark.sizes = self.now()
        if self.marks:
            mark.after = self.marks[-1].stands_in and _neighbours(self.marks[-1], mark)
            mark.after = mark.after and mark.direction == "backward"
            self._complete(self.marks[-1], mark)
        self.marks.append(mark)

    def _complete(self, mark: Mark, following: Mark) -> None:
        if not _neighbours(mark, following):
            if mark.replaced:
                raise Uneven("a block stands in whose neighbour does not follow")
            return
        if mark.inner and not mark.replaced:
            name = (mark.direction, mark.key)
            self.spans.setdefault(name, []).append(self._span(mark, following))

    def _span(self, mark: Mark, following: Mark) -> Span:
        events = tuple(
            Event(_less(event.sizes, mark.sizes), event.operation)
            for event in self.events[mark.at : following.at]
        )
        return Span(events, _less(following.sizes, mark.sizes))

    def repeated(self, key: Any) -> bool:
        """Tell whether two blocks of this key were passed through, and did the same."""
        spans = self.spans.get(("forward", key), [])
        if key not in self.equal and len(spans) > 1 and _alike(spans[-1], spans[-2]):
            self.equal[key] = spans[-1]
        return key in self.equal

    def whole(self) -> Iterator[tuple[bool, Event]]:
        """Yield every event of the work, (whether it is of the way there, event), with stand-ins
        replaced by what their equals took."""
        self._check_ways_back()
        moved = (0,) * len(self.now())
        begin = 0
        for number, mark in enumerate(self.marks):
            if not mark.replaced:
                continue
            if number + 1 == len(self.marks):
                raise Uneven("a block stands in that nothing follows")
            following = self.marks[number + 1]
            yield from self._native(begin, mark.at, moved)
            span = self._taken(mark)
            base = _more(mark.sizes, moved)
            forward = self._there(mark.at)
            for event in span.events:
                yield forward, Event(_more(event.sizes, base), event.operation)
            moved = _more(moved, _less(span.left, _less(following.sizes, mark.sizes)))
            begin = following.at
        yield from self._native(begin, len(self.events), moved)

    def _native(self, begin: int, end: int, moved: Sizes) -> Iterator[tuple[bool, Event]]:
        for number in range(begin, end):
            event = self.events[number]
            yield self._there(number), Event(_more(event.sizes, moved), event.operation)

    def _there(self, number: int) -> bool:
        return self.ends_forward < 0 or number < self.ends_forward

    def _taken(self, mark: Mark) -> Span:
        if mark.direction == "forward":
            return self.equal[mark.key]
        spans = self.spans.get((mark.direction, mark.key), [])
        if len(spans) < 2 or not all(_alike(span, spans[0]) for span in spans):
            raise Uneven("blocks that are equal on the way there differ on the way back")
        return spans[0]

    def _check_ways_back(self) -> None:
        """Raise Uneven unless stand-ins have a way back where their equals have one."""
        back = {(m.row, m.place) for m in self.marks if m.direction == "backward"}
        for mark in self.marks:
            returns = ("backward", mark.key) in self.spans
            if mark.stands_in and returns and (mark.row, mark.place) not in back:
                raise Uneven("a block stands in without a way back")


def _alike(span: Span, other: Span) -> bool:
    """Tell whether two blocks did the same operations and had the same bytes in use after each."""
    if span == other:
        return True
    return (
        [event.operation for event in span.events] == [event.operation for event in other.events]
        and all(_near(a.sizes, b.sizes) for a, b in zip(span.events, other.events))
        and _near(span.left, other.left)
    )


def _near(sizes: Sizes, other: Sizes) -> bool:
    return all(abs(a - b) <= SCRAP for a, b in zip(sizes, other))


def _neighbours(mark: Mark, following: Mark) -> bool:
    step = 1 if mark.direction == "forward" else -1
    place = (mark.direction, mark.row, mark.place + step)
    return place == (following.direction, following.row, following.place)


def _less(sizes: Sizes, other: Sizes) -> Sizes:
    return tuple(a - b for a, b in zip(sizes, other, strict=True))


def _more(sizes: Sizes, other: Sizes) -> Sizes:
    return tuple(a + b for a, b in zip(sizes, other, strict=True))
