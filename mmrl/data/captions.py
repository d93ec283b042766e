"""Registers the data source ``captions``: pictures or videos with the text that asks for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Lt

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.prompts import SPLIT, decoded, split

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
VIDEOS = (".mp4", ".webm", ".mov", ".avi", ".mkv")
TABLES = ("metadata.jsonl", "captions.jsonl")
FILES = ("answer", "file_name", "image", "video", "file", "path")  # names of a row's file in use
TEXTS = ("text", "caption", "prompt")
SHOWN = 5  # broken rows in a message


@DATA.register("captions")
class Captions:
    """Read pictures or videos with captions, to learn from: a folder, or a .jsonl file of rows.

    path: a folder of files, each beside a .txt file of the same name that holds its caption, or
    with a ``metadata.jsonl`` of rows {file_name, text}, as data sets of the Hub have them; or a
    .jsonl file of such rows, whose paths start at the file. Other values of a row stay, such as
    ``label`` for models of classes and ``plan`` for janus_unified. Prompts hold the file under
    ``answer``, which ``objective: sft`` learns from. held_out: the share of the captions to hold
    out.
    """

    fields = ("text", "answer")
    train: list[Prompt]
    held_out: list[Prompt]

    def __init__(self, path: Path, held_out: Annotated[float, Ge(0), Lt(1)] = SPLIT):
        path = Path(path)
        problems: list[str] = []
        prompts = [*_prompts(path, problems)]
        if problems:
            rest = f"\n    and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise UserError(
                f"{path}: {len(problems)} rows cannot be used:\n    "
                + "\n    ".join(problems[:SHOWN])
                + rest
            )
        if not prompts:
            raise UserError(
                f"{path}: no pictures with captions there; expected a.png beside a.txt, or a "
                f"metadata.jsonl of rows {{file_name, text}}"
            )
        self.train, self.held_out = split(prompts, held_out)


def _prompts(path: Path, problems: list[str]) -> Iterator[Prompt]:
    if path.is_dir():
        table = next((path / name for name in TABLES if (path / name).is_file()), None)
        yield from _rows(table, problems) if table else _pairs(path, problems)
    elif path.suffix.lower() in (".jsonl", ".ndjson"):
        yield from _rows(path, problems)
    else:
        raise UserError(f"{path}: captions are read from a folder or a .jsonl file")


def _pairs(folder: Path, problems: list[str]) -> Iterator[Prompt]:
    """Yield a prompt for every picture or video that has a caption beside it."""
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() not in (*PICTURES, *VIDEOS):
            continue
        caption = file.with_suffix(".txt")
        text = decoded(caption).strip() if caption.is_file() else ""
        if text:
            yield {"text": text, "answer": str(file.resolve()), "origin": str(file)}
        else:
            problems.append(f"{file}: no caption; write it into {caption.name} beside it")


def _rows(table: Path, problems: list[str]) -> Iterator[Prompt]:
    """Yield the prompts of a table, and collect what is wrong with the others."""
    for number, line in enumerate(decoded(table).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{table}:{number}"
        try:
            yield _prompt(json.loads(line), table.parent) | {"origin": place}
        except (ValueError, RecursionError) as error:
            problems.append(f"{place}: {error}")


def _prompt(row: Any, folder: Path) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    file, text = (_first(row, names) for names in (FILES, TEXTS))
    rest = {key: value for key, value in row.items() if key not in (file, text)}
    path = folder / row[file]
    if not path.is_file():
        raise ValueError(f"no file {path}; paths start at {folder}")
    return rest | {"text": row[text].strip(), "answer": str(path.resolve())}


def _first(row: dict[str, Any], names: tuple[str, ...]) -> str:
    """Return the first of these names that holds text."""
    name = next((n for n in names if isinstance(row.get(n), str) and row[n].strip()), None)
    if name is None:
        raise ValueError(f"no {' or '.join(names[:2])}; this row has {', '.join(map(str, row))}")
    return name
