"""Writes files and folders atomically, for checkpoints, exports and the artifact cache."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError

# a list of numbers as json.dumps indents it, one a line
NUMBERS = re.compile(r"\[\n\s*(?:[-+.\deE]+|null)(?:,\n\s*(?:[-+.\deE]+|null))*\n\s*\]")


def sha256(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Write a temporary file next to ``path``, then rename it, so that a reader never sees half of
    it."""
    draft = path.with_name(f".{path.name}.partial")
    draft.write_bytes(content)
    sync(draft)  # or a power cut may leave an empty file
    draft.replace(path)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes ``folder`` if the block succeeds and is deleted
    otherwise. ``folder`` is new or empty; an existing one is kept, as it may be a link or a mount.
    """
    target = folder.resolve()
    near = next(place for place in (target, *target.parents) if place.is_dir())
    draft = near / f".{target.name}.partial"
    shutil.rmtree(draft, ignore_errors=True)  # left by a killed process
    draft.mkdir()
    try:
        yield draft
        if near == target:
            for path in list(draft.iterdir()):
                path.rename(target / path.name)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def on_disk(folder: Path) -> Iterator[None]:
    """Convert disk errors, such as a full disk, to a UserError that names the folder."""
    try:
        yield
    except OSError as error:
        place = error.filename if isinstance(error.filename, str) else folder
        raise UserError(
            f"cannot write to {place}: {error.strerror or error}; check the free space and the "
            f"permissions there"
        ) from error


def check_writable(folder: Path) -> None:
    """Raise UserError if a folder, which may not exist yet, cannot be written: before minutes of
    work are lost."""
    target = folder.expanduser().absolute()
    near = next(place for place in (target, *target.parents) if place.exists())
    if not near.is_dir():
        raise UserError(f"cannot write to {folder}: {near} is a file; name another folder")
    try:
        tempfile.TemporaryFile(dir=near).close()
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror or error}; check the free space and the "
            f"permissions there, or name another folder"
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically; a list of numbers takes one line."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    text = NUMBERS.sub(lambda match: " ".join(match[0].split()), text)
    write_text(path, text + "\n")


def finite(value: Any) -> Any:
    """Replace non-finite numbers by null, as JSON requires."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())
