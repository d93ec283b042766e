"""Reads files of one JSON value a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number, from 1, and value of every non-empty line. Raises UserError with the line
    of a mistake."""
    try:
        # not splitlines: JSON strings may contain other line ends, such as U+2028
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number} is not JSON: {error}") from error
        yield number, row
