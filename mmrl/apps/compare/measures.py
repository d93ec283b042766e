"""Reads the scores of a comparison's runs, and computes intervals, tests and verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mmrl.apps.compare.plan import Plan
from mmrl.apps.compare.runs import Job
from mmrl.apps.compare.settings import Setting
from mmrl.core.errors import UserError
from mmrl.core.statistics import Interval, Table, holm, is_binary, paired

TOTAL = "reward"  # the trained weighted sum
DIVERSITY = "diversity"
JUDGE = "not trained on"
ALPHA = 0.05


@dataclass(frozen=True)
class Measured:
    """Holds the scores of one setting on one half of the held-out prompts: measure -> [S, P], the
    mean over a prompt's samples. ``binary``: measures whose samples score 0 or 1."""

    trained: dict[str, Table]
    base: dict[str, Table]
    prompts: list[str]
    held_out: bool
    binary: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Comparison:
    """Holds the paired difference ``candidate - baseline`` in one measure. ``holm``: its p-value,
    corrected for all comparisons in that measure."""

    candidate: str
    baseline: str
    measure: str
    difference: Interval
    holm: float

    @property
    def shown(self) -> int:
        """Return 1 or -1 if a difference is significant, by interval and correction, else 0."""
        if self.holm >= ALPHA or self.difference.low <= 0 <= self.difference.high:
            return 0
        return 1 if self.difference.mean > 0 else -1

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"shown": self.shown}


def read_scores(jobs: Sequence[Job], split: str) -> dict[str, Measured]:
    """Read the scores of every setting, by label. Raises UserError if they cannot be paired."""
    files: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        text = job.scores(split).read_text(encoding="utf-8")
        files.setdefault(job.setting.label, []).append(json.loads(text))
    first = next(iter(files.values()))[0]
    for label, runs in files.items():
        if any(run["prompts"] != first["prompts"] for run in runs):
            raise UserError(
                f"{label} was evaluated on other prompts than {next(iter(files))}: a model may "
                "have left some out as too long; give both the same held-out prompts"
            )
    return {label: _measured(runs) for label, runs in files.items()}


def _measured(runs: Sequence[Mapping[str, Any]]) -> Measured:
    """Stack the scores of the seeds."""
    trained, base = (_samples(runs, model) for model in ("trained", "base"))
    known = [name for name in trained if name in base]
    shares = [n for n in known if is_binary(_known(trained[n]), None)]
    binary = frozenset(n for n in shares if is_binary(_known(base[n]), None))
    tables = (_tables(runs, "trained", trained), _tables(runs, "base", base))
    return Measured(*tables, runs[0]["prompts"], runs[0]["held_out"], binary)


def _known(samples: Table) -> Table:
    return samples[np.isfinite(samples)]


def _rows(runs: Sequence[Mapping[str, Any]], model: str) -> list[Mapping[str, Any]]:
    return [next(row for row in run["models"] if row["model"] == model) for run in runs]


def _samples(runs: Sequence[Mapping[str, Any]], model: str) -> dict[str, Table]:
    """Return the scores of every sample, name -> [S, P, copies], their weighted sum first."""
    rows = _rows(runs, model)
    samples = {
        name: np.array([row["rewards"][name] for row in rows], dtype=np.float64)
        for name in rows[0]["rewards"]
    }
    weights = {name: weight for name, weight in runs[0]["weights"].items() if weight}
    total = sum((weight * samples[name] for name, weight in weights.items()), np.zeros(1))
    return {TOTAL: total, **samples}


def _tables(
    runs: Sequence[Mapping[str, Any]], model: str, samples: Mapping[str, Table]
) -> dict[str, Table]:
    tables = {name: _means(values) for name, values in samples.items()}
    diversity = np.stack(
        [np.array(row["diversity"], dtype=np.float64) for row in _rows(runs, model)]
    )
    if np.isfinite(diversity).any():
        tables[DIVERSITY] = diversity
    return tables


def _means(scores: Table) -> Table:
    """Average over the scored samples of a prompt, the last axis; NaN if there are none."""
    counts = np.isfinite(scores).sum(-1)
    return np.where(counts, np.nansum(scores, -1) / np.maximum(counts, 1), np.nan)


def measures_of(plan: Plan, measured: Mapping[str, Measured]) -> list[str]:
    """List the measures that all settings have, the primary one first; the sum is left out if it is
    a single reward."""
    tables = [scores.trained for scores in measured.values()]
    names = [*plan.compared, DIVERSITY]
    shared = [name for name in names if all(name in table for table in tables)]
    same = [n for n in shared if n != TOTAL and _alike(tables, n, plan.primary)]
    return [plan.primary, *(n for n in shared if n not in (plan.primary, *same))]


def _alike(tables: Sequence[Mapping[str, Table]], name: str, other: str) -> bool:
    return name != other and all(
        np.array_equal(table[name], table[other], equal_nan=True) for table in tables
    )


