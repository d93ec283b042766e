"""Handles single values of a configuration: their place, display and conversion.

A conversion raises ValueError, with the reason if it is not just a wrong type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from reprlib import Repr
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from mmrl.core.errors import a_or_an
from mmrl.core.registry import Registry, options

WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
_SHORT = Repr()
_SHORT.maxstring = 70
_SHORT.maxother = 70
_SHORT.maxlist = 4
_SHORT.maxdict = 4
_SHORT.maxlevel = 3


@dataclass(frozen=True)
class Place:
    """Locates a value: its path of keys and, by ``marks``, its line."""

    path: tuple[Any, ...] = ()
    marks: Mapping[tuple[Any, ...], str] = field(default_factory=dict, repr=False)
    folder: Path | None = None  # of the configuration file: files may be named relative to it

    @classmethod
    def of(cls, where: str | Place) -> Place:
        return (
            where
            if isinstance(where, Place)
            else cls(tuple(part for part in where.split(".") if part))
        )

    def __truediv__(self, key: Any) -> Place:
        return Place((*self.path, key), self.marks, self.folder)

    def __str__(self) -> str:
        return ".".join(str(key) if str(key).isprintable() else repr(key) for key in self.path)

    def source(self) -> str:
        """Return ``file:line`` or ``command line: a.b=c`` of the value or its nearest parent; may
        be empty."""
        for length in range(len(self.path), -1, -1):
            if mark := self.marks.get(self.path[:length]):
                return mark
        return ""

    def say(self, message: str, source: str | None = None) -> str:
        return ": ".join(
            part
            for part in (self.source() if source is None else source, str(self), message)
            if part
        )


def show(value: Any) -> str:
    """Show a value as the user wrote it, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**20:
        return "an integer of more than 20 digits"
    return _SHORT.repr(value)


def _integer(value: Any, place: Place) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)  # 1e3 is a way to write 1000
    if type(value) is not int:
        raise ValueError
    if abs(value) >= 2**63:
        raise ValueError(f"expected an integer below 2^63, got {show(value)}")
    return value


def _number(value: Any, place: Place) -> float:
    if type(value) not in (int, float):
        raise ValueError
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {show(value)}")
    return number


def _truth(value: Any, place: Place) -> bool:
    if isinstance(value, str) and value.lower() in WORDS:
        return WORDS[value.lower()]
    if not isinstance(value, bool):
        raise ValueError
    return value


def _text(value: Any, place: Place) -> str:
    if isinstance(value, (bool, int, float)):
        raise ValueError(f"expected text, got {show(value)}; write it in quotes: '{show(value)}'")
    if not isinstance(value, str):
        raise ValueError
    return value


def _path(value: Any, place: Place) -> Path:
    """Resolve a path relative to the working directory, else to the configuration file."""
    if not isinstance(value, (str, Path)) or str(value) == "" or "\0" in str(value):
        raise ValueError
    path = Path(value)
    if path.parts[:1] == ("~",):
        path = Path.home().joinpath(*path.parts[1:])
    beside = place.folder / path if place.folder else path
    return path if exists(path) or not exists(beside) else beside


class Location(str):
    """Names where data lies: a file, a folder, files by a pattern, or a data set of the Hub."""


def _location(value: Any, place: Place) -> Location:
    """Resolve a path as ``_path`` does; anything else is unchanged, such as a hub id."""
    path = _path(value, place)
    if place.folder and is_pattern(str(value)) and lies_beside(str(value), place.folder):
        return Location(str(place.folder / str(value)))
    return Location(str(path)) if exists(path) else Location(str(value))


def is_pattern(path: str) -> bool:
    """Tell whether a path names files by a pattern: ``*.parquet``, ``shards/{000..012}.tar``."""
    return any(mark in path for mark in "*?[{")


def lies_beside(pattern: str, folder: Path) -> bool:
    """Tell whether a pattern names files in ``folder``, and none from the working directory."""
    if Path(pattern).is_absolute() or pattern.startswith("~"):
        return False
    loose = re.sub(r"\{[^}]*\}", "*", pattern)
    return next(Path().glob(loose), None) is None and next(folder.glob(loose), None) is not None


def exists(path: Path) -> bool:
    try:
        return path.exists()
    # a name too long for the system, or with characters it cannot hold
    except (OSError, ValueError):
        return False


def _nothing(value: Any, place: Place) -> None:
    if value is not None:
        raise ValueError


def expected(kind: Any) -> str:
    """Describe in words what to write."""
    if isinstance(kind, tuple) or get_origin(kind) in (Union, UnionType):
        names = [
            expected(choice) for choice in (kind if isinstance(kind, tuple) else get_args(kind))
        ]
        return f"{', '.join(names[:-1])} or {names[-1]}"
    if get_origin(kind) is Annotated:
        base, *metadata = get_args(kind)
        plug_ins = [a_or_an(item.kind) for item in metadata if isinstance(item, Registry)]
        return plug_ins[0] if plug_ins else expected(base)
    if get_origin(kind) is Literal:
        return (
            (f"one of {', '.join(map(repr, get_args(kind)))}")
            if len(get_args(kind)) > 1
            else repr(get_args(kind)[0])
        )
    if isinstance(kind, type) and is_dataclass(kind):
        return f"a mapping of {', '.join(options(kind))}"
    return _IN_WORDS.get(get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))


SCALARS: dict[Any, Callable[[Any, Place], Any]] = {
    int: _integer,
    float: _number,
    bool: _truth,
    str: _text,
    Path: _path,
    Location: _location,
    NoneType: _nothing,
    None: _nothing,
}
_IN_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    Location: "a path, or the id of a data set",
    NoneType: "null",
    None: "null",
    list: "a list",
    tuple: "a list",
    Sequence: "a list",
    Iterable: "a list",
    Collection: "a list",
    dict: "a mapping",
    Mapping: "a mapping",
}
