"""Writes a comparison as markdown, for a repository: the verdict, costs, and how to repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Content = Mapping[str, Any]  # content of compare.json


def page(content: Content) -> str:
    """Return the page. Labels and prompts come from the user, so special characters are escaped."""
    budget = ", ".join(f"{limit:g} {name}" for name, limit in content["budget"].items())
    prompts = len(content["prompts"]["test"])
    lines = [
        f"# {' · '.join(plain(s['label']) for s in content['settings'])}",
        "",
        f"Written by `mmrl compare` on {content['made']}: {len(content['seeds'])} seeds, "
        f"{prompts} test prompts, budget {budget or 'as configured'}. Means with 95 % intervals; "
        f"differences are paired by prompt and seed, their p-values corrected for being several "
        f"(Holm).",
        "",
        *(f"* {plain(sentence)}" for sentence in content["verdict"]),
        *_differences(content),
        *_means(content),
        *_costs(content),
        *_how(content),
    ]
    if not content["held_out"]:
        lines.insert(3, "\nThe data hold nothing out: these prompts were trained on.")
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Escape markdown and HTML."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#" else c for c in " ".join(str(text).split()))


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _number(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "?"
    return f"{value:+.3f}" if signed else f"{value:.3f}"


def _bounds(estimate: Content, signed: bool = False) -> str:
    low, high = (_number(estimate[key], signed) for key in ("low", "high"))
    return f"{_number(estimate['mean'], signed)} ({low} to {high})"


def _differences(content: Content) -> list[str]:
    measures = content["measures"]
    kinds = ", ".join(f"*{plain(name)}*: {kind}" for name, kind in measures.items())
    pairs = list(dict.fromkeys((c["candidate"], c["baseline"]) for c in content["comparisons"]))
    comparisons = {(c["candidate"], c["baseline"], c["measure"]): c for c in content["comparisons"]}

    def rows() -> Iterator[list[str]]:
        for candidate, baseline in pairs:
            row = [f"{plain(candidate)} - {plain(baseline)}"]
            for name in measures:
                comparison = comparisons.get((candidate, baseline, name))
                cell = "" if comparison is None else _bounds(comparison["difference"], signed=True)
                row.append(f"**{cell}**" if comparison and comparison["shown"] else cell)
            yield row

    head = ["difference", *map(plain, measures)]
    return ["", "## Differences", "", f"{kinds}. Bold: shown.", "", *_table(head, rows())]


def _means(content: Content) -> list[str]:
    measures = content["measures"]

    def rows() -> Iterator[list[str]]:
        for label, by_measure in content["means"]["test"].items():
            row = [plain(label)]
            for name in measures:
                estimate = by_measure.get(name)
                row.append(_bounds(estimate["trained"]) if estimate else "")
            first = by_measure.get(content["primary"])
            yield [*row, _bounds(first["gain"], signed=True) if first else ""]

    head = ["after training", *map(plain, measures), f"gain of {plain(content['primary'])}"]
    return ["", "## Test prompts", "", *_table(head, rows())]


def _costs(content: Content) -> list[str]:
    def rows() -> Iterator[list[str]]:
        for label, cost in content["costs"].items():
            peak = cost["peak_gib"]
            yield [
                plain(label),
                f"{cost['iterations']:.0f}",
                f"{cost['samples']:.0f}",
                f"{cost['forwards']:.0f}",
                f"{cost['cpu_seconds']:.1f}",
                f"{cost['seconds']:.1f}",
                "" if peak is None else f"{peak:.2f}",
            ]

    head = ["of a run", "iterations", "samples", "forwards", "CPU s", "s", "peak GiB"]
    return ["", "## Cost", "", *_table(head, rows())]


def _how(content: Content) -> list[str]:
    about = content["machine"]
    settings = (
        f"* {plain(s['label'])}: `{s['config']}` {' '.join(f'`{c}`' for c in s['changes'])}"
        for s in content["settings"]
    )
    versions = ", ".join(f"{name} {v}" for name, v in about["versions"].items() if v)
    return [
        "",
        "## Settings",
        "",
        *settings,
        "",
        f"Machine: {about['cpu']}, {about['cores']} cores, {', '.join(about['gpus']) or 'no GPU'}; "
        f"{versions}; the runs at commit {', '.join(content['commits'])}. Again: "
        f"`{about['command']}`",
    ]
