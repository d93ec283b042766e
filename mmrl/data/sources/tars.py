"""Reads WebDataset's tar files: consecutive files of one name and different suffixes are a row.

Nothing is extracted to the disk: members are read into memory, whatever their names say. Links and
devices are left out; pickles are refused.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from mmrl.core.errors import UserError
from mmrl.data.sources.text_files import BrokenRow, Row, loads, unpacked

PICTURES = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm")
VIDEOS = ("mp4", "webm", "mov", "avi", "mkv")
TEXTS = ("txt", "text", "caption", "transcript")
NUMBERS = ("cls", "cls2", "index", "id", "count", "score")
PICKLES = ("pkl", "pickle", "pyd", "pt", "pth", "joblib")
LARGEST = 2**28  # bytes of a member


def tar_rows(path: Path) -> Iterator[Row]:
    """Yield a row for every sample: its picture as ``image`` (several: ``images``), ``txt`` as
    ``text``, the keys of ``json``, and everything else under its suffix."""
    key = ""
    members: dict[str, Any] = {}
    with unpacked(path) as stream:
        for name, ending, content in _members(stream, path):
            if name != key and members:
                yield f"{path}: {key}", _row(key, members)
                members = {}
            key = name
            members[ending] = content
    if members:
        yield f"{path}: {key}", _row(key, members)


def _members(stream: IO[bytes], path: Path) -> Iterator[tuple[str, str, bytes | ValueError]]:
    """Yield (name without suffix, suffix, content) of the regular files of a tar, in order."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if not member.isfile() or name.startswith(".") or "." not in name:
                    continue
                folder = member.name[: len(member.name) - len(name)]
                stem, _, ending = name.partition(".")
                yield folder + stem, ending.lower(), _content(archive, member)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: the tar file is damaged or cut off: {error}") from error


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | ValueError:
    if member.size > LARGEST:
        return ValueError(f"{member.name} is larger than {LARGEST >> 20} MiB")
    file = archive.extractfile(member)  # a reader: nothing is written to the disk
    return file.read() if file is not None else b""


def _row(key: str, members: dict[str, bytes | ValueError]) -> Any:
    """Turn the members of a sample into a row, or say what is wrong with it."""
    row: dict[str, Any] = {}
    pictures = []
    try:
        for ending, content in members.items():
            if isinstance(content, ValueError):
                raise content
            kind = ending.rpartition(".")[2]
            if kind in PICTURES:
                pictures.append({"bytes": content, "path": f"{key}.{ending}"})
            elif kind == "json":
                row |= _object(content, f"{key}.{ending}")
            elif kind in VIDEOS:
                row["video"] = content
            else:
                row["text" if ending in TEXTS[:3] else ending] = _value(content, kind, key)
    except ValueError as error:
        return BrokenRow(str(error), "")
    if pictures:
        several = len(pictures) > 1
        row["images" if several else "image"] = pictures if several else pictures[0]
    return {"__key__": key, **row}


def _value(content: bytes, kind: str, key: str) -> Any:
    if kind in PICKLES:
        raise ValueError(f"{key}.{kind} is a pickle, which may run code when read: it is refused")
    if kind in (*TEXTS, *NUMBERS):
        text = content.decode("utf-8", errors="strict").strip()
        return int(text) if kind in NUMBERS and text.lstrip("-").isdigit() else text
    return content


def _object(content: bytes, name: str) -> dict[str, Any]:
    value = loads(content.decode("utf-8-sig"))
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds {type(value).__name__}, expected an object")
    return value
