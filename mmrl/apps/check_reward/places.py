"""Finds where a prompt came from: file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmrl.config import Config
from mmrl.core.types import Prompt
from mmrl.data.prompts import NAMES


def named(prompts: list[Prompt], config: Config) -> list[Prompt]:
    """Return the prompts, each with ``where``: from the data source, else searched in the files it
    read."""
    prompts = [
        p if "where" in p or "origin" not in p else {**p, "where": p["origin"]} for p in prompts
    ]
    if all("where" in prompt for prompt in prompts):
        return prompts
    lines = _lines(_files(config.plain.get("data"), Path(config.file).parent))
    placed = []
    for prompt in prompts:
        places = lines.get(str(prompt.get("text", "")).strip(), [])
        at = next((where for where, record in places if _same(record, prompt)), None)
        placed.append({**prompt, "where": at} if at and "where" not in prompt else prompt)
    return placed


def where(prompt: Prompt) -> str:
    """Return file:line of a prompt, else its question."""
    return str(prompt.get("where") or repr(str(prompt.get("text", prompt))[:60]))


def _files(spec: Any, folder: Path) -> list[Path]:
    """List the .txt and .jsonl files under the options called ``path``."""
    options = next(iter(spec.values()), None) if isinstance(spec, dict) else None
    path = options.get("path") if isinstance(options, dict) else None
    if not isinstance(path, str):
        return []
    place = next((p for p in (Path(path).expanduser(), folder / path) if p.exists()), Path(path))
    inside = [place / name for name in NAMES["train"]] if place.is_dir() else [place]
    return [
        file for file in inside if file.is_file() and file.suffix in (".txt", ".jsonl", ".ndjson")
    ]


def _lines(files: list[Path]) -> dict[str, list[tuple[str, Any]]]:
    """Map text -> (file:line, record) of every line with it."""
    places_of_text: dict[str, list[tuple[str, Any]]] = {}
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), start=1):
            try:
                record = json.loads(line) if file.suffix != ".txt" else line.strip()
            except ValueError:
                continue  # the data source has already reported it
            texts = record.values() if isinstance(record, dict) else [record]
            for text in {text.strip() for text in texts if isinstance(text, str)}:
                places_of_text.setdefault(text, []).append((f"{file}:{number}", record))
    return places_of_text


def _same(record: Any, prompt: Prompt) -> bool:
    return not isinstance(record, dict) or all(
        prompt.get(key) == v for key, v in record.items() if key != "text"
    )
