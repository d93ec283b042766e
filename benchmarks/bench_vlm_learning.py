"""Measures whether the tiny VLM learns: both recipes of the digits world on several seeds, to
docs/results/.

    python benchmarks/bench_vlm_learning.py [--seeds 0 1 2] [--only grounding counting] [key=value]

Every run is what a user would type: `mmrl train`, then `mmrl evaluate` (greedy answers on unseen
scenes and scans, base and trained model). The seconds are those of `mmrl train`, loading and
evaluations included.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import described

from mmrl.core.machine import machine
from mmrl.monitoring.report.charts import Chart, Series

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
RECIPES = {"grounding": ("iou50", "IoU of at least 0.5"), "counting": ("count", "right numbers")}
STYLE = (
    "text{font:12px "
    "sans-serif;fill:#555}.grid{stroke:#e5e5e5}.axis{stroke:#aaa}.line{fill:none;stroke-width:2}"
    ".c1{stroke:#2a68cf}.c2{stroke:#d0690c}.c3{stroke:#2b8a57}.c4{stroke:#7d4ec0}.c5{stroke:#c43458}.c6{stroke:#158294}"
)


def mmrl(*words: str) -> float:
    """Run a command and return its seconds."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "mmrl", *words], cwd=ROOT, check=True)
    return time.monotonic() - start


def learn(recipe: str, seed: int, run: Path, overrides: list[str]) -> dict:
    """Train, evaluate, read back."""
    seconds = mmrl("train", f"digits/{recipe}", f"train.seed={seed}", f"run={run}", *overrides)
    mmrl("evaluate", str(run))
    mmrl("report", str(run))
    evaluation = json.loads((run / "evaluation.json").read_text())
    base, trained = (row["rewards"] for row in evaluation["rows"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metric = RECIPES[recipe][0]
    curve = [[0, base[metric]["mean"]]]
    curve += [
        [line["iteration"], line[f"eval/{metric}"]]
        for line in lines
        if line.get(f"eval/{metric}") is not None
    ]
    iterating = sum(line["seconds"] for line in lines)
    return {
        "seed": seed,
        "seconds": seconds,
        "iterations": len(lines),
        "iteration_seconds": iterating,
        "base": base,
        "trained": trained,
        "curve": curve,
        "prompts": evaluation["prompts"],
    }


def picture(recipe: str, runs: list[dict]) -> str:
    """Draw held-out measurements over the iterations, a curve per seed, to a file."""
    curves = [Series(f"seed {run['seed']}", *map(list, zip(*run["curve"]))) for run in runs]
    drawing = str(Chart(recipe, curves, zero=True).svg())
    size = 'xmlns="http://www.w3.org/2000/svg" width="750" height="330" style="background:white"'
    head, _, body = drawing.partition(">")
    return f"{head.replace('<svg', f'<svg {size}', 1)}><style>{STYLE}</style>{body}"


def table(runs: list[dict], metric: str) -> list[str]:
    lines = ["| seed | before | after | gain | `mmrl train`, s |", "|---|---|---|---|---|"]
    for run in runs:
        before = run["base"][metric]
        after = run["trained"][metric]
        cells = [f"{e['mean']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" for e in (before, after)]
        gain = after["mean"] - before["mean"]
        lines.append(
            f"| {run['seed']} | {cells[0]} | {cells[1]} | {gain:+.3f} | {run['seconds']:.0f} |"
        )
    return lines


def page(report: dict) -> str:
    lines = [
        "# A tiny VLM learns from verifiable rewards",
        "",
        "Written by `python benchmarks/bench_vlm_learning.py`. Greedy answers about "
        "held-out scenes drawn with scans that "
        "neither the warm-up nor the training saw; mean and 95 % interval over prompts. "
        "Settings were chosen on the "
        "development scenes (`data.held_out=development`), which share neither scenes "
        "nor scans with these.",
        "",
    ]
    for recipe, runs in report["runs"].items():
        metric, meaning = RECIPES[recipe]
        lines += [f"## `mmrl train digits/{recipe}`: share of {meaning}", ""]
        lines += [
            f"{runs[0]['prompts']} prompts, {runs[0]['iterations']} iterations.",
            "",
            *table(runs, metric),
            "",
        ]
        if recipe == "grounding":
            changes = [
                f"{run['base']['referring']['mean']:.3f} to "
                f"{run['trained']['referring']['mean']:.3f}"
                for run in runs
            ]
            lines += [f"Mean IoU, which is what was optimised: {', '.join(changes)}.", ""]
        lines += [f"![held-out {metric} over iterations](vlm_{recipe}.svg)", ""]
    return "\n".join([*lines, described(report["machine"]), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("overrides", nargs="*", help="key=value of the configurations")
    chosen = parser.parse_args()
    mmrl("build", "digits/vlm")
    with tempfile.TemporaryDirectory() as place:
        folder = chosen.runs or Path(place)
        runs = {
            recipe: [
                learn(recipe, seed, folder / f"{recipe}-{seed}", chosen.overrides)
                for seed in chosen.seeds
            ]
            for recipe in chosen.only
        }
    RESULTS.mkdir(parents=True, exist_ok=True)
    earlier = (
        json.loads((RESULTS / "vlm.json").read_text())["runs"] if len(runs) < len(RECIPES) else {}
    )
    report = {"machine": machine(), "overrides": chosen.overrides, "runs": earlier | runs}
    (RESULTS / "vlm.json").write_text(json.dumps(report, indent=1))
    (RESULTS / "vlm.md").write_text(page(report))
    for recipe, each in runs.items():
        (RESULTS / f"vlm_{recipe}.svg").write_text(picture(recipe, each))
    print(page(report))


if __name__ == "__main__":
    main()
