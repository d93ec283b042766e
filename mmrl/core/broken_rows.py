"""Words what is wrong with rows of data, all of them at once, and decides whether that stops a
run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from mmrl.core.errors import UserError

SHOWN = 20  # lines in a message
LISTED = 12  # rows in a line, which are broken alike
# what differs between rows that are broken for one same reason: numbers, quoted names, paths
NAMED = re.compile(r"""-?\d[\d.]*|'[^']*'|"[^"]*"|\S*/\S*""")
FEW = 3  # rows that may be broken alike by chance
ALIKE = 0.1  # share of the rows


class BrokenRows(UserError):
    """Reports prompts that a policy cannot take. ``problems``: place in the list of prompts ->
    "file:line: why"."""

    def __init__(self, problems: Mapping[int, str], count: int):
        super().__init__(_sentence([*problems.values()], count, "fix these rows"))
        self.problems = dict(problems)


def first_of(problems: list[str]) -> str:
    """Name the first of many problems, a line each; what is wrong with many rows alike is said
    once, with the first of them and the numbers of the others."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        place, _, why = problem.partition(": ")
        alike.setdefault(why, []).append(place)
    lines = [f"{places[0]}: {why}{_others(places[1:])}" for why, places in alike.items()]
    rest = f"\n    and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "\n    ".join(lines[:SHOWN]) + rest


def _others(places: list[str]) -> str:
    if not places:
        return ""
    numbers = ", ".join(place.rpartition(":")[2] for place in places[:LISTED])
    rest = " ..." if len(places) > LISTED else ""
    return f" (and {len(places)} more rows like it: {numbers}{rest})"


def refuse(problems: list[str], count: int, skips: bool) -> None:
    """Raise UserError for ``problems`` of ``count`` rows, unless they are to be left out
    (``skips``) and are not all, or many of them, broken for one same reason."""
    whole = count - len(problems)
    reasons = {problem.partition(": ")[2] for problem in problems}
    if not skips or (not whole and len(reasons) == 1):
        skip = ", or leave them out with broken: skip" if whole else ""
        raise UserError(_sentence(problems, count, f"fix these rows{skip}"))
    kinds = [NAMED.sub("#", problem.partition(": ")[2]) for problem in problems]
    kind, alike = Counter(kinds).most_common(1)[0]
    if alike > max(FEW, ALIKE * count):
        rows = [problem for problem, each in zip(problems, kinds) if each == kind]
        raise UserError(
            f"{alike} of {count} rows are broken for one same reason, which broken: skip does "
            f"not leave out:\n    {first_of(rows)}\n  find out what they have in common, or "
            f"take these rows out of the file"
        )


def _sentence(problems: list[str], count: int, remedy: str) -> str:
    return f"{len(problems)} of {count} rows are broken:\n    {first_of(problems)}\n  {remedy}"
