"""Caches built folders: built once, atomically, checked by hash on every use.

``fetch("digits/sd3", recipe, build)`` calls ``build(folder)`` in a temporary folder, writes
``manifest.json`` (the sha256 of every file and the hash of the recipe), flushes everything to disk
and renames. The folder's name carries the recipe's hash, so a new recipe never meets old weights. A
lock makes other processes wait instead of building too.

What quickstart needs comes with the package, built, in ``SHIPPED``: used where it lies if its
recipe is the present one and every file has its sha256. ``python scripts/dev/ship_world.py`` builds
it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.files import sha256, sync

MANIFEST = "manifest.json"
SHIPPED = Path(__file__).resolve().parent / "shipped"


def root() -> Path:
    """Return ``$MMRL_CACHE``, or ``mmrl`` under ``$XDG_CACHE_HOME``, or ``~/.cache/mmrl``."""
    if folder := os.environ.get("MMRL_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "mmrl"


def recipe_hash(constants: Sequence[Any], versions: Sequence[int]) -> str:
    """Hash the values of recipes (dataclasses), in the order of their fields, and the versions of
    the code that follows them: twelve hex digits. Names of fields and the text of the code do not
    matter."""
    values = [astuple(constant) for constant in constants]
    return hashlib.sha256(repr((values, list(versions))).encode()).hexdigest()[:12]


def shipped(name: str, recipe: str) -> Path | None:
    """Find the folder that came with the package. None if there is none of that recipe, or, with a
    warning, if a file of it is not as it was written."""
    folder = SHIPPED / name
    if _recipe_of(folder) != recipe:
        return None
    if problem := damage(folder, recipe):
        print(f"{folder} is damaged ({problem}); building its like in the cache", file=sys.stderr)
        return None
    return folder


def _recipe_of(folder: Path) -> str | None:
    try:
        recipe: str = json.loads((folder / MANIFEST).read_text())["recipe"]
        return recipe
    except (OSError, ValueError, KeyError, TypeError):
        return None


class NotBuilt(Exception):
    """Raised instead of building, inside ``only_looking``."""


_only_looking = ContextVar("only_looking", default=False)


@contextmanager
def only_looking() -> Iterator[None]:
    """Build nothing inside: what is not there raises ``NotBuilt``."""
    token = _only_looking.set(True)
    try:
        yield
    finally:
        _only_looking.reset(token)


def built(make: Callable[[], Path]) -> Path | None:
    """Return the folder of ``make``, an artifact, if it exists; None if it would have to be
    built."""
    try:
        with only_looking():
            return Path(make())
    except NotBuilt:
        return None


def fetch(name: str, recipe: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of that name and recipe hash: shipped, or cached, built now if it is
    missing or damaged.

    Raises UserError if the cache directory cannot be written. What ``build`` raises passes through;
    nothing is left.
    """
    if folder := shipped(name, recipe):
        return folder
    folder = root() / f"{name}-{recipe}"
    if _only_looking.get():
        if not (folder / MANIFEST).is_file():
            raise NotBuilt(name)
        return folder
    from filelock import FileLock

    lock = FileLock(f"{folder}.lock")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise UserError(
            f"cannot write the cache {root()}: {error}; set MMRL_CACHE to another directory"
        ) from error
    try:
        if folder.exists():
            if not (problem := damage(folder, recipe)):
                return folder
            print(f"{folder} is damaged ({problem}); building it again", file=sys.stderr)
            shutil.rmtree(folder)
        _build(folder, recipe, build)
        return folder
    finally:
        lock.release()


def damage(folder: Path, recipe: str | None = None) -> str | None:
    """Describe what is wrong with a built folder, naming the file; None if every file is as it was
    written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or torn"
    if recipe is not None and manifest.get("recipe") != recipe:
        return f"{MANIFEST} is of another recipe"
    for name, digest in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if sha256(folder / name) != digest:
            return f"{name} has changed"
    return None


def _build(folder: Path, recipe: str, build: Callable[[Path], None]) -> None:
    # of a process that was killed; we hold the lock
    for old in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(old, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        manifest = {
            "recipe": recipe,
            "files": {str(p.relative_to(temporary)): sha256(p) for p in files},
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2))
        for path in [
            *files,
            temporary / MANIFEST,
            *(p for p in temporary.rglob("*") if p.is_dir()),
            temporary,
        ]:
            sync(path)
        temporary.chmod(0o755)  # mkdtemp makes it private
        os.rename(temporary, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
