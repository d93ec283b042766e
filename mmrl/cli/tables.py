"""Prints tables on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from mmrl.monitoring.report.evidence import alike


def evaluation_table(rows: list[dict[str, Any]]) -> None:
    """Print a table with models as rows and rewards as columns: mean and half the 95 % interval."""
    names = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    table = Table("model", *names, title="held-out rewards, mean ± 95 % interval")
    for row in rows:
        estimates = [row["rewards"].get(name) for name in names]
        table.add_row(row["model"], *map(_estimate, estimates))
    Console().print(table)


def _estimate(estimate: dict[str, Any] | None) -> str:
    """Return mean and half the interval; for a measure of the whole set only the value."""
    if estimate is None or estimate["mean"] is None:
        return ""
    mean = f"{estimate['mean']:.3f}"
    high = estimate["high"]
    return mean if high is None else f"{mean} ± {high - estimate['mean']:.3f}"


def change_sentences(rows: list[dict[str, Any]]) -> list[str]:
    """Report the paired difference of the trained model from the base: one sentence per reward."""
    before = next((row for row in rows if "difference" not in row), None)
    after = next((row for row in rows if row["model"] == "trained"), None)
    if before is None or after is None:
        return []
    return [
        f"{name}: {_change(change)}"
        for name, change in after["difference"].items()
        if change["mean"] is not None
    ]


def _change(change: dict[str, Any]) -> str:
    """Write a paired difference with its interval, and whether it is significant."""
    count = change["prompts"]
    mean = f"{change['mean']:+.3g}"
    prompts = f"paired over {count} prompt{'s' if count != 1 else ''}"
    if change["low"] is None:
        return f"{mean}, {prompts}: too few to say how sure that is"
    verdict = ": no change is shown" if change["low"] <= 0 <= change["high"] else ""
    numbers = alike((change["mean"], change["low"], change["high"]), "+")
    mean, low, high = (number.replace("−", "-") for number in numbers)
    return f"{mean} [{low}, {high}], {prompts}{verdict}"
