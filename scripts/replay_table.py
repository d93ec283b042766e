"""Writes the table of docs/models.md: which pipelines of diffusers the policy ``pipeline`` trains.

    python scripts/replay_table.py [--check]

The data are those of the test (tests/fixtures/replay_cases.py), which states for each of them on a
tiny form with random weights that it works, or the words with which it is refused.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- replayed: written by scripts/replay_table.py -->"
END = "<!-- end of replayed -->"
sys.path.insert(0, str(ROOT))
from tests.fixtures.replay_cases import CASES, Case  # noqa: E402


def row(case: Case) -> str:
    """Write a row of the table."""
    result = f"refused: {case.refused}" if case.refused else "yes"
    rows = "" if case.refused else "together" if case.together else "one by one"
    options = ", ".join(f"`{name}: {str(value).lower()}`" for name, value in case.options.items())
    notes = "; ".join(note for note in (case.note, options and f"needs {options}") if note)
    return f"| {case.pipeline} | {result} | {rows} | {notes} |"


def table() -> str:
    """Write the table, by the pipelines' names."""
    rows = sorted(row(case) for case in CASES.values())
    head = "| pipeline | trained | prompts in a call | |\n|---|---|---|---|"
    return "\n".join([BEGIN, "", head, *rows, "", END])


def written(page: str) -> str:
    """Put the table in its place in the page."""
    before, _, rest = page.partition(BEGIN)
    return before + table() + rest.partition(END)[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="say whether the page is up to date")
    page = PAGE.read_text(encoding="utf-8")
    current = written(page)
    if parser.parse_args().check:
        return int(page != current)
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
