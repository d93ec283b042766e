"""Finds the groups of a batch: the samples of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmrl.core.types import Prompt


def groups_of(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the rows of every group: those with the same ``group`` or, without it, neighbours with
    the same prompt."""
    rows_of_group: dict[Any, list[int]] = {}
    run = 0
    for row, prompt in enumerate(prompts):
        if row and "group" not in prompt and not alike(prompt, prompts[row - 1]):
            run += 1
        rows_of_group.setdefault(prompt.get("group", ("run", run)), []).append(row)
    return list(rows_of_group.values())


def alike(first: Prompt, second: Prompt) -> bool:
    """Tell whether two prompts are the same object, or equal; incomparable ones are not."""
    if first is second:
        return True
    try:
        return bool(first == second)
    except (ValueError, RuntimeError):  # arrays
        return False
