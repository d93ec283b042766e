"""Reports broken rows of data, all at once, and decides whether they stop a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from mmrl.core.errors import UserError

SHOWN = 20  # lines in a message
LISTED = 12  # rows in a line, broken for the same reason
# what differs between rows broken for the same reason: numbers, quoted names, paths
NAMED = re.compile(r"""-?\d[\d.]*|'[^']*'|"[^"]*"|\S*/\S*""")
PLACE = re.compile(r"(.+?):(?: row )?(\d+): ", re.DOTALL)  # file:line, or file: row 3
FEW = 3  # rows that may share a reason by chance
ALIKE = 0.1  # share of the rows


class BrokenRows(UserError):
    """Reports prompts that a policy cannot use. ``problems``: place in the list of prompts ->
    "file:line: why"."""

    def __init__(self, problems: Mapping[int, str], count: int):
        super().__init__(_sentence([*problems.values()], count, "fix these rows"))
        self.problems = dict(problems)


def first_of(problems: list[str]) -> str:
    """Name the first of many problems, a line each; a problem shared by many rows is written once,
    with the first row and the numbers of the others."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        place, why = _split(problem)
        alike.setdefault(why, []).append(place)
    lines = [f"{places[0]}: {why}{_others(places[1:])}" for why, places in alike.items()]
    rest = f"\n    and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "\n    ".join(lines[:SHOWN]) + rest


def _others(places: list[str]) -> str:
    if not places:
        return ""
    numbers = ", ".join(place.rpartition(":")[2].removeprefix(" row ") for place in places[:LISTED])
    rest = " ..." if len(places) > LISTED else ""
    return f" (and {len(places)} more rows like it: {numbers}{rest})"


def refuse(problems: list[str], count: int) -> None:
    """Raise UserError for ``problems`` of ``count`` rows, in the order of the file."""
    skip = ", or leave them out with broken: skip" if len(problems) < count else ""
    ordered = sorted(problems, key=_in_file)
    raise UserError(_sentence(ordered, count, f"fix these rows{skip}"))


def _split(problem: str) -> tuple[str, str]:
    """Split "place: why"."""
    if match := PLACE.match(problem):
        return problem[: match.end() - 2], problem[match.end() :]
    place, _, why = problem.partition(": ")
    return place, why


def _in_file(problem: str) -> tuple[str, int]:
    match = PLACE.match(problem)
    return (match[1], int(match[2])) if match else (_split(problem)[0], 0)


def refuse_alike(problems: list[str], count: int) -> None:
    """Raise UserError if all of ``count`` rows, or many of them, are broken for the same reason."""
    if not problems:
        return
    reasons = {_split(problem)[1] for problem in problems}
    if len(problems) == count and len(reasons) == 1:
        refuse(problems, count)
    kinds = [NAMED.sub("#", _split(problem)[1]) for problem in problems]
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
