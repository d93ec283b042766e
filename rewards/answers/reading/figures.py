"""Reads figures: numbers as programs write them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

# longest run of blanks or digits: patterns that begin with them take quadratic time
RUN = 40
NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,4})?"
_WHOLE = re.compile(NUMBER)


def calm(text: str) -> str:
    """Cut runs of blanks and of digits to a length that no number or answer needs."""
    if len(text) <= RUN:
        return text
    blanks = re.sub(rf"(\s{{{RUN}}})\s+", r"\1", text)
    return re.sub(rf"(\d{{{RUN}}})\d+", r"\1", blanks)


def real(value: Any) -> float | None:
    """Convert a number, or a string that is one, to a float; None for anything else. Infinity and
    NaN are kept."""
    if type(value) is float:
        return value
    if isinstance(value, str):
        if not _WHOLE.fullmatch(value.strip()):
            return None
    elif not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def reals(values: Sequence[Any]) -> tuple[float, ...] | None:
    """Convert numbers as ``real`` does; None if one of them is not a number."""
    numbers = [number for value in values if (number := real(value)) is not None]
    return tuple(numbers) if len(numbers) == len(values) else None
