"""Updates the table of recipes in docs/recipes.md from configs/benchmarks/recipes.toml: published
figures, and evaluation."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.core.paths import shipped_configs

FIELDS = (
    "method",
    "model",
    "task",
    "source",
    "settings",
    "cards",
    "hours",
    "base",
    "expected",
    "evaluate",
    "level",
)
LEVELS = ("V", "T")
UNKNOWN = ("not found", "not published")  # shown as an empty cell
COMMAND = "mmrl evaluate runs/NAME "
BEGIN = "<!-- recipes: python scripts/dev/recipes_table.py -->"
END = "<!-- end of recipes -->"


def recipes() -> dict[str, dict[str, str]]:
    """Read configs/benchmarks/recipes.toml: the published settings of every configuration next to
    it.

    Raises:
        UserError: a field that is missing or unknown, a recipe without a configuration, or a
            configuration without a recipe.
    """
    folder = shipped_configs() / "benchmarks"
    table = tomllib.loads((folder / "recipes.toml").read_text(encoding="utf-8"))
    for name, fields in table.items():
        if set(fields) != set(FIELDS) or fields["level"] not in LEVELS:
            wrong = ", ".join(sorted(set(fields) ^ set(FIELDS))) or f"level {fields['level']!r}"
            raise UserError(f"{folder / 'recipes.toml'}: [{name}] has it wrong: {wrong}")
    files = {path.stem for path in folder.glob("*.yaml")}
    if files != set(table):
        apart = ", ".join(sorted(files ^ set(table)))
        raise UserError(f"{folder}: configurations and recipes.toml differ in {apart}")
    return table


def markdown(table: Mapping[str, Mapping[str, str]]) -> str:
    """Write the recipes as two Markdown tables: published figures, and how they are evaluated."""
    head = ("recipe", "model", "settings", "cards", "hours", "before", "after", "source")
    keys = ("model", "settings", "cards", "hours", "base", "expected", "source")
    lines = [row(head), row(["---"] * len(head))]
    benchmarks: dict[str, list[str]] = {}
    for name, fields in table.items():
        title = f"`{name}`: {fields['method']}, {fields['task']}"
        cells = (fields[key] for key in keys)
        lines.append(row([title, *("" if cell in UNKNOWN else cell for cell in cells)]))
        benchmarks.setdefault(fields["evaluate"].removeprefix(COMMAND), []).append(name)
    lines += ["", row((f"`{COMMAND}...`", "recipes")), row(["---"] * 2)]
    lines += [row([f"`{words}`", ", ".join(names)]) for words, names in benchmarks.items()]
    return "\n".join(lines)


def row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def renewed(page: str) -> str:
    """Return the text of a page with the tables between its two marks updated."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"the page has no place for the recipes: {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{markdown(recipes())}\n{END}{after}"


def write(page: Path) -> None:
    """Update the tables of a page."""
    page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2] / "docs" / "recipes.md")
