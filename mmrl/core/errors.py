"""Defines the error for what a user can mend, and words its hints."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any


class UserError(Exception):
    """Reports a mistake of the user's: one readable message with the remedy, exit status 2, never a
    traceback."""


def suggest(name: str, known: Any, former: Mapping[str, str] = {}) -> str:
    """Write ``did you mean 'grpo'?``, or the list of known names. Where the nearest name is an old
    one, a key of ``former``, the one it has now is suggested."""
    present = {**former, **{str(k): str(k) for k in known}}
    close = get_close_matches(str(name), present, cutoff=0.6)
    # among equally near names prefer one with swapped letters
    close.sort(key=lambda found: sorted(found) != sorted(str(name)))
    return (
        f"did you mean {present[close[0]]!r}?"
        if close
        else (f"known: {', '.join(sorted(map(str, known))) or 'none'}")
    )
