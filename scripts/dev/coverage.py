"""Writes docs/coverage.md from docs/coverage.yaml: which part of mmrl implements which paper, and
whether it works.

    python scripts/dev/coverage.py  # also reports what in the file does not exist

The list of papers is outside the repository, in ../shared/specs/papers.md; without it the page is
not changed, and only names, tests and files are checked.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

from mmrl.config import load  # noqa: E402
from mmrl.config.checks import check  # noqa: E402
from mmrl.core.errors import UserError, suggest  # noqa: E402
from mmrl.core.paths import find_config  # noqa: E402
from mmrl.core.registry import ALL, load_built_in  # noqa: E402

MAP = ROOT / "docs" / "coverage.yaml"
PAGE = ROOT / "docs" / "coverage.md"
PAPERS = ROOT.parent / "shared" / "specs" / "papers.md"
STATUS = ("WORKS", "partial", "missing")
KEYS = ("paper", "names", "models", "tests", "configuration", "options", "status", "note")
MODELS = (
    "tokens in one pass",
    "masked diffusion",
    "flow and diffusion",
    "trees",
    "vision-language models",
)
Entry = Mapping[str, Any]


class Paper(NamedTuple):
    """Holds a row of the list of papers."""

    key: str
    priority: str
    section: str
    title: str
    acronym: str


def read_map(path: Path = MAP) -> dict[str, Entry]:
    entries: dict[str, Entry] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return entries


def papers(path: Path = PAPERS) -> list[Paper]:
    """Read the rows P0 and P1 of the list, in order; the key is the last word of the second
    column."""
    rows = []
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        section = line[3:] if line.startswith("## ") else section
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) > 3 and cells[0] in ("P0", "P1"):
            rows.append(Paper(cells[1].split()[-1], cells[0], section, cells[2], cells[3]))
    return rows


def problems(entries: Mapping[str, Entry]) -> list[str]:
    """List errors of the map."""
    load_built_in()
    return [f"{key}: {why}" for key, entry in entries.items() for why in _wrong(entry)]


def _wrong(entry: Entry) -> Iterator[str]:
    for key in set(entry) - set(KEYS):
        yield f"unknown key {key!r}; {suggest(key, KEYS)}"
    if entry.get("status") not in STATUS:
        yield f"status {entry.get('status')!r} is none of {', '.join(STATUS)}"
    for name in entry.get("names", ()):
        kind, _, short = name.partition("/")
        if kind not in ALL or short not in ALL[kind]:
            yield f"nothing is registered as {name}"
    for kind in entry.get("models", ()):
        if kind not in MODELS:
            yield f"unknown kind of model {kind!r}; {suggest(kind, MODELS)}"
    yield from _absent(entry)
    yield from _unfounded(entry)


def _absent(entry: Entry) -> Iterator[str]:
    """Name the tests that do not exist, and what is wrong with the configuration."""
    for test in entry.get("tests", ()):
        file, _, function = test.partition("::")
        if function not in functions(file):
            yield f"there is no test {test}"
    if configuration := entry.get("configuration"):
        try:
            file = find_config(configuration)
            if options := entry.get("options"):
                check(load(file, options))
        except UserError as error:
            # a user's file, such as rewards recorded by a first run
            if "no such file or folder" not in str(error):
                yield str(error)


def _unfounded(entry: Entry) -> Iterator[str]:
    """Check that what works has a name, a test and a configuration, what is missing has none, and
    what is partial gives a reason."""
    named = bool(entry.get("names")) and bool(entry.get("tests"))
    if entry.get("status") in ("WORKS", "partial") and not entry.get("configuration"):
        yield f"it is {entry['status']}, and has no configuration"
    if entry.get("status") == "missing" and (entry.get("names") or entry.get("tests")):
        yield "it is missing, and has names or tests"
    if entry.get("status") in ("WORKS", "partial") and not named:
        yield f"it is {entry['status']}, and has no name or no test"
    if entry.get("status") == "partial" and not entry.get("note"):
        yield "it is partial, and no note says what is missing"


@cache
def functions(file: str) -> frozenset[str]:
    """Return the names of the functions of a file; none if there is no such file."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    return frozenset(re.findall(r"^ *def (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def page(entries: Mapping[str, Entry], listed: list[Paper]) -> str:
    """Write the page. Raises KeyError for a paper that the map lacks."""
    parts = [
        "# Which papers mmrl covers\n",
        "Written by `scripts/dev/coverage.py` from `docs/coverage.yaml`, whose names, tests and "
        "files a test checks; the tests and the options beside a configuration are in that file. "
        "**WORKS**: the mechanism as the paper says, from a configuration, "
        "held by a test, for every kind of model that it is meant for. **partial**: the note says "
        "what is not. **missing**: not built.\n",
        _counts(entries, listed),
    ]
    for section in dict.fromkeys(paper.section for paper in listed):
        parts.append(f"\n## {section}\n")
        parts.append("paper | serves it | models | configuration | status")
        parts.append("---|---|---|---|---")
        rows = [paper for paper in listed if paper.section == section]
        parts += [_row(paper, entries[paper.key]) for paper in rows]
    return "\n".join(parts) + "\n"


def _counts(entries: Mapping[str, Entry], listed: list[Paper]) -> str:
    lines = [f"| | {' | '.join(STATUS)} |", "|---|" + "---|" * len(STATUS)]
    for section in dict.fromkeys(paper.section for paper in listed):
        count = Counter(entries[p.key]["status"] for p in listed if p.section == section)
        lines.append(f"| {section} | {' | '.join(str(count[s]) for s in STATUS)} |")
    return "\n".join(lines)


def _row(paper: Paper, entry: Entry) -> str:
    status = entry["status"] + (f": {entry['note']}" if entry.get("note") else "")
    cells = [
        f"{paper.acronym or paper.title} ({paper.key})",
        ", ".join(_named(name) for name in entry.get("names", ())),
        ", ".join(entry.get("models", ())),
        f"`{entry['configuration']}`" if entry.get("configuration") else "",
        status,
    ]
    return " | ".join(cells)


def _named(name: str) -> str:
    kind, _, short = name.partition("/")
    return f"{kind.replace('_', ' ')} `{short}`"


def main() -> int:
    entries = read_map()
    wrong = problems(entries)
    if PAPERS.is_file():
        listed = papers()
        keys = {paper.key for paper in listed}
        wrong += [f"{key}: not in the map" for key in sorted(keys - set(entries))]
        wrong += [f"{key}: not in the list of papers" for key in sorted(set(entries) - keys)]
        if not wrong:
            PAGE.write_text(page(entries, listed), encoding="utf-8")
    print("\n".join(wrong) or f"{len(entries)} papers")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
