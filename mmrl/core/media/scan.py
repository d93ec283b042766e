"""Looks at every picture and clip of a data set before training, so that a broken one does not end
a night.

Of a file its header is read, and of a picture whether the file ends where the picture does; what
that does not tell is decoded whole, as all is if the user asks (``mmrl data --check``). Several
threads look, and what was found is remembered in the cache by path, size and time of the file (of
bytes in a table: by their hash), so that the next run only looks that up.
"""

from __future__ import annotations

import io
import os
import sqlite3
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mmrl.core import distributed
from mmrl.core.media.clips import ClipError, check_whole, header_of
from mmrl.core.media.pictures import (
    BROKEN,
    PictureError,
    TooLarge,
    check_size,
    limit,
    note_of,
    opened,
    upright_size,
)
from mmrl.core.media.pictures import reason as worded
from mmrl.core.output import redraws
from mmrl.core.paths import cache_dir

VERSION = 4  # of what is found out about a file
ANNOUNCED = 2000  # files from which a bar, or a line, says that they are looked at
CHUNK = 512  # files between two commits
CLIPS = (".mp4", ".webm", ".mov", ".avi", ".mkv")


@dataclass(frozen=True)
class Finding:
    """Says of a picture or clip: its size (width, height) as it is seen, why it cannot be used, and
    what is done to it that its owner may not expect. ``refused``: it is whole or not, nobody
    looked; ``seconds``: of a clip, 0 where its header does not say."""

    size: tuple[int, int] = (0, 0)
    problem: str = ""
    note: str = ""
    refused: bool = False
    seconds: float = 0.0


_decoding: ContextVar[bool] = ContextVar("files are decoded whole", default=False)


@contextmanager
def decoding() -> Iterator[None]:
    """Let every look inside decode files whole."""
    token = _decoding.set(True)
    try:
        yield
    finally:
        _decoding.reset(token)


def scan(
    sources: Sequence[Any], announce: bool = True, max_pixels: int | None = None
) -> list[Finding]:
    """Look at pictures and clips: paths, bytes, or PIL images, which are taken as they are.
    Pictures of more than ``max_pixels`` (by default the process's limit) are not decoded."""
    keys = [key_of(source) if isinstance(source, (str, bytes)) else None for source in sources]
    files = {key: source for key, source in zip(keys, sources) if key}
    most = limit() if max_pixels is None else max_pixels
    findings = _of_files(files, announce, most) if files else {}
    return [
        _of_image(source, most)
        if key is None
        else findings.get(key, Finding(problem="no such file"))
        for key, source in zip(keys, sources)
    ]


def key_of(source: str | bytes) -> str:
    """Name a file so that a change of it changes the name; "" for one that is gone."""
    if isinstance(source, bytes):
        return f"{VERSION} {blake2b(source, digest_size=20).hexdigest()}"
    try:
        known = os.stat(source)
    except (OSError, ValueError):  # a name that no file can have
        return ""
    return f"{VERSION} {os.path.abspath(source)} {known.st_size} {known.st_mtime_ns}"


def is_clip(source: Any) -> bool:
    """Tell whether a file is a clip, by its ending."""
    return isinstance(source, str) and source.lower().endswith(CLIPS)


def look_at(source: str | bytes, max_pixels: int | None = None, whole: bool = False) -> Finding:
    """Look at one file; decode it ``whole``, or where its header and end do not say that all of it
    is there."""
    if is_clip(source):
        return _look_at_clip(str(source), whole)
    try:
        with closing(opened(source)) as image:
            check_size(image, max_pixels)
            is_there = not whole and _ends_whole(image, source)
            if not is_there:
                image.load()
            note = note_of(image)
            size = upright_size(image)
        return Finding(size, "", note)
    except PictureError as error:
        return Finding(problem=str(error), refused=isinstance(error, TooLarge))
    except (*BROKEN, MemoryError) as error:
        return Finding(problem=worded(error))


