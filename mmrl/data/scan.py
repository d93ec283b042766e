"""Opens every picture of a data set before training, so that a broken one does not end a night.

Pictures are decoded whole by several threads; what was found is remembered in the cache by path,
size and time of the file (of bytes in a table: by their hash), so that the next run only looks.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from typing import Any

from mmrl.core import distributed
from mmrl.core.pictures import (
    BROKEN,
    PictureError,
    TooLarge,
    check_size,
    limit,
    note_of,
    opened,
    upright_size,
)
from mmrl.core.pictures import reason as worded
from mmrl.utils.paths import cache_dir

VERSION = 2  # of what is found out about a picture
ANNOUNCED = 2000  # pictures from which a line says that they are looked at
CHUNK = 512  # pictures between two commits


@dataclass(frozen=True)
class Finding:
    """Says of a picture: its size (width, height) as it is seen, why it cannot be used, and what
    is done to it that its owner may not expect. ``refused``: it is whole or not, nobody looked."""

    size: tuple[int, int] = (0, 0)
    problem: str = ""
    note: str = ""
    refused: bool = False


def scan(
    sources: Sequence[Any], announce: bool = True, max_pixels: int | None = None
) -> list[Finding]:
    """Look at pictures: paths, bytes, or PIL images, which are taken as they are. Those of more
    than ``max_pixels`` (by default the process's limit) are not decoded."""
    files = {key_of(source): source for source in sources if isinstance(source, (str, bytes))}
    files.pop("", None)
    most = limit() if max_pixels is None else max_pixels
    findings = _of_files(files, announce, most) if files else {}
    return [
        findings.get(key_of(source), Finding(problem="no such file"))
        if isinstance(source, (str, bytes))
        else _of_image(source, most)
        for source in sources
    ]


def key_of(source: str | bytes) -> str:
    """Name a picture so that a change of the file changes the name; "" for a file that is gone."""
    if isinstance(source, bytes):
        return f"{VERSION} {blake2b(source, digest_size=20).hexdigest()}"
    try:
        known = os.stat(source)
    except OSError:
        return ""
    return f"{VERSION} {os.path.abspath(source)} {known.st_size} {known.st_mtime_ns}"


def look_at(source: str | bytes, max_pixels: int | None = None) -> Finding:
    """Decode one picture whole, if it is not larger than ``max_pixels``."""
    try:
        with closing(opened(source)) as image:
            check_size(image, max_pixels)
            note = note_of(image)
            size = upright_size(image)
            image.load()
        return Finding(size, "", note)
    except PictureError as error:
        return Finding(problem=str(error), refused=isinstance(error, TooLarge))
    except (*BROKEN, MemoryError) as error:
        return Finding(problem=worded(error))


def _of_image(image: Any, most: int) -> Finding:
    if not hasattr(image, "getexif"):
        return Finding(getattr(image, "size", None) or (0, 0))
    return _within(Finding(upright_size(image)), most)


def _within(finding: Finding, most: int) -> Finding:
    """Refuse a picture that was decoded, as another limit let it in."""
    try:
        check_size(finding, most)
    except TooLarge as error:
        return Finding(finding.size, str(error), refused=True)
    return finding


def _of_files(files: Mapping[str, Any], announce: bool, most: int) -> dict[str, Finding]:
    with _one_process_at_a_time(), _memory() as memory:
        findings = {} if memory is None else _remembered(memory, files)
        findings = {key: _within(finding, most) for key, finding in findings.items()}
        fresh = [key for key in files if key not in findings]
        if announce and len(fresh) >= ANNOUNCED and distributed.is_main():
            print(f"looking at {len(fresh)} pictures, once", file=sys.stderr, flush=True)
        workers = min(32, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers) as pool:
            for start in range(0, len(fresh), CHUNK):
                keys = fresh[start : start + CHUNK]
                several = [files[key] for key in keys]
                looked = dict(zip(keys, pool.map(look_at, several, repeat(most))))
                findings |= looked
                if memory is not None:
                    _remember(memory, looked)
    return findings


@contextmanager
def _memory() -> Iterator[sqlite3.Connection | None]:
    """Open what was found before; None where the cache cannot be written."""
    try:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(folder / "pictures.sqlite", timeout=60)
        connection.execute(
            "create table if not exists pictures (key text primary key, width integer, "
            "height integer, problem text, note text)"
        )
    except (OSError, sqlite3.Error):
        yield None
        return
    with closing(connection):
        yield connection


def _remembered(memory: sqlite3.Connection, keys: Iterable[str]) -> dict[str, Finding]:
    findings = {}
    try:
        for key in keys:
            row = memory.execute(
                "select width, height, problem, note from pictures where key = ?", (key,)
            ).fetchone()
            if row is not None:
                findings[key] = Finding((row[0], row[1]), row[2], row[3])
    except sqlite3.Error:
        return {}
    return findings


def _remember(memory: sqlite3.Connection, looked: Mapping[str, Finding]) -> None:
    rows = [
        (key, *each.size, each.problem, each.note)
        for key, each in looked.items()
        if not each.refused
    ]
    try:
        with memory:
            memory.executemany("insert or replace into pictures values (?, ?, ?, ?, ?)", rows)
    except sqlite3.Error:
        pass  # a full or read-only disk: they are looked at again next time


def _one_process_at_a_time() -> Any:
    """Let one of several processes look, and the others read what it found."""
    if distributed.process()[1] == 1 and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return nullcontext()
    from filelock import FileLock

    try:
        Path(cache_dir()).mkdir(parents=True, exist_ok=True)
    except OSError:
        return nullcontext()
    return FileLock(cache_dir() / "pictures.lock")
