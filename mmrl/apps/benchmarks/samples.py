"""Finds the samples of a benchmark: pictures in GenEval's folders or by number, answers in common
file formats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmrl.apps.benchmarks.items import Item, Sample
from mmrl.core.errors import UserError
from mmrl.data.sources.reader import rows_of

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
ANSWERS = ("answers.jsonl", "predictions.jsonl", "answers.json", "predictions.json")
NUMBERED = re.compile(r"(\d+)(?:_(\d+))?(?:-.*)?")  # 00012, 00012_3, 012-a-red-bench
KEYS = ("index", "id", "question_id", "questionId", "item_id", "name")
TEXTS = ("answer", "prediction", "response", "output", "pred", "text")


def pictures(folder: Path, items: Sequence[Item]) -> list[Sample]:
    """List the pictures of a folder: ``00012/samples/0003.png`` as GenEval has them, or one folder
    of ``12.png``, ``00012_3.png`` or named after the items.

    Raises:
        UserError: a file without an item, a metadata.jsonl of another item, or no pictures.
    """
    numbers = {item.index: item for item in items}
    nested = sorted(f for f in folder.iterdir() if f.is_dir() and f.name.isdigit())
    listed = list(of_folders(nested, numbers) if nested else of_files(folder, items, numbers))
    if not listed:
        raise UserError(
            f"{folder}: no samples; expected 00000/samples/0000.png ... or 00000.png ..., one "
            f"number for each line of the benchmark's file"
        )
    return listed


def of_folders(folders: Sequence[Path], numbers: dict[int, Item]) -> Iterator[Sample]:
    for folder in folders:
        item = numbers.get(int(folder.name))
        if item is None:
            raise UserError(f"{folder}: the benchmark has no line {int(folder.name)} (from 0)")
        same_prompt(folder, item)
        inner = folder / "samples"
        files = sorted(f for f in (inner if inner.is_dir() else folder).iterdir() if is_picture(f))
        for number, file in enumerate(files):
            yield Sample(item, number, file)


def same_prompt(folder: Path, item: Item) -> None:
    """Raise UserError if GenEval's metadata next to the samples belong to another prompt."""
    record = metadata(folder)
    known = item.prompt.get("prompt", item.prompt["text"])
    if record is not None and record.get("prompt", known) != known:
        raise UserError(
            f"{folder}/metadata.jsonl: its prompt is {record['prompt']!r}, that of line "
            f"{item.index} of the benchmark is {known!r}; give the file the samples were made for"
        )


def metadata(folder: Path) -> dict[str, Any] | None:
    """Read GenEval's record of a folder of samples; None if there is none."""
    file = folder / "metadata.jsonl"
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    except (ValueError, IndexError) as error:
        raise UserError(f"{file}: broken JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{file}: expected an object, got {type(record).__name__}")
    return record


def of_files(folder: Path, items: Sequence[Item], numbers: dict[int, Item]) -> Iterator[Sample]:
    names = {item.name: item for item in items if item.name}
    counted: dict[int, int] = {}
    for file in sorted(f for f in folder.iterdir() if is_picture(f)):
        item = named(file.stem, numbers, names)
        if item is None:
            raise UserError(
                f"{file}: no line of the benchmark has this number or name; it has "
                f"{len(numbers)} lines, from 0"
            )
        counted[item.index] = counted.get(item.index, -1) + 1
        yield Sample(item, counted[item.index], file)


def named(stem: str, numbers: dict[int, Item], names: dict[str, Item]) -> Item | None:
    """Find the item that a file is named after."""
    number = NUMBERED.fullmatch(stem)
    return names.get(stem) or (numbers.get(int(number[1])) if number else None)


def is_picture(file: Path) -> bool:
    return file.suffix.lower() in PICTURES and file.is_file()


def answers(path: Path, items: Sequence[Item]) -> list[Sample]:
    """List the answers of a .jsonl or .json file, of such a file in a folder, or of a folder of
    numbered .txt files.

    A row names its item by ``index`` (from 0) or by its name in the official file; rows without
    either are taken in order, if there are as many as items.
    """
    if path.is_dir():
        file = next((path / name for name in ANSWERS if (path / name).is_file()), None)
        return of_texts(path, items) if file is None else answers(file, items)
    rows = [(place, row_of(place, row)) for place, row in rows_of(path)]
    if len(rows) == 1 and "rows" in rows[0][1]:
        rows = [(rows[0][0], row) for row in rows[0][1]["rows"]]
    numbers = {item.index: item for item in items}
    names = {item.name: item for item in items if item.name}
    unnamed = not any(key in row for _, row in rows for key in KEYS)
    if unnamed and len(rows) != len(items):
        raise UserError(
            f"{path}: {len(rows)} answers without an index for {len(items)} questions; add "
            f'"index": the line of the question, from 0'
        )
    counted: dict[int, int] = {}
    listed = []
    for place, (origin, row) in enumerate(rows):
        item = items[place] if unnamed else item_of(origin, row, numbers, names)
        counted[item.index] = counted.get(item.index, -1) + 1
        listed.append(Sample(item, counted[item.index], None, text_of(origin, row), row))
    return listed


def row_of(place: str, row: Any) -> dict[str, Any]:
    if isinstance(row, ValueError):
        raise UserError(f"{place}: {row}") from row
    if isinstance(row, str):
        return {"answer": row}
    if not isinstance(row, dict):
        raise UserError(f"{place}: expected an object with an answer, got {type(row).__name__}")
    return row


def item_of(
    place: str, row: dict[str, Any], numbers: dict[int, Item], names: dict[str, Item]
) -> Item:
    key = next((key for key in KEYS if row.get(key) is not None), None)
    value = row[key] if key else None
    item = names.get(str(value)) if key != "index" else None
    if item is None and re.fullmatch(r"\d+", str(value)):
        item = numbers.get(int(str(value)))
    if item is None:
        raise UserError(f"{place}: no question of the benchmark is called {key}={value!r}")
    return item


def text_of(place: str, row: dict[str, Any]) -> str:
    value = next((row[key] for key in TEXTS if row.get(key) is not None), None)
    if value is None:
        raise UserError(f"{place}: no answer; expected one of {', '.join(TEXTS)}")
    return value if isinstance(value, str) else json.dumps(value)


def of_texts(folder: Path, items: Sequence[Item]) -> list[Sample]:
    numbers = {item.index: item for item in items}
    names = {item.name: item for item in items if item.name}
    listed = []
    for file in sorted(folder.glob("*.txt")):
        item = named(file.stem, numbers, names)
        if item is None:
            raise UserError(f"{file}: no question of the benchmark has this number or name")
        listed.append(Sample(item, 0, file, file.read_text(encoding="utf-8")))
    if not listed:
        raise UserError(
            f"{folder}: no answers; expected {ANSWERS[0]} with rows such as "
            f'{{"index": 0, "answer": "..."}}, or 00000.txt ...'
        )
    return listed
