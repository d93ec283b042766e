"""Finds the pictures and videos that rows name, or hold themselves."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from mmrl.core.pictures import check_size, opened
from mmrl.utils.paths import cache_dir

SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")


def video(source: Any, folder: Path) -> Any:
    """Return the whole path of a video, or its frames; one whose bytes a row holds is written into
    the cache, where it keeps its place between runs. Raises ValueError for other bytes."""
    content = source.get("bytes") if isinstance(source, Mapping) else source
    if isinstance(content, bytes) and not _kind_of_video(content):
        raise ValueError("not a video that can be read; expected MP4, MOV, WebM, Matroska or AVI")
    return medium(source, folder)


def medium(source: Any, folder: Path) -> Any:
    """Return the whole path of a picture or video, or what the row itself holds of a picture: the
    bytes of its file, as parquet data sets have them, {bytes, path}, or a data: address.

    Raises ValueError for a file that is not there, and for addresses of the network.
    """
    if isinstance(source, Mapping):
        content = source.get("bytes")
        return medium(source["path"] if content is None else content, folder)
    if isinstance(source, bytes):
        kind = _kind_of_video(source)
        return _stored(source, kind) if kind else opened(source)
    if not isinstance(source, (str, Path)):
        return source
    name = str(source).removeprefix("file://")
    if name.startswith("data:"):
        return opened(_embedded(name))
    if name.startswith(("http://", "https://")):
        raise ValueError(f"{name[:60]} is not a file; download it first")
    path = folder / name  # a whole path stays
    if not path.is_file():
        raise ValueError(f"no file {path}; the option images names the folder that paths start in")
    return str(path.resolve())


def inline_picture(value: Any, max_pixels: int) -> Any:
    """Open a value that is the file of a picture, as bytes or {bytes, path}; others stay. Raises
    PictureError for one of more than ``max_pixels``."""
    if isinstance(value, Mapping) and set(value) == {"bytes", "path"} and value["bytes"]:
        value = value["bytes"]
    elif not (isinstance(value, bytes) and value.startswith(SIGNATURES)):
        return value
    picture = opened(value)
    check_size(picture, max_pixels)
    return picture


def content_of(source: Any) -> Any:
    """Return what is to be looked at of a picture: its path, the bytes it was opened from, or the
    picture."""
    file = getattr(source, "fp", None)
    if file is not None and hasattr(file, "getvalue"):
        return file.getvalue()
    return str(source) if isinstance(source, Path) else source


def _kind_of_video(content: bytes) -> str:
    """Return the ending for the bytes of a video file, by how they begin; "" for others."""
    if content[4:8] in (b"ftyp", b"moov", b"mdat"):
        return ".mp4"
    if content.startswith(b"\x1aE\xdf\xa3"):  # EBML: Matroska, WebM
        return ".mkv"
    return ".avi" if content[:4] == b"RIFF" and content[8:12] == b"AVI " else ""


def _stored(content: bytes, kind: str) -> str:
    """Write a video into the cache under a hash of its bytes, unless it is there. Raises ValueError
    where the cache cannot be written."""
    path = cache_dir() / "videos" / f"{blake2b(content, digest_size=16).hexdigest()}{kind}"
    if path.is_file() and path.stat().st_size == len(content):
        return str(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError as error:
        raise ValueError(f"the video cannot be written to {path.parent}: {error}") from error
    return str(path)


def _embedded(address: str) -> bytes:
    """Decode a ``data:image/png;base64,...`` address."""
    head, _, content = address.partition(",")
    if not head.endswith(";base64"):
        raise ValueError(f"{head[:40]} is not base64")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{head[:40]}: broken base64: {error}") from error
