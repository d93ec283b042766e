"""Reads rows of csv, tsv, json and jsonl files, plain or compressed by gzip or zstandard."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from sys import intern
from typing import IO, Any

from mmrl.core.errors import UserError

# "file:line" (or file and row), and the value there; a ValueError says what is wrong
Row = tuple[str, Any]
PACKED = (".gz", ".zst", ".zstd")
SMALL = 2**30  # bytes that any compressed file may unpack to
RATIO = 200  # a larger file may grow by this factor: text has 3 to 20, a zip bomb 1000
LONGEST = 2**28  # bytes of a line
WHOLE_NUMBER = re.compile(r"0|-?[1-9]\d{0,17}")
DECIMAL = re.compile(r"-?\d+\.\d+")
TRUTH = {"true": True, "false": False}


class BrokenRow(ValueError):
    """Says what is wrong with a row; ``shown`` is how it begins in the file."""

    def __init__(self, message: str, shown: str):
        super().__init__(message)
        self.shown = shown if len(shown) <= 80 else shown[:80] + " ..."


def suffix_of(path: Path) -> str:
    """Return the suffix that says what a file holds: ``.jsonl`` of ``a.jsonl.gz``, in lower
    case."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


@contextmanager
def unpacked(path: Path, content_name: str = "data") -> Iterator[IO[bytes]]:
    """Open a file for reading, through gzip or zstandard by its suffix; bounded. Raises UserError
    if it cannot be read or is damaged."""
    suffix = path.suffix.lower()
    try:
        with path.open("rb") as file:
            if suffix not in PACKED:
                yield file
                return
            most = max(SMALL, RATIO * path.stat().st_size)
            stream: Any = gzip.GzipFile(fileobj=file) if suffix == ".gz" else _zstandard(file, path)
            yield io.BufferedReader(_Bounded(stream, most, path))
    except (EOFError, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: the file is damaged or cut off: {error}") from error
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"{path}: cannot read {content_name}: {why}") from error
    except Exception as error:
        if type(error).__name__ not in ("ZstdError", "error"):  # of zstandard and zlib
            raise
        raise UserError(f"{path}: the file is damaged or cut off: {error}") from error


