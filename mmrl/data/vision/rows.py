"""Reads rows of jsonl, json and parquet files and of dataset folders, each with its place in the
file."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError
from mmrl.data.prompts import decoded

# "file:line" (or file and row), and what stands there; a ValueError stands for itself
Row = tuple[str, Any]
LINES = (".jsonl", ".ndjson")
WHOLE = (".json",)
TABLES = (".parquet", ".arrow")
PARTS = {"train": ("train",), "test": ("test", "val", "validation", "eval")}


def rows_of(path: Path) -> Iterator[Row]:
    """Yield every row of a file, or of all tables of a folder, in order. Raises UserError for what
    cannot be read at all."""
    if path.is_dir():
        for file in tables(path):
            yield from rows_of(file)
        return
    readers = {
        **dict.fromkeys(LINES, _lines),
        **dict.fromkeys(WHOLE, _whole),
        **dict.fromkeys(TABLES, _table),
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(sorted(readers))
        raise UserError(
            f"{path}: questions are read from {known}, or a folder that holds such files"
        )
    yield from reader(path)


def tables(folder: Path) -> list[Path]:
    """List the parquet files of a folder, or the arrow files of a saved data set, in order."""
    for kind in TABLES:
        files = sorted(folder.rglob(f"*{kind}"))
        if files:
            return files
    raise UserError(
        f"{folder}: no questions there; expected train.jsonl, train.json, parquet or arrow files"
    )


def inside(folder: Path, part: str) -> Path | list[Path] | None:
    """Find what a folder has for ``train`` or ``test``: a file, a folder of tables, or tables named
    after the part."""
    for name in PARTS[part]:
        for kind in (*LINES, *WHOLE, *TABLES):
            if (folder / f"{name}{kind}").is_file():
                return folder / f"{name}{kind}"
        if (folder / name).is_dir():
            return folder / name
        files = sorted(file for kind in TABLES for file in folder.rglob(f"{name}-*{kind}"))
        if files:
            return files
    return None


def _lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(decoded(path).split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                yield f"{path}:{number}", ValueError(f"broken JSON: {error}")


def _whole(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON list, each with its first line; a COCO file is one row."""
    text = decoded(path)
    decoder = json.JSONDecoder()
    at = _skip(text, 0)
    number = 1
    if text[at : at + 1] != "[":
        try:
            yield str(path), json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{path}: broken JSON: {error}") from error
        return
    at = _skip(text, at + 1)
    counted = 0
    while text[at : at + 1] != "]":
        number = number + text.count("\n", counted, at)
        counted = at
        try:
            value, at = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{path}:{number}: broken JSON: {error}") from error
        yield f"{path}:{number}", value
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            raise UserError(
                f"{path}:{number}: broken JSON: the list is not closed after this object"
            )


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _table(path: Path) -> Iterator[Row]:
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"{path}: reading {path.suffix} files needs pyarrow: pip install pyarrow")
    for number, row in enumerate(_records(path), start=1):
        yield f"{path}: row {number}", row


def _records(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
                yield from batch.to_pylist()
        else:
            with pa.memory_map(str(path)) as source:
                for batch in pa.ipc.open_stream(source):
                    yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
