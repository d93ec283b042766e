"""Writes mmrl/config/known.json: every plug-in with its place and its options, to find mistakes in
a configuration before heavy imports (mmrl/config/known.py)."""

from __future__ import annotations

import inspect
import json
import sys
from collections import abc
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mmrl.config.known import TABLE, TYPES
from mmrl.config.schema import kind_of
from mmrl.core.registry import ALL, Registry, load_built_in, options

OURS = ("mmrl", "rewards", "samplers")
CONTAINERS = (list, tuple, dict, abc.Sequence, abc.Iterable, abc.Collection, abc.Mapping)
Records = dict[str, dict[str, str]]


def page() -> str:
    """Return the file's content, one plug-in per line."""
    load_built_in()
    records: Records = {}
    kinds = {}
    for registry in ALL.values():
        found = {n: e for n, e in registry.items() if e.__module__.partition(".")[0] in OURS}
        kinds[registry.kind] = {
            name: {"from": place_of(entry), "options": texts(entry, records)}
            | ({"refused": why} if (why := registry.refuses(entry)) else {})
            for name, entry in found.items()
        }
    listed = ",\n".join(f"{json.dumps(kind)}: {block(found)}" for kind, found in kinds.items())
    return f'{{"kinds": {{\n{listed}\n}},\n"records": {block(records)}}}\n'


def block(entries: dict[str, Any]) -> str:
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(e)}" for name, e in sorted(entries.items())
    )
    return f"{{\n{lines}\n}}"


def place_of(entry: Any) -> str:
    return f"{entry.__module__}:{entry.__qualname__}"


def texts(entry: Any, records: Records) -> dict[str, str]:
    """Return the options of a class or function: option -> type, and whether it has a default."""
    return {name: text(p, records) for name, p in options(entry).items()}


def text(parameter: inspect.Parameter, records: Records) -> str:
    kind = written(kind_of(parameter), records)
    if parameter.default is parameter.empty:
        return kind
    return f"{kind} = {'None' if parameter.default is None else '...'}"


def written(kind: Any, records: Records) -> str:
    """Return a type as text for ``Known``; ``Any`` if it cannot express it."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return annotated(inner[0], inner[1:], records)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inner))}]"
    if origin in (Union, UnionType):
        return f"Union[{', '.join(written(item, records) for item in inner)}]"
    if isinstance(kind, type) and is_dataclass(kind):
        return record(kind, records)
    if (origin or kind) in CONTAINERS:
        items = ["..." if item is ... else written(item, records) for item in inner]
        return (origin or kind).__name__ + (f"[{', '.join(items)}]" if items else "")
    if kind in (None, type(None)):
        return "None"
    return kind.__name__ if kind in TYPES else "Any"


def annotated(base: Any, metadata: tuple[Any, ...], records: Records) -> str:
    for item in metadata:
        if isinstance(item, Registry):
            return f"Annotated[Any, plug_in({item.kind!r})]"
    limits = [repr(item) for item in metadata if type(item).__module__ == "annotated_types"]
    return (
        f"Annotated[{', '.join([written(base, records), *limits])}]"
        if limits
        else written(base, records)
    )


def record(kind: type, records: Records) -> str:
    """Record a dataclass among the options, whose own options are listed once."""
    if place_of(kind) not in records:
        records[place_of(kind)] = {}  # it may be recursive
        records[place_of(kind)] = texts(kind, records)
    return f"record({place_of(kind)!r})"


if __name__ == "__main__":
    TABLE.write_text(page(), encoding="utf-8")
