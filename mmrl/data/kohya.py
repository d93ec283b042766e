"""Reads the metadata of kohya's sd-scripts: meta_cap.json, an object {file: {caption, tags}},
and folders called 10_name, whose pictures are repeated ten times an epoch there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmrl.data.sources.folders import PICTURES

REPEATED = re.compile(r"(\d+)_.+")  # the name of a folder


def rows(row: Any, folder: Path) -> Iterator[Any]:
    """Yield the rows that an object of all pictures stands for, paths starting in ``folder``; any
    other row as it is. A caption comes before its tags, as there."""
    if not _is_of_all(row):
        yield row
        return
    for name, known in row.items():
        texts = [known.get(key) for key in ("caption", "tags")]
        words = [text.strip() for text in texts if isinstance(text, str) and text.strip()]
        rest = {key: value for key, value in known.items() if key not in ("caption", "tags")}
        yield rest | {"file_name": _file(name, folder), "text": ", ".join(words)}


def _is_of_all(row: Any) -> bool:
    return (
        isinstance(row, Mapping)
        and bool(row)
        and all(
            isinstance(known, Mapping) and {"caption", "tags"} & set(known)
            for known in row.values()
        )
    )


def _file(name: str, folder: Path) -> str:
    """Return the file that a key means, which may lack its suffix."""
    if (folder / name).suffix.lower() in PICTURES:
        return name
    endings = (folder / f"{name}{ending}" for ending in PICTURES)
    return next((str(file) for file in endings if file.is_file()), name)


def repeats(path: Any) -> int:
    """Return how often a picture is repeated by the name of its folder; 1 if the name has no
    number."""
    matched = REPEATED.fullmatch(Path(path).parent.name) if isinstance(path, str) else None
    return int(matched[1]) if matched else 1
