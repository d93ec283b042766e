"""Times what ``train.reuse_rollout_graph`` saves of an iteration, and what it keeps in memory.

    python scripts/bench_reuse.py             # the tiny Stable Diffusion 3 of the digits world
    python scripts/bench_reuse.py --threads 1 --repeats 7

Whole iterations with and without it, in turns, in one process, by the processor's time; before that
both are run in float64 and have to come to the same weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import bench_iteration as bench  # noqa: E402
import measuring  # noqa: E402
import torch  # noqa: E402

from mmrl.core.registry import locate  # noqa: E402
from mmrl.policies.diffusion.models.sd3 import SD3  # noqa: E402
from mmrl.train.trainer import Trainer  # noqa: E402
from mmrl.utils.machine import machine  # noqa: E402
from samplers.windows import all_but_last, random_window  # noqa: E402

AGREE = 1e-10


@dataclass(frozen=True)
class Case:
    """Describes a run: how many of its ten steps are trained, and in how many optimizer steps."""

    name: str
    trained: int = 9
    updates: int = 1
    guidance: float = 4.5
    lora: int | None = None
    checkpointing: bool = False


CASES = (
    Case("nine of ten steps trained, one optimizer step"),
    Case("the same, two optimizer steps", updates=2),
    Case("two of ten steps trained (Flow-GRPO-Fast)", trained=2),
    Case("nine of ten, no guidance", guidance=1.0),
    Case("nine of ten, adapters of rank 8", lora=8),
    Case("nine of ten, activations recomputed", checkpointing=True),
)


def trainer(case: Case, reuse: bool, double: bool = False) -> Trainer:
    """Build a run, always with the same weights."""
    torch.manual_seed(0)
    window = all_but_last if case.trained == 9 else partial(random_window, size=case.trained)
    policy = SD3(
        locate("world:digits/sd3-test"),
        size=32,
        steps=10,
        guidance_scale=case.guidance,
        lora=case.lora,
        noise_window=window,
    )
    if double:
        policy.net.double()
    work = bench.Work(
        prompts=2 if double else 6,
        copies=8 if double else 16,
        updates=case.updates,
        fraction=1.0,
        gradient_checkpointing=case.checkpointing,
        reuse=reuse,
    )
    return bench.mmrl_trainer(policy, work, bench.by_place if double else bench.brightness)


def agreement(case: Case) -> float:
    """Return how far the weights are apart after an iteration in float64; SystemExit if that is
    more than rounding."""
    runs = [trainer(case, reuse, double=True) for reuse in (False, True)]
    before = runs[0].policy.weights.full()
    for run in runs:
        run.iterate()
    plain, reusing = (run.policy.weights.full() for run in runs)
    apart = max(float((plain[name] - reusing[name]).abs().max()) for name in plain)
    moved = max(float((plain[name] - before[name]).abs().max()) for name in plain)
    if not apart < AGREE < moved / 1000:
        raise SystemExit(f"{case.name}: weights are {apart:.1e} apart and moved by {moved:.1e}")
    return apart


def measured(case: Case, repeats: int) -> dict[str, Any]:
    """Measure iterations with and without, in turns."""
    runs = [trainer(case, reuse) for reuse in (False, True)]
    costs = [measuring.cost(run.iterate, run.policy.net) for run in runs]
    seconds: list[list[float]] = [[], []]
    for _ in range(repeats):
        for run, times in zip(runs, seconds, strict=True):
            start = time.process_time()
            run.iterate()
            times.append(time.process_time() - start)
    plain, reusing = seconds
    factors = [before / after for before, after in zip(plain, reusing, strict=True)]
    return {
        "apart": agreement(case),
        "seconds": [statistics.median(plain), statistics.median(reusing)],
        "factor": statistics.median(factors),
        "factors": factors,
        "passes": [cost["passes"] for cost in costs],
        "peak_bytes": [cost["peak_bytes"] for cost in costs],
    }


def page(report: dict[str, Any]) -> str:
    """Write the results as markdown."""
    about = report["machine"]
    lines = [
        "# What the reuse of a rollout's passes saves",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}.",
        "",
        f"{about['cpu']}, {report['threads']} thread(s); torch {about['versions']['torch']}. The "
        f"tiny Stable Diffusion 3 of the digits world, 32 pixels, 6 prompts x 16 samples, 10 "
        f"steps; {report['repeats']} iterations each, in turns, by the processor's time. The "
        f"factor is the median of the ratios of neighbouring iterations, with the least and the "
        f"most. Memory is the peak of tensors made in an iteration. In float64 the weights "
        f"after an iteration with and without are at most {report['apart']:.0e} apart.",
        "",
        "| | times as fast | seconds without, with | passes | peak MiB |",
        "|---|---|---|---|---|",
    ]
    for name, case in report["cases"].items():
        least, most = min(case["factors"]), max(case["factors"])
        peak = [size / 2**20 for size in case["peak_bytes"]]
        lines.append(
            f"| {name} | {case['factor']:.2f} ({least:.2f} - {most:.2f}) | "
            f"{case['seconds'][0]:.2f}, {case['seconds'][1]:.2f} | "
            f"{case['passes'][0]}, {case['passes'][1]} | {peak[0]:.0f}, {peak[1]:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/reuse")
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    cases = {case.name: measured(case, args.repeats) for case in CASES}
    report = {
        "cases": cases,
        "apart": max(case["apart"] for case in cases.values()),
        "repeats": args.repeats,
        "threads": args.threads,
        "machine": machine(),
    }
    measuring.publish(args.out, report, page(report))


if __name__ == "__main__":
    main()
