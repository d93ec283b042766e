"""Renames the columns of rows, and filters rows by their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mmrl.core.errors import UserError

CONDITIONS = ("min", "max", "in", "not", "contains", "matches", "min_length", "max_length")


def renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Give columns the names that mmrl knows; ``columns`` says what each is called in the row.

    Several names may mean one column. Raises ValueError for a column that is not there.
    """
    named = {key: value for key, value in row.items() if key not in columns.values()}
    for ours, theirs in columns.items():
        if theirs not in row:
            raise ValueError(
                f"no column {theirs!r} (columns.{ours}); it has {', '.join(map(str, row))}"
            )
        named[ours] = row[theirs]
    return named


class Filters:
    """Chooses rows by conditions on their columns, all of which must hold.

    ``filters``: column -> a value that it must have, a list of such, or an object of ``min``,
    ``max``, ``in``, ``not`` (a value or a list), ``contains``, ``matches`` (a regular expression),
    ``min_length``, ``max_length`` (of a text or a list). A row without the column does not pass.
    """

    def __init__(self, filters: Mapping[str, Any], columns: Mapping[str, str] = {}):
        self.conditions = {
            columns.get(column, column): _conditions(column, wish)
            for column, wish in filters.items()
        }
        self.met: set[str] = set()  # columns that some row had

    def failed(self, row: Any) -> str | None:
        """Return the condition that a row does not meet, for the count; None if it passes."""
        if not isinstance(row, Mapping):
            return None  # it is broken, which is reported elsewhere
        for column, conditions in self.conditions.items():
            value = row.get(column)
            if column in row:
                self.met.add(column)
            for name, wish in conditions.items():
                if value is None or not _holds(value, name, wish):
                    return f"{column} {name} {_shown(wish)}"
        return None

    def check(self, columns: list[str]) -> None:
        """Raise UserError if a column was in no row, once all were read."""
        if absent := [column for column in self.conditions if column not in self.met]:
            raise UserError(
                f"filters.{absent[0]}: no row has this column; rows have {', '.join(columns)}"
            )


def _conditions(column: str, wish: Any) -> dict[str, Any]:
    """Return a filter as conditions by name. Raises UserError for an invalid one."""
    if isinstance(wish, list):
        return {"in": wish}
    if not isinstance(wish, Mapping):
        return {"in": [wish]}
    if unknown := [name for name in wish if name not in CONDITIONS]:
        raise UserError(f"filters.{column}.{unknown[0]}: known are {', '.join(CONDITIONS)}")
    conditions = dict(wish)
    for name in ("in", "not"):
        if name in conditions and not isinstance(conditions[name], list):
            conditions[name] = [conditions[name]]
    for name in ("min", "max", "min_length", "max_length"):
        limit = conditions.get(name, 0)
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            raise UserError(f"filters.{column}.{name}: expected a number, got {limit!r}")
    if "matches" in conditions:
        try:
            conditions["matches"] = re.compile(conditions["matches"])
        except (re.error, TypeError) as error:
            raise UserError(
                f"filters.{column}.matches: not a regular expression: {error}"
            ) from error
    return conditions


def _holds(value: Any, name: str, wish: Any) -> bool:
    if name in ("in", "not"):
        return (value in wish or str(value) in map(str, wish)) == (name == "in")
    if name == "contains":
        return wish in value if isinstance(value, (str, list)) else False
    if name == "matches":
        return wish.search(str(value)) is not None
    size = _size(value) if name.endswith("length") else _number(value)
    if size is None:
        return False
    return bool(size >= wish if name.startswith("min") else size <= wish)


def _size(value: Any) -> int | None:
    return len(value) if isinstance(value, (str, list, tuple)) else None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _shown(wish: Any) -> str:
    if isinstance(wish, re.Pattern):
        return str(wish.pattern)
    return ", ".join(map(str, wish)) if isinstance(wish, list) else str(wish)
