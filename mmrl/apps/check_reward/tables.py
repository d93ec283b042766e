"""Prints audits on the terminal: a table for each reward, and below it the rows that broke a
rule."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmrl.apps.check_reward import Audit, Line, Offence

SHOWN = 5  # offending rows of a probe
WIDE = 160  # columns if the output is not a terminal


def print_audits(audits: Sequence[Audit]) -> bool:
    """Print all audits; return False if a rule was broken."""
    # a file or pipe has no width
    console = Console(width=None if sys.stdout.isatty() else WIDE)
    for audit in audits:
        console.print(_table(audit))
        for note in filter(None, (line.note for line in audit.lines)):
            console.print(Text(f"  {note}"), soft_wrap=True)
        for line in audit.lines:
            for text in _offences(line):
                console.print(text, soft_wrap=True)
    broken = [audit.reward for audit in audits if not audit.passed]
    console.print(f"failed: {', '.join(broken)}" if broken else "passed")
    return not broken


def _table(audit: Audit) -> Table:
    table = Table(
        "answer", "rows", "mean", "lowest", "highest", "must be", "", title=f"reward {audit.reward}"
    )
    for line in audit.lines:
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
    lines = [
        Text(f"  {offence.where}: {line.probe}: {described(offence)}")
        for offence in line.offences[:SHOWN]
    ]
    hidden = len(line.offences) - SHOWN
    return lines + ([Text(f"  ... and {hidden} more rows: {line.probe}")] if hidden > 0 else [])


def described(offence: Offence, width: int = 100) -> str:
    """Write an answer, truncated, with its score."""
    if math.isnan(offence.score) and not offence.answer:
        return offence.note
    answer = offence.answer if len(offence.answer) <= width else offence.answer[: width - 3] + "..."
    return f"{answer!r} scores {offence.score:.4g}" + (f"; {offence.note}" if offence.note else "")
