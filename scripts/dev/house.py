"""Measures the code against its size and style goals and writes docs/results/house.md.

    python scripts/dev/house.py            # print the table
    python scripts/dev/house.py --write    # and write the page

Counts mmrl/, rewards/ and samplers/: functions with signature and docstring, and duplicates by
syntactic shape.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PRODUCT = ("mmrl", "rewards", "samplers")
KERNEL = "core config advantages objectives rollout policies train scoring data".split()
PAGE = ROOT / "docs" / "results" / "house.md"
HEARTS = ("objectives/policy_gradient.py", "train/trainer.py", "policies/base.py")


class Figure(NamedTuple):
    name: str
    before: str  # commit 5a3a9258, the baseline
    value: str
    goal: str


TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for room in PRODUCT
    for path in sorted((ROOT / room).rglob("*.py"))
}
NODES = [node for tree in TREES.values() for node in ast.walk(tree)]


def lines(*folders: str) -> int:
    """Count the lines of all files of these folders."""
    inside = [p for p in TREES if any(p.is_relative_to(ROOT / folder) for folder in folders)]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in inside)


def members(file: str, name: str) -> int:
    """Count the public members that a class itself declares."""
    found = next(n for n in TREES[ROOT / "mmrl" / file].body if getattr(n, "name", "") == name)
    assert isinstance(found, ast.ClassDef)
    names = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    for node in found.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return sum(not name.startswith("_") for name in names)


def depth(name: str, bases: dict[str, list[str]], seen: tuple[str, ...] = ()) -> int:
    """Count mmrl's classes from a class to its farthest base."""
    known = [base for base in bases[name] if base in bases and base not in (*seen, name)]
    return 1 + max((depth(base, bases, (*seen, name)) for base in known), default=0)


def deepest() -> int:
    """Measure the deepest inheritance."""
    bases = {
        node.name: [base.id if isinstance(base, ast.Name) else "" for base in node.bases]
        for node in NODES
        if isinstance(node, ast.ClassDef)
    }
    return max(depth(name, bases) for name in bases)


def called(*names: str) -> int:
    """Count calls of functions by these names."""
    calls = [node.func for node in NODES if isinstance(node, ast.Call)]
    return sum(isinstance(function, ast.Name) and function.id in names for function in calls)


def swapped() -> int:
    """Count assignments to ``__class__``."""
    targets = [t for node in NODES if isinstance(node, ast.Assign) for t in node.targets]
    return sum(
        isinstance(target, ast.Attribute) and target.attr == "__class__" for target in targets
    )


def long_functions() -> int:
    """Count functions of more than 40 lines."""
    functions = [n for n in NODES if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return sum((n.end_lineno or n.lineno) - n.lineno >= 40 for n in functions)


def loaded() -> int:
    """Count modules of mmrl that importing the trainer loads."""
    code = "import sys, mmrl.train.trainer\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    return sum(name.partition(".")[0] in PRODUCT for name in done.stdout.split())


def duplicates() -> str:
    """Count pairs of places with six or more lines of the same shape, per 1,000 lines."""
    command = shutil.which("duplicates")
    if command is None:
        return "not measured here"
    pairs = 0
    for room in PRODUCT:
        options = ["--repo", str(ROOT / room), "--most", "200", "--seconds", "120"]
        done = subprocess.run([command, *options], capture_output=True, text=True, check=False)
        found = re.search(r"(\d+) pairs? of places", done.stdout)
        pairs += int(found[1]) if found else 0
    return f"{1000 * pairs / lines(*PRODUCT):.1f}"


def words(paths: list[Path]) -> dict[Path, int]:
    """Count the words of each page."""
    return {path: len(path.read_text(encoding="utf-8").split()) for path in paths}


def measured() -> list[Figure]:
    """Measure everything once."""
    docs = words([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    kernel = lines("samplers", *(f"mmrl/{room}" for room in KERNEL))
    hearts = " / ".join(str(lines(f"mmrl/{file}")) for file in HEARTS)
    options = members("config/options.py", "TrainOptions")
    return [
        Figure("lines of the product", "106,200", f"{lines(*PRODUCT):,}", "<= 85,000"),
        Figure("lines of the kernel", "-", f"{kernel:,}", "<= 20,000"),
        Figure("lines of the zoo", "-", f"{lines('mmrl/zoo'):,}", "-"),
        Figure(" / ".join(HEARTS), "500 / 399 / 467", hearts, "200 / 200 / 250"),
        Figure("members of Policy", "73", str(members("policies/base.py", "Policy")), "12"),
        Figure("members of Objective", "39", str(members("objectives/base.py", "Objective")), "2"),
        Figure("fields of `train:`", "49", str(options), "<= 24"),
        Figure("modules that the trainer loads", "452", str(loaded()), "<= 60"),
        Figure("`__class__ =`", "14", str(swapped()), "<= 2"),
        Figure("getattr and hasattr", "498", str(called("getattr", "hasattr")), "<= 150"),
        Figure("depth of inheritance", "8", str(deepest()), "<= 4"),
        Figure("pairs of duplicates, per 1,000 lines", "1.8", duplicates(), "<= 1.0"),
        Figure("functions over 40 lines", "50", str(long_functions()), "<= 10"),
        Figure("words of docs", "171,000", f"{sum(docs.values()):,}", "90,000"),
        Figure("words of the longest page", "21,000", f"{max(docs.values()):,}", "6,000"),
        Figure("lines of tests", "80,000", f"{sum(t.count(chr(10)) for t in tests):,}", "60,000"),
    ]


def table(figures: list[Figure]) -> str:
    """Return the figures as a table in Markdown."""
    head = "| | before | now | goal |\n|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(figure)} |\n" for figure in figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/results/house.md")
    found = table(measured())
    print(found)
    if parser.parse_args().write:
        about = (
            "# The house, measured\n\nWritten by `python scripts/dev/house.py --write`. Counted "
            "are `mmrl/`, `rewards/` and `samplers/`; *before* is commit 5a3a9258.\nNo file "
            "imports one that imports it, and a room imports only rooms before it "
            "(`tests/core/test_walls.py`).\n\n"
        )
        PAGE.write_text(about + found, encoding="utf-8")


if __name__ == "__main__":
    main()
