"""Writes the page of ``bench_methods``: tables, curves and a check of the papers' claims."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from bench_vlm_learning import STYLE
from markupsafe import escape
from measuring import described

from mmrl.core.statistics import interval
from mmrl.monitoring.report.charts import Chart, Series

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
FAMILIES = (
    "Policy gradients on the path",
    "Noise in windows, shared beginnings",
    "Re-noised samples",
    "Pairs",
    "Gradients of the reward",
)
Runs = list[dict[str, Any]]  # runs of one method, one per seed


def write(folder: Path, methods: dict[str, tuple[str, float]]) -> None:
    """Write the page; ``methods``: name -> (family, learning rate)."""
    runs_of_method: dict[str, Runs] = {name: [] for name in methods}
    extra: dict[str, Any] = {"sprints": []}
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        if path.stem == "base":
            continue
        if path.stem.startswith("speed"):
            extra[path.stem] = run
        elif path.stem.startswith("sprint"):
            extra["sprints"].append(run)
        elif run["method"] in runs_of_method:
            runs_of_method[run["method"]].append(run)
    runs_of_method = {name: runs for name, runs in runs_of_method.items() if runs}
    (RESULTS / "visual_generation.json").write_text(
        json.dumps({"runs": runs_of_method, **extra}) + "\n"
    )
    for family in FAMILIES:
        curves = {name: runs for name, runs in runs_of_method.items() if methods[name][0] == family}
        if curves:
            (RESULTS / f"visual_generation_{FAMILIES.index(family) + 1}.svg").write_text(
                picture(family, curves)
            )
    text = "\n".join(page(runs_of_method, extra, methods))
    (RESULTS / "visual_generation.md").write_text(text + "\n")


# --------------------------------------------------------------------------------------------------
# curves


def picture(title: str, curves: dict[str, Runs]) -> str:
    """Draw the held-out reward over the iterations: mean of the seeds, with their spread as a band,
    and a legend."""
    series = []
    for name, runs in curves.items():
        points = list(zip(*(run["curve"] for run in runs)))  # the same iterations in every seed
        rewards = [[point[2] for point in each] for each in points]
        spread = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in rewards]
        series.append(
            Series(
                name, [each[0][0] for each in points], [statistics.mean(r) for r in rewards], spread
            )
        )
    chart = Chart(title, series, x_label="iteration", colours=list(range(1, len(series) + 1)))
    head, _, body = str(chart.svg()).partition(">")
    head = head.replace('viewBox="0 0 500 220"', 'viewBox="0 0 700 220"')
    size = 'xmlns="http://www.w3.org/2000/svg" width="1050" height="330" style="background:white"'
    legend = "".join(
        f'<line class="line c{colour}" x1="508" x2="526" y1="{24 + 20 * i}" y2="{24 + 20 * i}"/>'
        f'<text x="532" y="{28 + 20 * i}">{escape(label)} {last}</text>'
        for i, (colour, label, last) in enumerate(chart.latest())
    )
    head = head.replace("<svg", f"<svg {size}", 1)
    body = body.removesuffix("</svg>")
    return f"{head}><style>{STYLE}{MORE}{BAND}</style>{body}{legend}</svg>"


COLOURS = ("#2a68cf", "#d0690c", "#2b8a57", "#7d4ec0", "#c43458", "#158294", "#8a6d1f", "#6b7280")
MORE = "".join(f".c{i + 1}{{stroke:{c}}}" for i, c in enumerate(COLOURS))
BAND = "".join(f".band.c{i + 1}{{fill:{c};opacity:.12;stroke:none}}" for i, c in enumerate(COLOURS))


# --------------------------------------------------------------------------------------------------
# tables


def per_prompt(runs: Runs, when: str, name: str) -> torch.Tensor:
    """Return means [P] over the seeds."""
    return torch.tensor([run[when][name] for run in runs], dtype=torch.float64).mean(0)


def gain(runs: Runs, name: str) -> tuple[float, float]:
    """Return the mean of after - before on the same captions and noise, and the half-width of its
    95 % interval over captions."""
    change = per_prompt(runs, "after", name) - per_prompt(runs, "before", name)
    return halved(change)


def halved(change: torch.Tensor) -> tuple[float, float]:
    """Return the mean of differences [P] and the half-width of its 95 % interval over captions."""
    found = interval(change[None].numpy())
    return found.mean, found.high - found.mean


def mean(runs: Iterable[dict[str, Any]], name: str) -> float:
    return statistics.mean(run[name] for run in runs)


def line(name: str, runs: Runs) -> str:
    after = {
        key: float(per_prompt(runs, "after", key).mean())
        for key in ("digits", "digits_judge", "clip_score")
    }
    up, half = gain(runs, "digits")
    diversity = float(per_prompt(runs, "after", "diversity").mean())
    images = mean(runs, "images")
    mark = " †" if name in FORMER else ""
    cells = [
        f"[{name}](../../configs/digits/{runs[0]['config']}.yaml){mark}",
        f"**{after['digits']:.3f}**",
        f"{up:+.3f} ± {half:.3f}{'' if up > half else ' (no)'}",
        f"{after['digits_judge']:.3f}",
        f"{after['clip_score']:.3f}",
        f"{diversity:.3f}",
        f"{mean(runs, 'forwards') / images:.1f}",
        f"{mean(runs, 'cpu'):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = "| method | reward | gain | judge | CLIP | diversity | forwards a picture | CPU s |"


def in_short(runs_of_method: dict[str, Runs], most: int = 5) -> str:
    """State which methods gain the most, in total and for their cost."""
    gains = {name: gain(runs, "digits")[0] for name, runs in runs_of_method.items()}
    cost = {name: mean(runs, "cpu") for name, runs in runs_of_method.items()}
    first = sorted(gains, key=lambda name: -gains[name])[:most]
    quick = sorted(gains, key=lambda name: -gains[name] / cost[name])[:most]
    return (
        f"Highest gain: {', '.join(f'{name} {gains[name]:+.2f}' for name in first)}. Gain for ten "
        f"seconds of the processor: "
        f"{', '.join(f'{name} {10 * gains[name] / cost[name]:+.3f}' for name in quick)}."
    )


def page(
    runs_of_method: dict[str, Runs], extra: dict[str, Any], methods: dict[str, tuple[str, float]]
) -> list[str]:
    any_runs = next(iter(runs_of_method.values()))
    before = {
        key: float(per_prompt(any_runs, "before", key).mean()) for key in any_runs[0]["before"]
    }
    lines = [
        "# Methods for visual generation, compared",
        "",
        "Written by `python benchmarks/bench_methods.py`. "
        + INTRODUCTION.format(
            prompts=len(any_runs[0]["before"]["digits"]),
            digits=before["digits"],
            judge=before["digits_judge"],
            clip=before["clip_score"],
            diversity=before["diversity"],
        ),
        "",
        *LEGEND,
        "",
        in_short(runs_of_method),
        "",
    ]
    for number, family in enumerate(FAMILIES, start=1):
        of_family = {
            name: runs for name, runs in runs_of_method.items() if methods[name][0] == family
        }
        if of_family:
            lines += [f"## {family}", "", HEAD, "|---" * 8 + "|"]
            lines += [line(name, runs) for name, runs in of_family.items()]
            lines += ["", f"![held-out reward over iterations](visual_generation_{number}.svg)", ""]
    lines += claims(runs_of_method, extra)
    lines += ["## What is not here", "", *MISSING, ""]
    return [*lines, described(any_runs[0]["machine"])]


INTRODUCTION = (
    "One tiny Stable Diffusion 3 of the [digits world](../world.md), all weights trained. Means of "
    "three seeds and {prompts} held-out captions x 4 pictures, eight Euler steps without guidance. "
    "The base: `digits` {digits:.3f}, `digits_judge` {judge:.3f}, CLIP {clip:.3f}, diversity "
    "{diversity:.3f}. Learning rates were chosen on seed 0 by these same captions, which flatters "
    "a little. Runs are short: 36 optimizer steps on 1,152 pictures."
)
FORMER = {  # rows measured before a fix, and the fix
    "SePPO": "its flip compared the reference with the base; by the fixed rule +0.019 ± 0.018",
    "Adjoint Matching": "its last step had noise; 480 pictures",
}
MISSING = [
    "* The published DDPO has a base that predicts noise, RLCM a consistency model. Here both "
    "start from the flow that all share.",
    "* SePPO draws 24 captions x 4 pictures an iteration, the others 6 x 16.",
    "* Other programs used the machine: compare CPU seconds, and only inside one table.",
]
LEGEND = [
    "*reward*: `digits`, which was trained on; *gain*: over the base on the same captions and "
    'noise, 95 % interval over captions, "(no)" where it holds 0. *judge*, *CLIP*: not trained on. '
    "*diversity*: mean distance of two pictures of one caption. *forwards*: rows through the "
    "network, rollout and update. †: measured before a fix: "
    "" + "; ".join(f"{name}: {what}" for name, what in FORMER.items()) + ".",
]


def claims(runs_of_method: dict[str, Runs], extra: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if speed := extra.get("speed"):
        lines += [
            "## Time an iteration: trees",
            "",
            *SPEED,
            "",
            *speed_table(speed),
            "",
            WHY,
            "",
        ]
        if again := extra.get("speed_checkpointed"):
            lines += [CHECKPOINTED, "", *speed_table(again), ""]
        lines += [*equal_iterations(runs_of_method), ""]
    if extra["sprints"]:
        lines += [
            "## Time to Flow-GRPO's reward: DGPO",
            "",
            SPRINT,
            "",
            *sprint_table(runs_of_method, extra["sprints"]),
            "",
            SLOW,
            "",
        ]
    return lines


SPEED = [
    "Twenty steps and trees of 16 leaves that split at steps 0, 3, 6 and 9, as published; medians "
    "of CPU seconds, measured in turns. Forwards and trained decisions are those of a leaf.",
]


def speed_table(speed: dict[str, Any]) -> list[str]:
    base = statistics.median(speed["DanceGRPO, all steps"]["cpu"])
    lines = ["| | CPU s an iteration | times as fast | forwards | decisions |", "|---" * 5 + "|"]
    for name, run in speed.items():
        if name == "machine":
            continue
        middle = statistics.median(run["cpu"])
        lines.append(
            f"| {name} | {middle:.2f} ({min(run['cpu']):.2f} - {max(run['cpu']):.2f}) | "
            f"{base / middle:.2f} "
            f"| {run['forwards']:.1f} | {run['decisions']:.1f} |"
        )
    return lines


def equal_iterations(runs_of_method: dict[str, Runs]) -> list[str]:
    """Compare BranchGRPO's reward with DanceGRPO's."""
    if not {"BranchGRPO", "DanceGRPO"} <= set(runs_of_method):
        return []
    apart = per_prompt(runs_of_method["BranchGRPO"], "after", "digits") - per_prompt(
        runs_of_method["DanceGRPO"], "after", "digits"
    )
    mean_apart, half = halved(apart)
    difference = f"{mean_apart:+.3f} ± {half:.3f} over captions"
    return [
        f"After equally many iterations BranchGRPO's reward minus DanceGRPO's is "
        f"{difference}. {ETA}"
    ]


CHECKPOINTED = "The same with gradient checkpointing:"
ETA = (
    "Both have eta 0.5 here; at the published 0.3 (one run each) DanceGRPO reached 0.487 and "
    "BranchGRPO 0.436."
)
WHY = (
    "Sharing alone saves about a third, since most steps come after the last split. The rest is "
    "pruning, which changes training only, and in Mix the deterministic steps. *Short tail*: "
    "`flash: 0.4`, `solver: dpm`."
)
RIVALS = {
    "Flow-GRPO": "four steps, no KL",
    "Flow-GRPO, all steps, KL": "as published: all steps, KL to the reference",
}
SPRINT = (
    "DGPO with the settings above, until its held-out reward is that of Flow-GRPO at the end of "
    "its run on the same seed."
)


SLOW = (
    "The gain is in pictures, not in the cost of one: DGPO needs 16 rows of the network for a "
    "picture, Flow-GRPO 12 (four trained steps, no reference) or 22 (as published). DGPO's rise is "
    "not steady. Other learning rates, one draw, no clip, two epochs and DPM-Solver++ were no "
    "faster."
)


def sprint_table(runs_of_method: dict[str, Runs], sprints: list[dict[str, Any]]) -> list[str]:
    """Write DGPO's times on each seed and over all."""
    lines = ["| Flow-GRPO | its CPU s | DGPO, CPU s | times as fast |", "|---" * 4 + "|"]
    for name, form in RIVALS.items():
        rivals = runs_of_method.get(name, [])
        if line := together(rivals, sprints, form):
            lines.append(line)
    return lines


def first_there(run: dict[str, Any], goal: float) -> list[float] | None:
    """Find iteration, CPU seconds and reward where DGPO is first at least as good."""
    return next((point for point in run["curve"] if point[2] >= goal), None)


def together(rivals: Runs, sprints: list[dict[str, Any]], form: str) -> str:
    """Write a row: seconds of each seed, and how many times as fast DGPO is over all of them."""
    raced = {run["seed"]: run for run in sprints}
    pairs = [
        (run, first_there(raced[run["seed"]], run["curve"][-1][2]))
        for run in rivals
        if run["seed"] in raced
    ]
    if not pairs or not all(arrived for _, arrived in pairs):
        return ""
    theirs = [run["cpu"] for run, _ in pairs]
    own = [arrived[1] for _, arrived in pairs if arrived]
    seconds = (", ".join(f"{each:.1f}" for each in side) for side in (theirs, own))
    return f"| {form} | {' | '.join(seconds)} | {sum(theirs) / sum(own):.1f} |"
