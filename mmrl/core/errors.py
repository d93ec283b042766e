"""Defines the error for a user's mistakes, and its hints."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any


class UserError(ValueError):
    """Reports a mistake of the user's: one readable message with the remedy. The command line ends
    with exit status 2 and no traceback; in Python it is a ValueError."""


def suggest(name: str, known: Any) -> str:
    """Write ``did you mean 'grpo'?``, or the list of known names."""
    close = get_close_matches(str(name), [str(k) for k in known], cutoff=0.6)
    # among equally close names prefer one with swapped letters
    close.sort(key=lambda found: sorted(found) != sorted(str(name)))
    return (
        f"did you mean {close[0]!r}?"
        if close
        else (f"known: {', '.join(sorted(map(str, known))) or 'none'}")
    )


def a_or_an(noun: str) -> str:
    """Write a noun with its article: ``an objective``, ``an SDE type``, ``a reward``."""
    spelled = noun[:2].isupper() and noun[0] in "AEFHILMNORSX"  # SDE is read letter by letter
    return f"{'an' if spelled or noun[:1].lower() in 'aeio' else 'a'} {noun}"


def called(thing: Any) -> str:
    """Return the name of a class or function, or of an object's class, for messages."""
    return str(getattr(thing, "__name__", type(thing).__name__))
