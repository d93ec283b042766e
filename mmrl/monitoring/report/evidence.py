"""Reads the evaluation of a run: the held-out table, the base model's best guidance scale, the
verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from mmrl.monitoring.alarms import STUCK
from mmrl.monitoring.report.charts import number
from mmrl.monitoring.report.runs import Run


@dataclass(frozen=True)
class Estimate:
    """Holds a mean with its confidence interval over n samples; unbounded with a single prompt."""

    mean: float
    low: float
    high: float
    n: int | None = None

    def __str__(self) -> str:
        mean, *interval = alike((self.mean, self.low, self.high))
        return f"{mean} [{', '.join(interval)}]" if self.bounded else f"{mean} (no interval)"

    @property
    def bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True)
class Row:
    """Holds one evaluated model at one guidance scale."""

    model: str
    guidance: float | None
    rewards: dict[str, Estimate]
    # to the base model, paired by prompts; n counts these
    differences: dict[str, Estimate] = field(default_factory=dict)

    @property
    def trained(self) -> bool:
        return self.model.startswith("trained")


@dataclass(frozen=True)
class Evaluation:
    """Holds evaluation.json, checked. ``optimised`` names the rewards the run was trained on."""

    rows: list[Row]
    optimised: list[str]
    prompts: int | None
    num_samples: int | None

    def names(self) -> list[str]:
        """Return the rewards in the order of the columns: the optimised ones first."""
        rewards = list({name: None for row in self.rows for name in row.rewards})
        return sorted(rewards, key=lambda name: name not in self.optimised)

    def after(self) -> Row | None:
        return next((row for row in self.rows if row.trained), None)

    def before(self) -> Row | None:
        """Return the base model at the trained one's guidance scale, else the first base row."""
        after = self.after()
        base = [row for row in self.rows if not row.trained]
        same = [row for row in base if after is not None and row.guidance == after.guidance]
        return next(iter(same or base), None)

    def best_base(self, name: str) -> Row | None:
        """Return the base row with the highest mean of that reward."""
        base = [row for row in self.rows if not row.trained and name in row.rewards]
        return max(base, key=lambda row: row.rewards[name].mean, default=None)

    def change(self, name: str) -> tuple[Estimate, Estimate] | None:
        """Return that reward before and after, if both were measured."""
        before = self.before()
        after = self.after()
        if (
            before is None
            or after is None
            or name not in before.rewards
            or name not in after.rewards
        ):
            return None
        return before.rewards[name], after.rewards[name]


def score(value: float) -> str:
    """Write three significant digits, but two decimals for scores between 0.1 and 10."""
    return f"{value:.2f}".replace("-", "−") if 0.1 <= abs(value) < 10 else number(value)


def alike(values: Sequence[float], sign: str = "") -> list[str]:
    """Write the numbers of one line with equally many decimals, by three significant digits of the
    largest (two between 0.1 and 10). ``sign`` "+": for differences, with a plus sign and without
    common trailing zeros."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if not 1e-3 <= largest < 1e6:
        return [score(value) for value in values]
    decimals = max(0, 2 - math.floor(math.log10(largest)))
    decimals = 2 if 0.1 <= largest < 10 and not sign else decimals
    known = [value for value in values if math.isfinite(value)]
    while sign and decimals and all(f"{value:.{decimals}f}".endswith("0") for value in known):
        decimals -= 1
    return [
        f"{value:{sign},.{decimals}f}".replace("-", "−") if math.isfinite(value) else "–"
        for value in values
    ]


def read_evaluation(run: Run) -> Evaluation:
    """Read the rows of evaluation.json; an invalid row is noted and left out."""
    rows = []
    listed = run.evaluation.get("rows", [])
    for raw in listed if isinstance(listed, list) else []:
        try:
            guidance = raw.get("guidance")
            rows.append(
                Row(
                    str(raw["model"]),
                    None if guidance is None else float(guidance),
                    _estimates(raw["rewards"]),
                    _estimates(raw.get("difference", {})),
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            run.notes.append(f"evaluation.json: row not understood: {str(raw)[:80]}")
    count = run.evaluation.get
    # files of earlier versions use copies
    counts = (count("prompts"), count("num_samples", count("copies")))
    return Evaluation(
        rows, run.optimised(), *(count if isinstance(count, int) else None for count in counts)
    )


def _estimates(raw: dict[str, Any]) -> dict[str, Estimate]:
    """Read the estimates that have a value."""
    estimates = {str(name): _estimate(value) for name, value in raw.items()}
    return {name: e for name, e in estimates.items() if math.isfinite(e.mean)}


def _estimate(raw: dict[str, Any]) -> Estimate:
    mean = math.nan if raw["mean"] is None else float(raw["mean"])
    ends = {"low": "-inf", "high": "inf"}
    low, high = (float(end if raw.get(key) is None else raw[key]) for key, end in ends.items())
    return Estimate(mean, low, high, raw.get("n", raw.get("prompts")))


def table(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Make the page's table: labels, cells with number, interval and a mark on the column's common
    scale."""
    names = evaluation.names()
    scales = {
        name: _scale([row.rewards[name] for row in evaluation.rows if name in row.rewards])
        for name in names
    }
    return [
        {
            "row": row,
            "label": row.model,
            "guidance": number(row.guidance),
            "cells": [_cell(row.rewards.get(name), scales[name], row.trained) for name in names],
        }
        for row in evaluation.rows
    ]


