"""Converts arguments of Python callers to configuration values."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, POLICIES, options
from mmrl.core.types import Prompt
from mmrl.data.prompts import read
from mmrl.data.vision.formats import ALIASES
from mmrl.policies.capabilities import capabilities_of

Overrides = Mapping[str, Any] | Sequence[str] | None
TEXTS = ("text", "prompt")  # columns that hold the text of a prompt


def needed(module: str, what: str, extra: str = "notebook") -> Any:
    """Import a library that not every user needs. Raises UserError with the command that installs
    it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"{what} needs {module}, which is not installed; run: "
            f'pip install "multimodal-rl[{extra}]"'
        ) from None


def words_of(overrides: Overrides) -> list[str]:
    """Write ``{"train.iterations": 20}`` as command-line overrides, ``train.iterations=20``; such
    strings are accepted unchanged."""
    if overrides is None:
        return []
    if isinstance(overrides, Mapping):
        return [f"{key}={_written(key, value)}" for key, value in overrides.items()]
    if isinstance(overrides, str) or not all(isinstance(word, str) for word in overrides):
        raise UserError(
            f'overrides: expected {{"train.iterations": 20}} or ["train.iterations=20"], got '
            f"{overrides!r}"
        )
    return list(overrides)


def _written(key: str, value: Any) -> str:
    """Write a value as YAML, of which JSON is a part."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[str(value)]
    try:
        return json.dumps(plain(value), ensure_ascii=False)
    except TypeError as error:
        raise UserError(
            f"override {key}: {type(value).__name__} is no plain value; a function or object of "
            f"yours is given to mmrl.Trainer"
        ) from error


def plain(value: Any) -> Any:
    """Convert paths, tuples and numpy numbers to plain configuration values."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value


def prompts_of(prompts: Any) -> list[Prompt]:
    """Convert prompts to a list of dicts with a ``text`` each.

    prompts: one text or dict, a list of texts or of dicts, a pandas frame (a row per prompt, the
    text in the column ``text`` or ``prompt``), or the ``Path`` of a file. Raises UserError that
    names the row.
    """
    if isinstance(prompts, Path):
        return read(prompts)
    if isinstance(prompts, (str, Mapping)):
        prompts = [prompts]
    if hasattr(prompts, "to_dict") and hasattr(prompts, "columns"):
        prompts = [_without_gaps(row) for row in prompts.to_dict("records")]
    if not isinstance(prompts, Iterable):
        raise UserError(
            f"prompts: expected texts, dicts, a pandas frame or a path, got "
            f"{type(prompts).__name__}"
        )
    rows = [_prompt(row, number) for number, row in enumerate(prompts)]
    if not rows:
        raise UserError("prompts: there are none; give at least one text")
    return rows


def _without_gaps(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Drop the empty cells of a frame's row."""
    return {str(k): plain(v) for k, v in row.items() if not (isinstance(v, float) and v != v)}


def _prompt(row: Any, number: int) -> Prompt:
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, Mapping):
        raise UserError(f"prompts, row {number}: expected a text or a dict, got {row!r}")
    row = _with_known_names(row)
    name = next((key for key in TEXTS if row.get(key) is not None), None)
    if name is None and "messages" not in row:
        has = ", ".join(map(str, row)) or "nothing"
        raise UserError(
            f"prompts, row {number}: no 'text' or 'prompt'; it has {has}; rename the column that "
            f"holds the text"
        )
    text = row[name] if name is not None else ""
    if not isinstance(text, str) or (name is not None and not text.strip()):
        raise UserError(
            f"prompts, row {number}: {name!r} must be text that is not empty, got {text!r}"
        )
    return {**row, "text": text}


def _with_known_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Rename fields of other formats to mmrl's, as for files."""
    known = dict(row)
    for name in ("text", "boxes", "answer"):
        ours = TEXTS if name == "text" else (name,)
        present = [alias for alias in ALIASES[name] if row.get(alias) is not None]
        if present and not any(row.get(key) is not None for key in ours):
            known[name] = row[present[0]]
    if "boxes" not in known and row.get("bbox") is not None:
        known["boxes"] = [row["bbox"]]
    return known


def reader_of(sections: Mapping[str, Any]) -> str:
    """Name the data source that reads files for a policy: that of its configuration if it reads
    files, else ``vision`` for models that write about pictures, and ``prompts``."""
    known = sections.get("data")
    name = str(next(iter(known), "") if isinstance(known, Mapping) else known)
    if name in DATA and "path" in options(DATA[name]):
        return name
    policy = sections.get("policy")
    entry = POLICIES.get(next(iter(policy), "") if isinstance(policy, Mapping) else str(policy))
    can = capabilities_of(entry)
    return "vision" if can is not None and can.makes == "text" else "prompts"


def data_section(prompts: Any, reader: str = "prompts") -> Any:
    """Return the ``data`` section of a path, a data set id or a data source's name; None if prompts
    are given directly. ``reader``: the data source that reads paths."""
    if isinstance(prompts, (str, Path)):
        name = str(prompts)
        if Path(name).exists() or re.fullmatch(r"\S+[/\\.]\S+", name):  # also owner/name
            return {reader: {"path": name}}
        if name in DATA or ":" in name:
            return name
        raise UserError(
            f"prompts: no such file or folder {name!r}, and no data source of that name; one "
            f"prompt is given as a list, [{name!r}]"
        )
    if isinstance(prompts, Mapping) and len(prompts) == 1 and next(iter(prompts)) in DATA:
        return plain(prompts)
    return None
