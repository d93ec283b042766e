"""Defines what a reader returns: a value, and how well it could be parsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, Never, TypeVar

Status = Literal[
    "ok", "repaired", "wrong_count", "out_of_range", "degenerate", "inverted", "unparseable"
]
SEVERITY: tuple[Status, ...] = (
    "ok",
    "repaired",
    "wrong_count",
    "out_of_range",
    "degenerate",
    "inverted",
    "unparseable",
)

Value = TypeVar("Value", covariant=True)


@dataclass(frozen=True)
class Parsed(Generic[Value]):
    """Holds an answer: ``value`` is what was read (None if unparseable); ``status`` how."""

    value: Value | None
    status: Status = "ok"


UNPARSEABLE: Parsed[Never] = Parsed(None, "unparseable")


def worst(*statuses: Status) -> Status:
    """Return the most serious of several statuses; "ok" of none."""
    return max(statuses, key=SEVERITY.index, default="ok")
