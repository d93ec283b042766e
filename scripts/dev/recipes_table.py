"""Updates the table of recipes in docs/recipes.md from configs/benchmarks/recipes.toml: published
settings, and evaluation."""

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
    """Write the recipes as two Markdown tables: published settings, and evaluation."""
    head = ("recipe", "model", "settings", "cards", "hours", "before", "after", "level")
    lines = [row(head), row(["---"] * len(head))]
    for name, fields in table.items():
        title = f"`benchmarks/{name}`: {fields['method']}, {fields['task']}"
        keys = ("model", "settings", "cards", "hours", "base", "expected", "level")
        lines.append(row([title, *(fields[key] for key in keys)]))
    lines += ["", row(("recipe", "source", "evaluation")), row(["---"] * 3)]
    lines += [
        row([f"`{name}`", fields["source"], f"`{fields['evaluate']}`"])
        for name, fields in table.items()
    ]
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
