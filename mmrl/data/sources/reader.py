"""Reads the rows that a configuration names: a file, files, a folder, or a data set of the Hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice, starmap
from pathlib import Path
from typing import Any

from mmrl.config.values import exists
from mmrl.core.errors import UserError
from mmrl.data.ledger import Summary
from mmrl.data.sources import folders
from mmrl.data.sources.hub import HubSet, is_hub_name
from mmrl.data.sources.selection import Filters
from mmrl.data.sources.tables import table
from mmrl.data.sources.tars import tar_rows
from mmrl.data.sources.text_files import (
    PACKED,
    Row,
    json_lines,
    json_whole,
    separated,
    suffix_of,
    text_lines,
)

READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".txt": text_lines,
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_whole,
    ".csv": separated,
    ".tsv": separated,
    ".parquet": table,
    ".arrow": table,
    ".feather": table,
    ".tar": tar_rows,
    ".tgz": tar_rows,
}
UNPACKABLE = (".parquet", ".arrow", ".feather")  # packed inside; never as a whole
PATTERN = re.compile(r"[*?\[{]")
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
Expand = Callable[[str, Any], Iterable[Row]]  # one row -> the rows that it stands for
Part = list[Path] | str  # files, or the name of a split of the Hub


@dataclass(frozen=True)
class Request:
    """Says which rows a source is to read, from its options.

    path: a file, a folder, several files (``shards/*.tar``, ``{000..012}.tar``), or the id of a
    data set. split, subset, revision: of a data set. limit: rows that are read of a part.
    """

    path: str
    split: str | None = None
    subset: str | None = None
    revision: str | None = None
    streaming: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    filters: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    pairs_first: bool = False  # of a folder: pictures with captions before other tables

    def __post_init__(self) -> None:
        Filters(self.filters)  # says what is wrong with them
        if self.streaming and self.limit is None:
            raise UserError("streaming needs the option limit: how many rows are read and kept")

    @property
    def place(self) -> Path:
        return Path(self.path).expanduser()

    @property
    def folder(self) -> Path:
        """Return the folder that paths in the rows are relative to."""
        return self.place if exists(self.place) and self.place.is_dir() else self.place.parent

    @cached_property
    def tree(self) -> folders.Tree:
        """Return the content of the folder, which is walked through once."""
        return folders.Tree(self.place)

    @property
    def hub(self) -> HubSet:
        return HubSet(self.path, self.subset, self.revision, self.streaming)

    def training(self) -> Part:
        """Find the rows to train on: of the split, of a folder's train part, or all of them."""
        if matching := _expanded(self.path):
            return matching
        if self.subset is not None or not exists(self.place):
            return self._split_of_hub(self.split or "train")
        if not self.place.is_dir():
            if self.split is not None:
                raise UserError(f"split: {self.path} is one file, which has no splits")
            return [self.place]
        part = folders.inside(self.tree, self.split or "train")
        if part is None and self.split is not None:
            splits = ", ".join(folders.splits_of(self.tree)) or "none"
            raise UserError(f"{self.path}: no split {self.split!r}; it has: {splits}")
        return part or folders.files_of(self.tree, self.pairs_first)

    def testing(self) -> Part | None:
        """Find the rows that the data itself holds out; None if it has no such part."""
        if self.split is not None or _expanded(self.path):
            return None
        if self.subset is not None or not exists(self.place):
            splits = self.hub.splits()
            return next((name for name in folders.PARTS["test"] if name in splits), None)
        return folders.inside(self.tree, "test") if self.place.is_dir() else None

    def named(self, name: str) -> Part:
        """Find the rows that ``held_out`` names: a file, a folder, or a split of this data."""
        if exists(file := Path(name).expanduser()):
            return folders.files_of(file) if file.is_dir() else [file]
        if self.place.is_dir() and (part := folders.inside(self.tree, name)):
            return part
        if exists(self.place):
            raise UserError(f"held_out: {name} is no file or folder here, and no split of the data")
        return self._split_of_hub(name)

    def _split_of_hub(self, split: str) -> Part:
        is_file = suffix_of(self.place) in READERS
        if not exists(self.place) and (is_file or not is_hub_name(self.path)):
            raise UserError(
                f"no such file or folder: {self.path}; relative paths start at {Path.cwd()}, or at "
                f"the configuration's folder"
            )
        splits = self.hub.splits()
        if re.split(r"[\[+]", split)[0] not in splits:
            raise UserError(
                f"data set {self.path!r}: no split {split!r}; name one of {', '.join(splits)} with "
                f"the option split"
            )
        return split

    def rows(self, part: Part, summary: Summary, expand: Expand | None = None) -> Iterator[Row]:
        """Yield the rows of a part that pass the filters, up to the limit, and count them."""
        rows = self.hub.rows(part) if isinstance(part, str) else rows_of_all(part)
        if expand is not None:
            rows = chain.from_iterable(starmap(expand, rows))
        filters = Filters(self.filters, self.columns)
        columns: dict[str, None] = {}
        count = 0
        for each in islice(rows, self.limit):
            count += 1
            if not filters.conditions:
                yield each
                continue
            row = each[1]
            if isinstance(row, dict) and not columns.keys() >= row.keys() and len(columns) < 100:
                columns |= dict.fromkeys(map(str, row))
            if reason := filters.failed(row):
                summary.filtered[reason] += 1
            else:
                yield each
        summary.read += count
        summary.limited |= count == self.limit
        if count:
            filters.check([*columns])


def rows_of_all(files: Iterable[Path]) -> Iterator[Row]:
    """Yield the rows of files, and of folders of pictures with captions, in order."""
    for file in files:
        yield from folders.pairs(file) if file.is_dir() else rows_of(file)


def rows_of(path: Path) -> Iterator[Row]:
    """Yield every row of a file, or of all files of a folder, in order. Raises UserError for what
    cannot be read at all."""
    if path.is_dir():
        yield from rows_of_all(folders.files_of(path))
        return
    suffix = suffix_of(path)
    reader = READERS.get(suffix)
    if reader is None or (suffix in UNPACKABLE and path.suffix.lower() in PACKED):
        raise UserError(
            f"{path}: rows are read from {', '.join(READERS)} files, text files also with "
            f"{' or '.join(PACKED[:2])} after that, or a folder that holds such files"
        )
    yield from reader(path)


def _expanded(path: str) -> list[Path]:
    """List the files that match a pattern; none if it is no pattern."""
    if not PATTERN.search(path) or exists(Path(path)):
        return []
    files: list[Path] = []
    for pattern in _unbraced(path):
        place = Path(pattern).expanduser()
        root = Path(place.anchor) if place.is_absolute() else Path()
        files += sorted(root.glob(str(place.relative_to(root))))
    if not files:
        raise UserError(
            f"no file matches {path}; relative paths start at {Path.cwd()}, or at the "
            f"configuration's folder"
        )
    return files


def _unbraced(path: str) -> list[str]:
    """Expand a range in braces, as WebDataset names its shards."""
    match = BRACES.search(path)
    if match is None:
        return [path]
    first, last = match.groups()
    numbers = range(int(first), int(last) + 1)
    return [
        name
        for number in numbers
        for name in _unbraced(
            f"{path[: match.start()]}{number:0{len(first)}d}{path[match.end() :]}"
        )
    ]