def _zstandard(file: IO[bytes], path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UserError(
            f'{path}: reading .zst needs zstandard: pip install "multimodal-rl[data]"'
        ) from error
    return zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(
        file, read_across_frames=True
    )


class _Bounded(io.RawIOBase):
    """Reads a stream up to a number of bytes, and raises beyond."""

    def __init__(self, stream: Any, most: int, path: Path):
        self.stream = stream
        self.left = most
        self.path = path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.stream.read(len(buffer))
        self.left -= len(content)
        if self.left < 0:
            raise UserError(
                f"{self.path}: unpacks to more than {RATIO} times its size, as a file made to "
                f"exhaust memory does; unpack it yourself if you trust it"
            )
        buffer[: len(content)] = content
        return len(content)


def lines_of(path: Path, content_name: str = "data") -> Iterator[tuple[int, str]]:
    """Yield (number, text) of every line that is not blank. Raises UserError for a line that is
    not UTF-8 or longer than 256 MiB."""
    with unpacked(path, content_name) as stream:
        for number in range(1, 2**62):
            line = stream.readline(LONGEST)
            if not line:
                return
            if len(line) >= LONGEST:
                raise UserError(f"{path}:{number}: a line of more than {LONGEST >> 20} MiB")
            try:
                text = line.decode().strip()
            except UnicodeDecodeError:
                text = _decoded(line, path, number)  # says which byte it is
            if text := text.removeprefix("\ufeff").strip() if number == 1 else text:
                yield number, text


def text_of(path: Path, content_name: str = "data") -> str:
    """Read a whole file of text. Raises UserError with the line that is not UTF-8."""
    with unpacked(path, content_name) as stream:
        content = stream.read()
    return _decoded(content, path, 1).removeprefix("\ufeff")


def _decoded(content: bytes, path: Path, number: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        number += content.count(b"\n", 0, error.start)
        raise UserError(
            f"{path}:{number}: byte 0x{content[error.start]:02x} is not UTF-8; save it as UTF-8, "
            f"for instance: iconv -f latin1 -t utf-8 {path.name} > utf8{path.suffix}"
        ) from error


def loads(text: str) -> Any:
    """Read JSON. Raises ValueError for what is broken, nested too deeply, or holds a key twice, as
    one value would be lost silently."""
    try:
        try:
            value, end = DECODER.scan_once(text, 0)
        except StopIteration:  # what ``decode`` explains, or blanks before the value
            end = -1
        return value if end == len(text) else DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"broken JSON at column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = {intern(key): value for key, value in pairs}  # rows share their keys
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object; remove one of them")
    return values


DECODER: Any = json.JSONDecoder(object_pairs_hook=_without_repeats)


def json_lines(path: Path) -> Iterator[Row]:
    """Yield the value of every line, or what is wrong with it."""
    name = str(path)  # formatting a path is slow, and there may be a million lines
    for number, line in lines_of(path):
        try:
            yield f"{name}:{number}", loads(line)
        except ValueError as error:
            yield f"{name}:{number}", BrokenRow(str(error), line)


def text_lines(path: Path) -> Iterator[Row]:
    """Yield every line as a row of its text."""
    name = str(path)
    for number, line in lines_of(path):
        yield f"{name}:{number}", {"text": line}


def json_whole(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON list, each with its first line; a COCO file is one row."""
    text = text_of(path)
    at = _skip(text, 0)
    if text[at : at + 1] != "[":
        yield from _single(text, path)
        return
    at = _skip(text, at + 1)
    number = 1
    counted = 0
    while text[at : at + 1] != "]":
        number = number + text.count("\n", counted, at)
        counted = at
        try:
            value, at = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number}: broken JSON: {error}") from error
        yield f"{path}:{number}", value
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            raise UserError(
                f"{path}:{number}: broken JSON: the list is not closed after this object"
            )


def _single(text: str, path: Path) -> Iterator[Row]:
    """Yield the one object of a file: COCO's, the list in ``data`` or ``rows``, or a row."""
    try:
        content = loads(text)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    rows = content.get("data", content.get("rows")) if isinstance(content, dict) else None
    if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
        yield from ((f"{path}: row {i}", row) for i, row in enumerate(rows, start=1))
    else:
        yield str(path), content


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def separated(path: Path) -> Iterator[Row]:
    """Yield the rows of a csv or tsv file with a header.

    A column whose cells are all numbers as Python writes them (5, 0.25; not 3.10, 1e5 or 007), or
    all true and false, is of that type; any other is text, spaces included. A cell that begins with
    ``[`` or ``{`` is read as JSON if it is any; an empty cell is no value. A csv may be separated
    by semicolons or tabs where its header has no comma.
    """
    csv.field_size_limit(LONGEST)
    with unpacked(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        try:
            header = text.readline()
            mark = _delimiter(header, path)
            reader = csv.reader(chain([header], text), delimiter=mark, strict=True)
            rows = [(reader.line_num, cells) for cells in reader if any(cells)]
        except UnicodeDecodeError:
            rows = []
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: broken csv: {error}") from error
    if not rows:
        text_of(path)  # says which line is not UTF-8
        raise UserError(f"{path} is empty; expected a header and rows")
    yield from _table(path, rows)


def _delimiter(header: str, path: Path) -> str:
    """Choose the delimiter by the header: that of the suffix, if the header has it."""
    usual = "\t" if suffix_of(path) == ".tsv" else ","
    if usual in header:
        return usual
    return next((mark for mark in (";", "\t") if mark in header), usual)


def _table(path: Path, rows: list[tuple[int, list[str]]]) -> Iterator[Row]:
    (_, header), *content = rows
    names = [name.strip() for name in header]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{path}:1: the column {twice!r} stands twice in the header; rename one")
    fit = [cells for _, cells in content if len(cells) == len(names)]
    name = str(path)
    kinds = [_kind([cells[i] for cells in fit if cells[i].strip()]) for i in range(len(names))]
    for number, cells in content:
        if len(cells) != len(names):
            why = f"{len(cells)} cells, and the header has {len(names)} columns"
            yield f"{name}:{number}", BrokenRow(f"{why}; quote cells that hold the separator", "")
        else:
            yield (
                f"{name}:{number}",
                {
                    column: _cell(cell, kind)
                    for column, cell, kind in zip(names, cells, kinds, strict=True)
                },
            )


def _kind(cells: list[str]) -> str:
    """Name the type of a column by its non-empty cells; numbers that Python would print differently
    are text, such as the answer 3.10."""
    if not cells:
        return "text"
    if all(WHOLE_NUMBER.fullmatch(cell) or _is_decimal(cell) for cell in cells):
        return "number"
    return "truth" if all(cell.lower() in TRUTH for cell in cells) else "text"


def _is_decimal(cell: str) -> bool:
    return DECIMAL.fullmatch(cell) is not None and repr(float(cell)) == cell


def _cell(cell: str, kind: str) -> Any:
    if not cell.strip():
        return None
    if kind == "number":
        return int(cell) if WHOLE_NUMBER.fullmatch(cell) else float(cell)
    if kind == "truth":
        return TRUTH[cell.lower()]
    if cell[:1] in "[{":
        try:
            return loads(cell)
        except ValueError:
            return cell
    return cell
