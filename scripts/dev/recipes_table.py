"""Renews the table of recipes in docs/recipes.md from configs/benchmarks/recipes.toml."""

from pathlib import Path

from mmrl.apps.benchmarks.recipes import write

if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2] / "docs" / "recipes.md")
