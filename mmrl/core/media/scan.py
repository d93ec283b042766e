"""Checks every picture and clip of a data set before training, so that a broken one does not end a
long run.

The header is read and, for a picture, whether its file is complete; if that is not conclusive the
file is decoded, as all are by ``mmrl data --check``. Several threads work, and results are cached
by path, size and time of the file (bytes in a table: by their hash), so that the next run only
looks them up.
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
    is_pil,
    limit,
    note_of,
    opened,
    upright_size,
)
from mmrl.core.media.pictures import reason as worded
from mmrl.core.output import redraws
from mmrl.core.paths import cache_dir

VERSION = 4  # version of the cached findings
ANNOUNCED = 2000  # number of files from which progress is shown
CHUNK = 512  # files between two commits
CLIPS = (".mp4", ".webm", ".mov", ".avi", ".mkv")


@dataclass(frozen=True)
class Finding:
    """Result for a picture or clip: its size (width, height) upright, why it cannot be used, and
    conversions that its owner may not expect. ``refused``: not checked for completeness;
    ``seconds``: of a clip, 0 if its header does not say."""

    size: tuple[int, int] = (0, 0)
    problem: str = ""
    note: str = ""
    refused: bool = False
    seconds: float = 0.0


_decoding: ContextVar[bool] = ContextVar("files are decoded whole", default=False)


@contextmanager
def decoding() -> Iterator[None]:
    """Make every check inside decode whole files."""
    token = _decoding.set(True)
    try:
        yield
    finally:
        _decoding.reset(token)


def scan(
    sources: Sequence[Any], announce: bool = True, max_pixels: int | None = None
) -> list[Finding]:
    """Check pictures and clips: paths, bytes, or PIL images, which are always accepted. Pictures of
    more than ``max_pixels`` (by default the process's limit) are not decoded."""
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
    """Return a key that changes with the file; "" if it does not exist."""
    if isinstance(source, bytes):
        return f"{VERSION} {blake2b(source, digest_size=20).hexdigest()}"
    try:
        known = os.stat(source)
    except (OSError, ValueError):  # not a possible file name
        return ""
    return f"{VERSION} {os.path.abspath(source)} {known.st_size} {known.st_mtime_ns}"


def is_clip(source: Any) -> bool:
    """Tell whether a file is a clip, by its ending."""
    return isinstance(source, str) and source.lower().endswith(CLIPS)


def look_at(source: str | bytes, max_pixels: int | None = None, whole: bool = False) -> Finding:
    """Check one file; decode it if ``whole``, or if its header and end do not show that it is
    complete."""
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
    """Tell whether the file of an opened picture ends as its format does; False if only decoding
    can tell."""
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
    """Walk through the chunks of a PNG up to its end. PIL decodes its pixels to search for EXIF
    after them; if there is none, mark it as absent."""
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
    if not is_pil(image):
        return Finding(getattr(image, "size", None) or (0, 0))
    return _within(Finding(upright_size(image)), most)


def _within(finding: Finding, most: int) -> Finding:
    """Refuse a picture that a higher limit let through."""
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
    """Yield the start of every chunk, with a progress bar on a terminal and log lines elsewhere."""
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
    """Open the cache of findings; None if it cannot be written."""
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
    """Look up findings; ``whole``: only of files that were decoded."""
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
        pass  # a full or read-only disk: they are checked again next time


def _one_process_at_a_time() -> Any:
    """Let one of several processes check, and the others read its findings."""
    if distributed.process()[1] == 1 and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return nullcontext()
    from filelock import FileLock

    try:
        Path(cache_dir()).mkdir(parents=True, exist_ok=True)
    except OSError:
        return nullcontext()
    return FileLock(cache_dir() / "pictures.lock")
