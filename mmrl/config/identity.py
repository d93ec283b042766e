"""Fingerprints a built object as one text, as a key of disk caches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from mmrl.config.schema import Resolved
from mmrl.core.version import __version__

HEAVY = 2**20  # larger files are identified by size and time, smaller ones by content


def identity(value: Any) -> str:
    """Return name and code of the class or function, all options, and the files they name; equal
    texts mean equal scores."""
    if isinstance(value, Resolved):
        entry = value.entry
        return f"{entry.__module__}:{entry.__qualname__} {_code(entry)} {identity(value.options)}"
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{key}: {identity(value[key])}" for key in sorted(value, key=str))
            + "}"
        )
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(identity, value)) + "]"
    return f"{value!r}{_file(value)}" if isinstance(value, (str, Path)) else repr(value)


def _code(entry: Any) -> str:
    """Identify code by mmrl's version and the content of its file, so that every edit by a user
    counts."""
    try:
        source = Path(inspect.getsourcefile(entry) or "")
        return f"{__version__} {sha256(source.read_bytes()).hexdigest()[:16]}"
    except (OSError, TypeError):
        return __version__


def _file(name: str | Path) -> str:
    """Identify a file: a small one by its content, a large one by size and time, a folder by the
    files in it."""
    path = Path(str(name)).expanduser()
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
        return "".join(
            f" <{file.name} {_content(file)}>" for file in files[:1000] if file.is_file()
        )
    except (OSError, ValueError):
        return ""


def _content(file: Path) -> str:
    known = file.stat()
    if known.st_size <= HEAVY:
        return sha256(file.read_bytes()).hexdigest()[:16]
    return f"{known.st_size} {known.st_mtime_ns}"
