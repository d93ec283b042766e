"""Keeps the rows of large data in a file that all processes of a machine map, instead of a copy in
the memory of each."""

from __future__ import annotations

import marshal
import os
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, overload

from mmrl.core.paths import cache_dir
from mmrl.core.types import Prompt

FEW = 20_000  # rows that every process may hold: some 10 MiB of short ones
SIMPLE = frozenset((str, int, float, bool, bytes, type(None)))
KEPT = 30 * 86400  # seconds that a file stays after it was last read
VERSION = 2  # of marshal, the last whose bytes are the same for the same row


class Stored(Sequence[Prompt]):
    """Reads rows from a mapped file on access; each access makes a new row.
    ``ends``: where each begins, and the last one ends."""

    def __init__(self, file: Path, ends: Sequence[int]):
        with file.open("rb") as opened:
            self.content = mmap(opened.fileno(), 0, access=ACCESS_READ)
        self.ends = ends

    def __len__(self) -> int:
        return len(self.ends) - 1

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        row: Prompt = marshal.loads(self.content[self.ends[place] : self.ends[place + 1]])
        return row

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a list, for another process, perhaps of another machine."""
        return list, (list(self),)


def stored(rows: list[Prompt]) -> Sequence[Prompt]:
    """Write rows into the cache, named by their content, and return them mapped. A few rows, rows
    that hold pictures, and all rows if the cache cannot be written, are returned as they are."""
    if len(rows) < FEW:
        return rows
    content, ends = bytearray(), array("Q", [0])
    try:
        for row in rows:
            if not (SIMPLE.issuperset(map(type, row.values())) or _is_plain(row)):
                return rows
            content += marshal.dumps(row, VERSION)
            ends.append(len(content))
        return Stored(_file_of(content), ends)
    except (OSError, RecursionError, ValueError):  # a full disk; nested too deeply
        return rows


def _is_plain(value: Any) -> bool:
    """Tell whether marshal restores a value unchanged; it turns arrays into bytes."""
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else type(value) in SIMPLE


def _file_of(content: bytearray) -> Path:
    """Return a file with this content, the same for all processes, whose time is that of its last
    reading. Writing a new one removes those that were not read for 30 days."""
    file = cache_dir() / "rows" / blake2b(content, digest_size=16).hexdigest()
    if file.is_file() and file.stat().st_size == len(content):
        with suppress(OSError):  # another user's
            os.utime(file)
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=file.parent, delete=False) as written:
        written.write(content)
    os.replace(written.name, file)
    _forget_old(file.parent)
    return file


def _forget_old(folder: Path) -> None:
    """Remove what was not read for 30 days; a process that maps such a file keeps it."""
    for file in folder.iterdir():
        with suppress(OSError):  # another process removed it, or may alone
            if time.time() - file.stat().st_mtime > KEPT:
                file.unlink()
