"""Audits on the terminal: a table a reward, and below it the rows that broke a rule."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmrl.audit import Audit, Line, Offence

SHOWN = 5  # offending rows of a probe


def print_audits(audits: Sequence[Audit]) -> bool:
    """Print them all; False if a rule was broken."""
    console = Console()
    for one in audits:
        console.print(_table(one))
        for line in one.lines:
            for text in _offences(line):
                console.print(text, soft_wrap=True)
    broken = [one.reward for one in audits if not one.passed]
    console.print(f"failed: {', '.join(broken)}" if broken else "passed")
    return not broken


def _table(one: Audit) -> Table:
    table = Table(
        "answer", "rows", "mean", "lowest", "highest", "must be", "", title=f"reward {one.reward}"
    )
    for line in one.lines:
        known = [s for s in line.scores if not math.isnan(s)]
        numbers = (
            [f"{v:.3f}" for v in (sum(known) / len(known), min(known), max(known))]
            if known
            else [""] * 3
        )
        failed = f"{len(line.offences)} FAIL" if line.offences else "ok"
        verdict = Text(failed, style="bold red" if line.offences else "green")
        table.add_row(line.probe, str(len(line.scores) or ""), *numbers, line.rule, verdict)
    return table


def _offences(line: Line) -> list[Text]:
    found = [Text(f"  {one.where}: {line.probe}: {_said(one)}") for one in line.offences[:SHOWN]]
    more = len(line.offences) - SHOWN
    return found + ([Text(f"  ... and {more} more rows: {line.probe}")] if more > 0 else [])


def _said(one: Offence, width: int = 100) -> str:
    if math.isnan(one.score) and not one.answer:
        return one.note
    answer = one.answer if len(one.answer) <= width else one.answer[: width - 3] + "..."
    return f"{answer!r} scores {one.score:.4g}" + (f"; {one.note}" if one.note else "")
