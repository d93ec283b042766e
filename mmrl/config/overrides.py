"""Applies ``a.b=c`` of the command line: sets one value of a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from mmrl.config.values import show
from mmrl.config.yamltext import read
from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import ADVANTAGES, DATA, OBJECTIVES, OPTIMIZERS, POLICIES, Registry

PLUGGED: dict[str, Registry] = {
    "policy": POLICIES,
    "data": DATA,
    "objective": OBJECTIVES,
    "advantage": ADVANTAGES,
    "optimizer": OPTIMIZERS,
}
SECTIONS = (
    *PLUGGED,
    "reward",
    "train",
    "evaluate",
    "plugins",
    "run",
    "log",
    "preset",
    "alarms",
    "ray",
    "start",
    "stages",
    "stage",
)


# source of overrides, for messages; ``mmrl.api`` sets it to an argument
WRITTEN_IN: ContextVar[str] = ContextVar("WRITTEN_IN", default="command line")


def override_with(plain: dict[Any, Any], marks: dict[tuple[Any, ...], str], override: str) -> None:
    """Set one value; the marks of replaced values are removed, and its mark is the override
    itself."""
    source = f"{WRITTEN_IN.get()}: {override}"
    name, equals, text = override.partition("=")
    if not equals or not name.strip(". "):
        raise UserError(f"{source}: expected key=value, such as train.iterations=100")
    try:
        value, _ = read(text, source)
    except UserError as error:
        reason = re.sub(
            r"^.*?:\d+: (column \d+: "
            r")?",
            "",
            str(error).removeprefix(source).partition("\n")[0],
        )
        raise UserError(
            f"{source}: cannot read the value: {reason}; put special characters in quotes"
        ) from error
    keys = split_keys(name.strip(), plain)
    if keys[0] not in SECTIONS:
        raise UserError(f"{source}: unknown section {keys[0]!r}; {suggest(keys[0], SECTIONS)}")
    path = _set(plain, keys, value, source)
    for known in [known for known in marks if known[: len(path)] == path]:
        del marks[known]
    for length in range(2, len(path) + 1):
        marks.setdefault(path[:length], source)  # also of the sections created on the way
    marks[path] = source


def split_keys(name: str, plain: Any) -> list[str]:
    """Split a dotted path into keys; a key with dots (``my.module:fn``) is found among the existing
    ones."""
    keys: list[str] = []
    rest = name.split(".")
    while rest:
        sizes = range(len(rest), 1, -1) if isinstance(plain, Mapping) else ()
        size = next((n for n in sizes if ".".join(rest[:n]) in plain), 1)
        if size == 1 and keys == ["reward"] and ":" in name:  # a new reward from a module
            size = next(
                n for n in range(1, len(rest) + 1) if ":" in "".join(rest[:n]) or n == len(rest)
            )
        key = ".".join(rest[:size])
        rest = rest[size:]
        keys.append(key)
        plain = plain.get(key) if isinstance(plain, Mapping) else None
    return keys


def _is_plug_in(inner: Mapping[str, Any], path: Sequence[str]) -> bool:
    """Tell whether this looks like ``{name: {options}}``, without the schema."""
    if len(inner) != 1 or path[-1] == "reward":
        return False
    return path[0] in PLUGGED and (
        len(path) == 1 or isinstance(next(iter(inner.values())), Mapping)
    )


def _set(plain: dict[Any, Any], keys: Sequence[str], value: Any, source: str) -> tuple[str, ...]:
    """Walk to the parent, opening ``name`` into ``{name: {}}`` and skipping a section's only name;
    then set."""
    path: list[str] = []
    mapping = plain
    rest = list(keys)
    while len(rest) > 1:
        key = rest.pop(0)
        path.append(key)
        inner = mapping.get(key)
        if isinstance(inner, str):
            inner = {inner: {}}
        elif inner is None:
            inner = {}
        elif isinstance(inner, (int, float)) and path[:-1] == ["reward"]:
            inner = {"weight": inner}
        elif not isinstance(inner, dict):
            raise UserError(
                f"{source}: {'.'.join(path)} is {show(inner)}, which has no "
                f"{rest[0]!r}; set it as a whole"
            )
        mapping[key] = mapping = inner
        if rest[0] not in inner and _is_plug_in(inner, path):
            rest.insert(0, next(iter(inner)))  # data.path=x means data.prompts.path=x
    mapping[rest[0]] = value
    return (*path, rest[0])