def chosen(plan: Plan, development: Mapping[str, Measured]) -> dict[int, Setting]:
    """Choose the best setting of every arm on the development prompts."""
    best: dict[int, Setting] = {}
    for setting in plan.settings:
        score = _score(development, setting, plan.primary)
        if setting.arm not in best or score > _score(development, best[setting.arm], plan.primary):
            best[setting.arm] = setting
    return best


def _score(development: Mapping[str, Measured], setting: Setting, measure: str) -> float:
    table = development[setting.label].trained[measure]
    return float(np.nanmean(table)) if np.isfinite(table).any() else -np.inf


def pairs(plan: Plan, best: Mapping[int, Setting]) -> list[tuple[str, str]]:
    """List (candidate, baseline): the first configuration is the baseline of the others. For one
    configuration with a sweep, the chosen setting is compared with every other one."""
    if len(best) > 1:
        first, *candidates = (best[arm].label for arm in sorted(best))
        return [(candidate, first) for candidate in candidates]
    (winner,) = best.values()
    return [(winner.label, s.label) for s in plan.settings if s.label != winner.label]


def compare(
    measured: Mapping[str, Measured], measures: Sequence[str], between: Sequence[tuple[str, str]]
) -> list[Comparison]:
    """Estimate every difference, and correct for the number of comparisons in each measure."""
    comparisons = []
    for measure in measures:
        differences = [
            paired(
                measured[baseline].trained[measure],
                measured[candidate].trained[measure],
                all(measure in measured[label].binary for label in (baseline, candidate)),
            )
            for candidate, baseline in between
        ]
        adjusted = holm([difference.p for difference in differences])
        for (candidate, baseline), difference, p in zip(
            between, differences, adjusted, strict=True
        ):
            comparisons.append(Comparison(candidate, baseline, measure, difference, p))
    return comparisons


def verdict(plan: Plan, comparisons: Sequence[Comparison]) -> list[str]:
    """State what the intervals show. The primary measure comes first; others are named if a
    difference is significant."""
    sentences = []
    deciding = [c for c in comparisons if c.measure == plan.primary]
    for comparison in deciding:
        sentences.append(sentence(comparison, len(deciding)))
        for aside in comparisons:
            same = (aside.candidate, aside.baseline) == (comparison.candidate, comparison.baseline)
            if same and aside is not comparison and aside.shown:
                sentences.append(_aside(plan, comparison, aside))
    if len(plan.seeds) == 1:
        sentences.append(
            "One seed: the intervals do not include variation between runs: use at least three "
            "seeds before you draw conclusions."
        )
    return [*sentences, plan.note] if plan.note else sentences


def sentence(comparison: Comparison, count: int) -> str:
    """State in one sentence whether a difference is significant, and how large it may be."""
    difference = comparison.difference
    name = f"held-out {comparison.measure}"
    bounds = (
        f"{difference.mean:+.4g}, 95 % interval {difference.low:+.4g} to {difference.high:+.4g}"
    )
    sizes = f"{plural(difference.seeds, 'seed')}, {plural(difference.prompts, 'prompt')}"
    about = f"({bounds}; {sizes})"
    if comparison.shown:
        word = "higher" if comparison.shown > 0 else "lower"
        return f"{comparison.candidate} has a {word} {name} than {comparison.baseline} {about}."
    start = f"No difference in {name} is shown between {comparison.candidate} and "
    start += f"{comparison.baseline} {about}"
    if not difference.low <= 0 <= difference.high:
        return (
            f"{start}: the interval leaves out zero, but among {count} comparisons that is not "
            f"enough (Holm's p {comparison.holm:.2g})."
        )
    if difference.low == difference.mean == difference.high == 0:
        return f"{start}: all scores are equal, as if both were the same training."
    if not np.isfinite(difference.high - difference.low):
        return f"{start}: too little was measured for an interval."
    return (
        f"{start}: {comparison.candidate} may be up to {max(difference.high, 0):.4g} better or "
        f"{max(-difference.low, 0):.4g} worse."
    )


def _aside(plan: Plan, deciding: Comparison, other: Comparison) -> str:
    """State that another measure also differs, and if it contradicts the primary one."""
    word = "higher" if other.shown > 0 else "lower"
    kind = ", which was not trained on," if kind_of(plan, other.measure) == JUDGE else ""
    but = "But its" if deciding.shown * other.shown < 0 else "Its"
    bounds = f"{other.difference.low:+.4g} to {other.difference.high:+.4g}"
    return f"{but} {other.measure}{kind} is {word} ({other.difference.mean:+.4g}, {bounds})."


def kind_of(plan: Plan, measure: str) -> str:
    """Describe whether a measure is a reward that settings were trained on."""
    if measure == DIVERSITY:
        return "mean distance of two samples"
    return "trained on" if measure in (TOTAL, *plan.trained_on) else JUDGE


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