def _cell(
    estimate: Estimate | None, scale: tuple[float, float], trained: bool
) -> dict[str, Any] | None:
    if estimate is None:
        return None
    mean, _, interval = str(estimate).partition(" ")
    return {
        "mean": mean,
        "interval": interval,
        "mark": _mark(estimate, scale, trained) if estimate.bounded else "",
    }


def _scale(estimates: Sequence[Estimate]) -> tuple[float, float]:
    ends = [end for e in estimates for end in (e.low, e.mean, e.high) if math.isfinite(end)]
    low = min(ends)
    high = max(ends)
    if low >= 0 and high <= 1 and high - low > 0.2:
        return 0.0, 1.0
    room = 0.1 * (high - low) or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _mark(e: Estimate, scale: tuple[float, float], trained: bool) -> Markup:
    """Draw a dot with its interval on a line of 120 pixels."""
    inside = [min(max(value, scale[0]), scale[1]) for value in (e.low, e.mean, e.high)]
    at = [4 + 112 * (value - scale[0]) / (scale[1] - scale[0]) for value in inside]
    kind = "after" if trained else "before"
    return Markup(
        '<svg class="mark {}" viewBox="0 0 120 14" aria-hidden="true">'
        '<line class="rail" x1="4" x2="116" y1="7" y2="7"/>'
        '<line class="ci" x1="{:.1f}" x2="{:.1f}" y1="7" y2="7"/><circle cx="{:.1f}" '
        'cy="7" r="4"/></svg>'
    ).format(kind, at[0], at[2], at[1])


def verdict(run: Run, evaluation: Evaluation) -> list[str]:
    """State the result in sentences, from held-out measurements if there are any, else from
    training rewards."""
    changes = {name: change for name in evaluation.names() if (change := evaluation.change(name))}
    if not changes:
        return _training_verdict(run)
    main = [name for name in changes if name in evaluation.optimised] or list(changes)[:1]
    sentences = [_sentence(name, *changes[name], evaluation) for name in main]
    untrained = [
        f"{n} {score(b.mean)} → {score(a.mean)}" for n, (b, a) in changes.items() if n not in main
    ]
    if untrained:
        sentences.append(f"Not trained on, same pictures: {'; '.join(untrained)}.")
    return sentences


def _sentence(name: str, before: Estimate, after: Estimate, evaluation: Evaluation) -> str:
    text = f"Held-out {name}: {before} before, {after} after"
    row = evaluation.after()
    paired = row.differences.get(name) if row is not None else None
    if paired is None:
        gain = f"{after.mean - before.mean:+.2f}".replace("-", "−")
        text += f" ({gain})."
        if after.low <= before.high and before.low <= after.high:
            text += (
                " These intervals overlap, which does not say whether it changed: mmrl evaluate "
                "measures the difference prompt by prompt."
            )
    elif not math.isfinite(paired.low):
        few = "One prompt does" if paired.n == 1 else "Scores that are all equal do"
        text += f" ({paired.mean:+.3g}). {few} not say how sure that is."
    else:
        text += f"; {_signed(paired)}, paired over {paired.n} prompts."
        if paired.low <= 0 <= paired.high:
            text += " That interval holds 0: no change is shown."
    best = evaluation.best_base(name)
    base = evaluation.before()
    if best is not None and best is not base:
        text += (
            f" The base model at its best guidance scale ({number(best.guidance)}) reaches "
            f"{best.rewards[name]}."
        )
    return text


def _signed(change: Estimate) -> str:
    """Write a difference with its interval, plus or minus before each number."""
    return "{} [{}, {}]".format(*alike((change.mean, change.low, change.high), "+"))


def stuck(run: Run) -> str:
    """Say that a run had no learning signal; empty: it had one, or unknown.

    Judged by the last alarm about it, and by how often the gradient was 0.
    """
    alarms = [event for event in run.events if event.get("about") == STUCK]
    gradients = [value for value in run.column("grad_norm") if value is not None]
    zero = sum(value == 0 for value in gradients)
    often = f"In {zero} of {len(gradients)} iterations the gradient was 0." if zero else ""
    if not alarms:
        return often if zero > len(gradients) / 2 else ""
    message = str(alarms[-1].get("message", ""))
    text = f"Iteration {alarms[-1].get('iteration')}: {message}."
    return f"{text} {often}".strip()


def _training_verdict(run: Run) -> list[str]:
    rewards = [value for value in run.column("reward/mean") if value is not None]
    if not rewards:
        return ["No rewards are recorded yet."]
    part = max(1, len(rewards) // 10)
    first = sum(rewards[:part]) / part
    last = sum(rewards[-part:]) / part
    return [
        f"Training reward {score(first)} at the start, {score(last)} at the end (means of "
        f"{part} iteration(s)).",
        f"This is not a held-out measurement; for one, run: mmrl evaluate {run.folder}",
    ]