def _ends_whole(image: Any, source: str | bytes) -> bool:
    """Tell whether the file of an opened picture ends as its format ends; False where that cannot
    be told without decoding it."""
    with open(source, "rb") if isinstance(source, str) else io.BytesIO(source) as file:
        if image.format == "PNG":
            return _is_whole_png(image, file)
        head = file.read(8)
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - 2))
        if image.format == "JPEG":
            return file.read() == b"\xff\xd9"
        return image.format == "WEBP" and int.from_bytes(head[4:], "little") + 8 <= length


def _is_whole_png(image: Any, file: Any) -> bool:
    """Walk through the chunks of a PNG up to its end. PIL decodes its pixels in search of EXIF
    behind them; where there is none PIL is told so."""
    file.seek(8)
    pixels_begun = False
    while len(header := file.read(8)) == 8 and (kind := header[4:]) != b"IEND":
        if pixels_begun and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            return False
        pixels_begun |= kind == b"IDAT"
        file.seek(int.from_bytes(header[:4], "big") + 4, os.SEEK_CUR)
    if len(header) < 8:
        return False
    if "Raw profile type exif" not in image.info:
        image.info.setdefault("exif", b"")
    return True


def _look_at_clip(path: str, whole: bool) -> Finding:
    try:
        size, seconds = header_of(Path(path))
        if whole:
            check_whole(Path(path))
    except ClipError as error:
        return Finding(problem=str(error))
    return Finding(size, seconds=seconds or 0.0)


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
    whole = _decoding.get()
    look = partial(look_at, max_pixels=most, whole=whole)
    with _one_process_at_a_time(), _memory() as memory:
        findings = {} if memory is None else _remembered(memory, [*files], whole)
        findings = {
            key: finding if is_clip(files[key]) else _within(finding, most)
            for key, finding in findings.items()
        }
        fresh = [key for key in files if key not in findings]
        shown = announce and len(fresh) >= ANNOUNCED and distributed.is_main()
        with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
            for start in _steps(len(fresh), shown):
                keys = fresh[start : start + CHUNK]
                looked = dict(zip(keys, pool.map(look, [files[key] for key in keys])))
                findings |= looked
                if memory is not None:
                    _remember(memory, looked, whole)
    return findings


def _steps(count: int, shown: bool) -> Iterator[int]:
    """Yield where every chunk begins, with a bar on a terminal and a line elsewhere."""
    starts = range(0, count, CHUNK)
    if not shown:
        yield from starts
        return
    title = f"looking at {count} files, once"
    if not redraws(sys.stderr):
        print(title, file=sys.stderr, flush=True)
        yield from starts
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(starts, title, console=Console(stderr=True), transient=True)


@contextmanager
def _memory() -> Iterator[sqlite3.Connection | None]:
    """Open what was found before; None where the cache cannot be written."""
    try:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(folder / "pictures.sqlite", timeout=60)
        connection.execute(
            "create table if not exists files (key text primary key, width integer, "
            "height integer, problem text, note text, seconds real, whole integer)"
        )
    except (OSError, sqlite3.Error):
        yield None
        return
    with closing(connection):
        yield connection


def _remembered(memory: sqlite3.Connection, keys: Sequence[str], whole: bool) -> dict[str, Finding]:
    """Look up what was found; ``whole``: of files that were decoded."""
    findings: dict[str, Finding] = {}
    try:
        for start in range(0, len(keys), CHUNK):
            several = keys[start : start + CHUNK]
            rows = memory.execute(
                "select key, width, height, problem, note, seconds from files where whole >= ? "
                f"and key in ({','.join('?' * len(several))})",
                (int(whole), *several),
            )
            findings |= {row[0]: Finding(row[1:3], row[3], row[4], seconds=row[5]) for row in rows}
    except sqlite3.Error:
        return {}
    return findings


def _remember(memory: sqlite3.Connection, looked: Mapping[str, Finding], whole: bool) -> None:
    rows = [
        (key, *each.size, each.problem, each.note, each.seconds, int(whole))
        for key, each in looked.items()
        if not each.refused
    ]
    try:
        with memory:
            memory.executemany("insert or replace into files values (?, ?, ?, ?, ?, ?, ?)", rows)
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
