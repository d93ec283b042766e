"""Finds the pictures and videos that rows name or contain."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.parse import unquote

from mmrl.core.media.clips import NO_RATE, is_frames
from mmrl.core.media.pictures import check_size, opened
from mmrl.core.paths import cache_dir
from mmrl.core.types import Prompt
from mmrl.data.sources.folders import PICTURES, VIDEOS

SOUNDS = (".wav", ".mp3", ".flac", ".ogg", ".m4a", ".opus")
FILES = (*PICTURES, *VIDEOS, *SOUNDS)
# values of a row that policies open as files, whatever their suffix
MEDIA = frozenset(("image", "images", "video", "videos", "audio", "audios"))
ADDRESSES = ("http://", "https://", "data:")
# how JPEG, PNG, GIF and WebP begin in base64, as tables of VLMEvalKit hold them
ENCODED = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")
LONGEST = 400  # characters of a path that are shown
SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")


def video(source: Any, folder: Path, *others: Path) -> Any:
    """Return the absolute path of a video, or its frames if they are listed; one whose bytes a row
    holds is written into the cache, at a path that is the same in every run. Raises ValueError for
    other bytes."""
    if isinstance(source, list):
        return [medium(frame, folder, *others) for frame in source]
    content = source.get("bytes") if isinstance(source, Mapping) else source
    if isinstance(content, bytes) and not _kind_of_video(content):
        raise ValueError("not a video that can be read; expected MP4, MOV, WebM, Matroska or AVI")
    return medium(source, folder, *others)


def clips(value: Any, folders: Sequence[Path], rate: Any) -> Any:
    """Return the clip that a row names, or its list of them, with absolute paths; a list of
    pictures is one clip with the row's frame ``rate``. Raises ValueError without one."""
    several = value if isinstance(value, list) and not is_frames(value) else [value]
    whole = [video(clip, *folders) for clip in several]
    if rate is None and any(isinstance(clip, list) for clip in whole):
        raise ValueError(f"its video: {NO_RATE}")
    return whole[0] if len(whole) == 1 else whole


def medium(source: Any, folder: Path, *others: Path) -> Any:
    """Return the absolute path of a picture or video, or the picture that the row itself holds: the
    bytes of its file, as parquet data sets have them, {bytes, path}, or a data: address. A relative
    path starts in ``folder``, or in one of the ``others`` if only there is such a file.

    Raises FileNotFoundError for a file that is not there, ValueError for addresses of the network.
    """
    if isinstance(source, Mapping):
        content = source.get("bytes")
        return medium(source["path"] if content is None else content, folder, *others)
    if isinstance(source, bytes):
        kind = _kind_of_video(source)
        return _stored(source, kind) if kind else opened(source)
    if not isinstance(source, (str, Path)):
        return source
    name = _named(str(source))
    if name.startswith("data:"):
        return opened(_embedded(name))
    if name.startswith(("http://", "https://")):
        raise ValueError(f"{name[:60]} is not a file; download it first")
    places = [os.path.join(each, name) for each in (folder, *others)]  # an absolute path stays
    path = next(filter(os.path.isfile, places), None)
    if path is None and name.startswith(ENCODED):
        return opened(_decoded(name, "its picture"))
    if path is None:
        where = "" if os.path.isabs(name) else "; relative paths start at the file that names them"
        raise FileNotFoundError(f"no file {places[0][:LONGEST]}{where}")
    return _resolved(path)


def _named(source: str) -> str:
    """Return the path that an address file:// means: its escapes (%20) are read, unless there is a
    file of that very name."""
    if not source.startswith("file://"):
        return source
    name = source.removeprefix("file://").removeprefix("localhost")
    return name if os.path.isfile(name) else unquote(name)


def placed(prompt: Prompt, folder: Path) -> Prompt:
    """Return a prompt whose files have absolute paths: relative ones start in ``folder``, that of
    the file which names them. Any value may be the path of an existing file, such as a reward's
    picture; what policies open is always a path."""
    named = [
        key
        for key, value in prompt.items()
        if (type(value) is str and value.find(".", -5) >= 0 and _ends_as_file(value))
        or key in MEDIA
    ]
    if not named:
        return prompt
    whole = {key: _placed(prompt[key], folder, key in MEDIA) for key in named if key != "text"}
    return {**prompt, **whole}


def _ends_as_file(value: str) -> bool:
    return value[-5:].lower().endswith(FILES)


def _placed(value: Any, folder: Path, is_opened: bool) -> Any:
    if isinstance(value, list) and is_opened:
        return [_placed(each, folder, True) for each in value]
    if not isinstance(value, str):
        return value
    name = _named(value)
    if name != value and os.path.isabs(name):
        return name
    if os.path.isabs(name) or name.startswith(ADDRESSES):
        return value
    path = _resolved(os.path.join(folder, name))
    is_file = os.path.isfile(path) or (is_opened and name.lower().endswith(FILES))
    return path if is_file else value


def _resolved(path: str) -> str:
    """Return an absolute path without links, resolving a folder of many files once."""
    head, tail = os.path.split(path)
    whole = os.path.join(_resolved_folder(os.path.abspath(head)), tail)
    return os.path.realpath(whole) if tail in ("", ".", "..") or os.path.islink(whole) else whole


@lru_cache(maxsize=4096)
def _resolved_folder(folder: str) -> str:
    return os.path.realpath(folder)


def folder_of(place: str, otherwise: Path) -> Path:
    """Return the folder that the paths of a row start in: that of its file, by its ``place``
    (file:line, file: row 3); ``otherwise`` if that is no file."""
    return _folder_of_file(place.rpartition(":")[0]) or otherwise


@lru_cache(maxsize=256)
def _folder_of_file(table: str) -> Path | None:
    path = Path(table)
    return path.parent if path.is_file() else None


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
    """Return what to check of a picture: its path, the bytes it was opened from, or the picture."""
    file = getattr(source, "fp", None)
    if file is not None and hasattr(file, "getvalue"):
        return file.getvalue()
    return str(source) if isinstance(source, Path) else source


def _kind_of_video(content: bytes) -> str:
    """Return the suffix for the bytes of a video file, by their first bytes; "" for others."""
    if content[4:8] in (b"ftyp", b"moov", b"mdat"):
        return ".mp4"
    if content.startswith(b"\x1aE\xdf\xa3"):  # EBML: Matroska, WebM
        return ".mkv"
    return ".avi" if content[:4] == b"RIFF" and content[8:12] == b"AVI " else ""


def _stored(content: bytes, kind: str) -> str:
    """Write a video into the cache under a hash of its bytes, unless it is there. Raises ValueError
    if the cache cannot be written."""
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
    return _decoded(content, head[:40])


def _decoded(content: str, name: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name}: broken base64: {error}") from error
