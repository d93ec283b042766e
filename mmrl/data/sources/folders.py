"""Finds out what a folder holds: tables, tars, a saved data set, pictures with captions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.data.sources.text_files import PACKED, BrokenRow, Row, suffix_of, text_of

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
VIDEOS = (".mp4", ".webm", ".mov", ".avi", ".mkv")
CAPTIONS = (".txt", ".caption")
LINES = (".jsonl", ".ndjson")
TABLES = (".parquet", ".arrow")
# the files of a folder, in the order in which they are looked for
KINDS = (*LINES, ".json", ".csv", ".tsv", *TABLES, ".tar", ".txt")
PARTS = {"train": ("train",), "test": ("test", "val", "validation", "dev", "eval")}
METADATA = ("metadata", "captions")  # of pictures beside it, as data sets of the Hub have them
# every suffix that a file of a data set may have, and how many other files there may be
READ = frozenset((*PICTURES, *VIDEOS, *CAPTIONS, *KINDS, *PACKED))
MOST_STRANGERS = 20_000
STATE = "state.json"  # of what save_to_disk wrote


@dataclass(frozen=True)
class Tree:
    """Lists the files of a folder and below, in order, walking through it once and only when asked.
    Hidden folders, and links to folders, are not entered."""

    folder: Path

    @cached_property
    def files(self) -> list[Path]:
        """List all files but hidden ones. Raises UserError for what is clearly no data set: a home
        folder, a disk."""
        files: list[Path] = []
        strangers = 0
        for place, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            shown = [name for name in names if not name.startswith(".")]
            files += (Path(place, name) for name in shown)
            strangers += len(folders) + sum(not _is_read(name) for name in shown)
            if strangers > MOST_STRANGERS and 2 * strangers > len(files):
                raise UserError(
                    f"{self.folder}: no data set: after {strangers:,} folders and files of other "
                    f"kinds (and {len(files):,} files in all) the search was given up; name the "
                    f"folder that holds the pictures or tables, or the file of the rows"
                )
        return sorted(file for file in files if file.is_file())  # no sockets, no broken links

    def of_kind(self, *kinds: str) -> list[Path]:
        """List the files of rows of some kinds, packed ones too."""
        return [file for file in self.files if suffix_of(file) in kinds]

    def named(self, name: str) -> list[Path]:
        """List the files of a split: ``name.jsonl``, a folder of the name, or ``name-00000...``."""
        for kind in KINDS:
            for packed in ("", *PACKED):
                if (self.folder / f"{name}{kind}{packed}").is_file():
                    return [self.folder / f"{name}{kind}{packed}"]
        if (self.folder / name).is_dir():
            return files_of(self.folder / name)
        tables = self.of_kind(*TABLES, *LINES, ".csv", ".tsv", ".json", ".tar")
        return [file for file in tables if file.name.startswith((f"{name}-", f"{name}_"))]

    @property
    def metadata(self) -> list[Path]:
        """List the metadata tables of the pictures in the folder and its subfolders."""
        kinds = (*LINES, ".csv", ".parquet")
        return [f for f in self.files if f.stem in METADATA and f.suffix in kinds]

    @property
    def media(self) -> list[Path]:
        """List the pictures and videos that are files."""
        return [file for file in self.files if file.suffix.lower() in (*PICTURES, *VIDEOS)]


def files_of(folder: Path | Tree, pairs_first: bool = False) -> list[Path]:
    """List the files of rows in a folder and below, in order. Raises UserError for none.

    What ``save_to_disk`` wrote is read as its state says; else all files of the first kind that is
    there. Metadata of pictures come first, and pictures with captions, represented by the folder
    itself, come last, or before other tables (``pairs_first``).
    """
    tree = folder if isinstance(folder, Tree) else Tree(folder)
    if saved := _saved(tree.folder):
        return saved
    if tables := tree.metadata:
        return tables
    if pairs_first and any(caption_of(file) for file in tree.media):
        return [tree.folder]
    for kind in (*TABLES, ".tar", *LINES, ".csv", ".tsv", ".json"):
        if files := tree.of_kind(kind):
            return files
    if tree.media:
        return [tree.folder]
    raise UserError(
        f"{tree.folder}: no rows there; expected train.jsonl (.json, .csv, .tsv, .parquet), "
        f"parquet, arrow or tar files, a metadata.jsonl, or pictures each beside a .txt file of "
        f"its caption"
    )


def inside(tree: Tree, part: str) -> list[Path] | None:
    """Find what a folder has for ``train``, ``test`` or a split of another name: a file, a folder,
    or files named after it. None if there is nothing of that name."""
    named = (tree.named(name) for name in PARTS.get(part, (part,)))
    return next((files for files in named if files), None)


def splits_of(tree: Tree) -> list[str]:
    """Name the splits of a folder, for a message."""
    usual = [name for names in PARTS.values() for name in names if tree.named(name)]
    folders = [place.name for place in tree.folder.iterdir() if place.is_dir()]
    return sorted({*usual, *(name for name in folders if not name.startswith("."))})


def caption_of(file: Path) -> Path | None:
    """Return the caption file of a picture; None if there is none."""
    beside = [file.with_suffix(kind) for kind in CAPTIONS]
    return next((place for place in beside if place.is_file()), None)


def pairs(folder: Path) -> Iterator[Row]:
    """Yield a row for every picture or video of a folder, with its caption."""
    for file in Tree(folder).media:
        caption = caption_of(file)
        text = text_of(caption, "a caption").strip() if caption else ""
        if text:
            kind = "image" if file.suffix.lower() in PICTURES else "video"
            yield str(file), {"text": text, kind: str(file.resolve())}
        else:
            why = f"no caption; write it into {file.with_suffix(CAPTIONS[0]).name} beside it"
            yield str(file), BrokenRow(why, "")


def _is_read(name: str) -> bool:
    """Tell whether a file could belong to a data set, by its suffix."""
    return os.path.splitext(name)[1].lower() in READ


def _saved(folder: Path) -> list[Path]:
    """List the arrow files of a data set that ``save_to_disk`` wrote; none if it is not one."""
    if not (folder / STATE).is_file():
        return []
    try:
        entries = json.loads((folder / STATE).read_text(encoding="utf-8"))["_data_files"]
        files = [folder / Path(entry["filename"]).name for entry in entries]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{folder / STATE}: not the state of a saved data set: {error}") from error
    if absent := [file for file in files if not file.is_file()]:
        raise UserError(f"{absent[0]}: this part of the saved data set is not there")
    return files
