"""Times what it saves on a CPU that passes' memory is kept in huge pages (``mmrl.core.heap``).

    python scripts/bench_heap.py
    python scripts/bench_heap.py --cases vlm --repeats 9

Two processes with the same run, one of which keeps memory, make whole iterations in turns.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import bench_overhead  # noqa: E402
import bench_vlm  # noqa: E402
import measuring  # noqa: E402
import torch  # noqa: E402

from mmrl.core import heap  # noqa: E402
from mmrl.core.registry import load_built_in  # noqa: E402
from mmrl.utils.machine import machine  # noqa: E402

WIDTH = 256  # of the networks of bench_overhead.py


def long_answers(_width: int, folder: Path) -> Any:
    """Build what is compared with TRL: 128 compiled answers of 256 tokens."""
    work = replace(bench_vlm.Work(), tokens=256, compile=True, reuse=True)
    bench_vlm.build("tiny", folder)
    return bench_vlm.ours(folder, work, bench_vlm.prompts(work, 2))


CASES: dict[str, Callable[[int, Path], Any]] = {
    "vlm, compiled, answers of 256 tokens": long_answers,
    **bench_overhead.FAMILIES,
}


def make(case: str, keeps: bool, folder: Path) -> Any:
    """Build a run, which keeps memory or does not."""
    load_built_in()
    torch.manual_seed(0)
    folder.mkdir()
    with mock.patch.object(heap, "keep", heap.keep if keeps else lambda: None):
        return CASES[case](WIDTH, folder)


def iteration(trainer: Any) -> tuple[float, int]:
    """Make one iteration; return its seconds and page faults."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds, _ = measuring.iteration(trainer)
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def measured(case: str, repeats: int) -> dict[str, Any]:
    """Measure one case; two iterations of each only warm up."""
    with tempfile.TemporaryDirectory() as place:
        sides = {
            name: measuring.Apart(make, case, name == "kept", Path(place) / name)
            for name in ("given back", "kept")
        }
        turns = [
            {name: side.ask(iteration) for name, side in sides.items()} for _ in range(repeats + 2)
        ][2:]
        for side in sides.values():
            side.end()
    factors = [turn["given back"][0] / turn["kept"][0] for turn in turns]
    return {
        "seconds": {name: statistics.median(turn[name][0] for turn in turns) for name in sides},
        "faults": {name: statistics.median(turn[name][1] for turn in turns) for name in sides},
        "factor": statistics.median(factors),
        "factors": factors,
    }


def page(report: dict[str, Any]) -> str:
    about = report["machine"]
    lines = [
        "# Memory kept on a CPU",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}.",
        "",
        f"{about['cpu']}, one thread; torch {about['versions']['torch']}. One iteration of GRPO, "
        "random weights in float32, with memory that passes free given back to the system, as "
        "glibc does, and kept in huge pages, as mmrl does: two processes, in turns, medians of "
        f"{report['repeats']} iterations. The networks are those of overhead.md, of width {WIDTH}.",
        "",
        "| run | given back, s | faults | kept, s | faults | times as fast (least - most) |",
        "|---|---|---|---|---|---|",
    ]
    for name, case in report["cases"].items():
        cells = " | ".join(
            f"{case['seconds'][side]:.2f} | {case['faults'][side]:.0f}"
            for side in ("given back", "kept")
        )
        low, high = min(case["factors"]), max(case["factors"])
        lines.append(f"| {name} | {cells} | {case['factor']:.2f} ({low:.2f} - {high:.2f}) |")
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/heap")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    cases = {name: measured(name, args.repeats) for name in args.cases}
    report = {"machine": machine(), "repeats": args.repeats, "cases": cases}
    measuring.publish(args.out, report, page(report))


if __name__ == "__main__":
    main()
