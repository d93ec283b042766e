"""Runs scripts/quickstart twice, with an empty and a full cache, and writes the results to
docs/results/.

    python benchmarks/bench_quickstart.py [key=value ...]

The time is that of the whole command after installation. Rewards, intervals and pictures are from
the first run.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import described

from mmrl.core.machine import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


def quickstart(cache: Path, run: Path, overrides: list[str]) -> float:
    """Return the seconds of the whole command."""
    start = time.monotonic()
    environment = os.environ | {"MMRL_CACHE": str(cache), "RUN": str(run)}
    subprocess.run([ROOT / "scripts" / "quickstart", *overrides], env=environment, check=True)
    return time.monotonic() - start


def table(evaluation: dict) -> list[str]:
    names = list(dict.fromkeys(name for row in evaluation["rows"] for name in row["rewards"]))
    lines = [f"| model | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in evaluation["rows"]:
        estimates = [row["rewards"][name] for name in names]
        cells = [f"{f['mean']:.3f} [{f['low']:.3f}, {f['high']:.3f}]" for f in estimates]
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    return lines


def page(report: dict) -> str:
    sizes = report["evaluation"]
    computer = report["machine"]
    return "\n".join(
        [
            "# Quickstart: Flow-GRPO on the digits world",
            "",
            "Written by `python benchmarks/bench_quickstart.py`. Held-out captions and noises "
            f"({sizes['prompts']} prompts x {sizes['num_samples']} samples), mean and 95 % "
            f"interval over prompts. `digits` "
            "is what was optimised; `digits_judge` (other scans, another network) and "
            "`clip_score` were not.",
            "",
            *table(sizes),
            "",
            f"The first time, base model and reward models included: "
            f"**{report['seconds']['fresh']:.0f} s**. "
            f"With those cached: **{report['seconds']['cached']:.0f} s**. "
            f"{report['iterations']} iterations.",
            "",
            "![before and after](before_after.png)",
            "",
            described(computer),
            "",
        ]
    )


def main() -> None:
    overrides = sys.argv[1:]
    with tempfile.TemporaryDirectory() as place:
        cache = Path(place) / "cache"
        runs = [Path(place) / name for name in ("fresh", "cached")]
        seconds = {run.name: round(quickstart(cache, run, overrides), 1) for run in runs}
        last = json.loads((runs[0] / "metrics.jsonl").read_text().splitlines()[-1])
        report = {
            "seconds": seconds,
            "iterations": last["iteration"],
            "evaluation": json.loads((runs[0] / "evaluation.json").read_text()),
            "evaluation_cached": json.loads((runs[1] / "evaluation.json").read_text()),
            "machine": machine(),
        }
        RESULTS.mkdir(parents=True, exist_ok=True)
        shutil.copy(runs[0] / "before_after.png", RESULTS / "before_after.png")
    (RESULTS / "quickstart.json").write_text(json.dumps(report, indent=1))
    (RESULTS / "quickstart.md").write_text(page(report))
    print(page(report))


if __name__ == "__main__":
    main()
