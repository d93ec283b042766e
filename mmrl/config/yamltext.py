"""Reads YAML with line numbers and without surprises: ``1e-4`` is a number, ``no`` and dates stay
text, nothing is constructed.

Scalars follow the core schema of YAML 1.2 (the YAML 1.1 that PyYAML speaks reads ``1e-4`` as text
and ``no`` as false).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import yaml

from mmrl.config.values import show
from mmrl.core.errors import UserError

TAG = "tag:yaml.org,2002:"
_MOST = 20_000  # values in one file: aliases can multiply without bound
_RESOLVERS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o[0-7]+", list("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def ignore_aliases(self, value: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # other line breaks and control characters need escapes
    quoted = not text.replace("\n", " ").isprintable()
    return dumper.represent_scalar(TAG + "str", text, style='"' if quoted else None)


_Dumper.add_representer(str, _represent_text)
for _name, (_pattern, _first) in _RESOLVERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


def write(plain: Any) -> str:
    """Write YAML that ``read`` reads back to the same."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


@lru_cache(maxsize=256)
def _composed(text: str) -> tuple[_Loader, yaml.Node | None]:
    """Compose the nodes of a text: most of the time of reading, and a program reads its files more
    than once."""
    loader = _Loader(text)
    return loader, loader.get_single_node()


def read(text: str, source: str) -> tuple[Any, dict[tuple[Any, ...], int]]:
    """Return the plain value and the line (from 1) of every key path. Raises UserError naming line
    and column."""
    try:
        loader, root = _composed(text)
        lines: dict[tuple[Any, ...], int] = {}
        return (None if root is None else _Reader(loader, source, lines).value(root, ())), lines
    except RecursionError as error:
        raise UserError(f"{source}: nested too deeply to be a configuration") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        shown = chr(error.character) if isinstance(error.character, int) else error.character
        raise UserError(f"{source}:{line}: character {shown!r}: {error.reason}") from error
    except yaml.MarkedYAMLError as error:
        raise UserError(_broken(error, text, source)) from error


def _broken(error: yaml.MarkedYAMLError, text: str, source: str) -> str:
    mark = error.problem_mark or error.context_mark
    assert mark  # the scanner, parser and composer always name a place
    lines = text.split("\n")
    number = min(mark.line, len(lines) - 1)
    line = lines[number].rstrip("\r")
    reason = ", ".join(part for part in (error.context, error.problem) if part)
    if error.problem_mark and error.context_mark and error.context_mark.line != mark.line:
        reason += f" (it began in line {error.context_mark.line + 1})"
    remedy = "; indent with spaces, not tabs" if "'\\t'" in (error.problem or "") else ""
    shown = line if len(line) <= 100 else line[:100] + " ..."
    pointer = f"\n    {' ' * mark.column}^" if mark.column <= 100 else ""
    return (
        f"{source}:{number + 1}: column {mark.column + 1}: broken YAML: {reason}{remedy}\n    "
        f"{shown}{pointer}"
    )


class _Reader:
    """Walks the nodes of one document."""

    def __init__(self, loader: _Loader, source: str, lines: dict[tuple[Any, ...], int]):
        self.loader = loader
        self.source = source
        self.lines = lines
        self.open: set[int] = set()
        self.count = 0

    def refuse(self, node: yaml.Node, message: str) -> UserError:
        return UserError(f"{self.source}:{node.start_mark.line + 1}: {message}")

    def value(self, node: yaml.Node, path: tuple[Any, ...]) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        self.count += 1
        if id(node) in self.open:
            raise self.refuse(node, "an alias that contains itself")
        if self.count > _MOST:
            raise self.refuse(node, f"more than {_MOST} values; a configuration is smaller")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        kind = "map" if isinstance(node, yaml.MappingNode) else "seq"
        if node.tag != TAG + kind:
            raise self.refuse(node, f"the tag {node.tag} is not allowed; write plain values")
        self.open.add(id(node))
        inner: Any
        if isinstance(node, yaml.MappingNode):
            inner = self.mapping(node, path)
        else:
            inner = self.sequence(node, path)
        self.open.discard(id(node))
        return inner

    def sequence(self, node: yaml.Node, path: tuple[Any, ...]) -> list[Any]:
        return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]

    def mapping(self, node: yaml.MappingNode, path: tuple[Any, ...]) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for key_node, item in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.refuse(key_node, "a key must be a word, not a list or a mapping")
            key = self.scalar(key_node)
            if key in values:
                first = self.lines[(*path, key)]
                raise self.refuse(
                    key_node, f"the key {show(key)} is given twice, first in line {first}; keep one"
                )
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            values[key] = self.value(item, (*path, key))
        return values

    def scalar(self, node: yaml.ScalarNode) -> Any:
        tag = node.tag.removeprefix(TAG)
        text = node.value
        if tag not in _SCALARS:
            raise self.refuse(node, f"the tag {node.tag} is not allowed; write plain values")
        try:
            return _SCALARS[tag](text)
        except (ValueError, KeyError) as error:
            raise self.refuse(
                node, f"{show(text)} is not {'an int' if tag == 'int' else 'a ' + tag}"
            ) from error


def _bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _int(text: str) -> int:
    if len(text) > 40:
        raise ValueError("too many digits")
    return int(text.replace("_", ""), 0)


def _float(text: str) -> float:
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "null": lambda _: None,
    "bool": _bool,
    "int": _int,
    "float": _float,
}
