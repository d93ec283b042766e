"""Times an iteration with two threads under settings of OpenMP, idle and with work beside.

    python scripts/bench_threads.py  # an idle machine; about 15 minutes on two cores
    python scripts/bench_threads.py --only passive "spin 20000" --repeats 6

Measures an iteration of quickstart and one of the tiny vision-language model of ``bench_vlm.py``,
each setting in a process of its own. "Loaded" is a busy loop of one thread for every two cores
beside it. Writes ``docs/results/threads.md`` and ``.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
SPINS = (1000, 5000, 10000, 20000, 50000, 100000)
SETTINGS: dict[str, dict[str, str]] = {
    "libgomp's default": {},
    **{f"spin {count}": {"GOMP_SPINCOUNT": str(count)} for count in SPINS},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# an idle machine may lose so much against the best, a loaded one so much against idle
LOSS = 1.05
SLOWDOWN = 1.5


def quickstart(folder: Path) -> Callable[[], Any]:
    """Return a function that does one training iteration of the quickstart."""
    from mmrl.run import build
    from mmrl.utils.paths import find_config

    return build.base(find_config("digits/flow_grpo"), [f"run={folder}"]).trainer().iterate


def vlm(folder: Path) -> Callable[[], Any]:
    """Return a function that does one training iteration of a tiny Qwen2.5-VL."""
    import bench_vlm

    work = bench_vlm.Work()
    return bench_vlm.ours(bench_vlm.build("tiny", folder), work, bench_vlm.prompts(work, 4)).iterate


# and how many iterations for one of the other
WORKLOADS = {"quickstart": (quickstart, 1), "vlm": (vlm, 3)}


def worker(repeats: int) -> None:
    """Print wall and CPU seconds of every iteration but the first of both workloads, as JSON."""
    measured: dict[str, dict[str, list[float]]] = {}
    for name, (make, times) in WORKLOADS.items():
        with tempfile.TemporaryDirectory() as folder:
            iterate = make(Path(folder))
            iterate()
            wall = []
            cpu = []
            for _ in range(repeats * times):
                started = time.perf_counter()
                used = time.process_time()
                iterate()
                wall.append(time.perf_counter() - started)
                cpu.append(time.process_time() - used)
        measured[name] = {"wall": wall, "cpu": cpu}
    print(json.dumps(measured))


@contextmanager
def beside(count: int) -> Iterator[None]:
    """Keep ``count`` busy processes running."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(setting: dict[str, str], busy: int, repeats: int) -> dict[str, Any]:
    """Run the workloads in a process of their own with this setting and so many busy processes
    beside it."""
    environment = {
        name: value for name, value in os.environ.items() if name not in VARIABLES
    } | setting
    command = [sys.executable, __file__, "--worker", "--repeats", str(repeats)]
    with beside(busy):
        shown = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    return json.loads(shown.splitlines()[-1])


def middle(
    report: dict[str, Any], setting: str, place: str, workload: str, clock: str = "wall"
) -> float:
    """Return the median seconds of an iteration."""
    return statistics.median(report["settings"][setting][place][workload][clock])


def page(report: dict[str, Any]) -> str:
    """Return the results as markdown."""
    about = report["machine"]
    lines = [
        "# Threads that wait",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}: "
        f"{about['cpu']}, "
        f"{about['cores']} cores, torch {about['versions']['torch']}. Median wall seconds "
        f"(CPU seconds) of an "
        f"iteration, idle and with {report['busy']} busy process(es) beside it.",
        "",
        f"Wanted: idle within {LOSS:g} x the best, loaded within {SLOWDOWN:g} x the same "
        f"setting idle.",
    ]
    for workload in WORKLOADS:
        best = min(middle(report, setting, "idle", workload) for setting in report["settings"])
        lines += [
            "",
            f"## {workload}",
            "",
            "| setting | idle | loaded | idle / best | loaded / idle |",
        ]
        lines += ["|---|---|---|---|---|"]
        for setting in report["settings"]:
            idle, loaded = (
                middle(report, setting, place, workload) for place in ("idle", "loaded")
            )
            used = [middle(report, setting, place, workload, "cpu") for place in ("idle", "loaded")]
            lines.append(
                f"| {setting} | {idle:.2f} ({used[0]:.2f}) | {loaded:.2f} ({used[1]:.2f}) "
                f"| {idle / best:.2f} | {loaded / idle:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main(words: list[str] | None = None) -> None:
    """Measure the chosen settings in turns and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument(
        "--repeats",
        type=int,
        default=4,
        help="iterations of quickstart; three times as many of vlm",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "threads")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.worker:
        return worker(args.repeats)
    from mmrl.utils.machine import cores, machine

    busy = max(1, (cores() or 2) // 2)
    report: dict[str, Any] = {"machine": machine(), "busy": busy, "settings": {}}
    for name in args.only:
        report["settings"][name] = {
            place: measure(SETTINGS[name], count, args.repeats)
            for place, count in (("idle", 0), ("loaded", busy))
        }
        print(
            name,
            *(f"{middle(report, name, p, w):.2f}" for w in WORKLOADS for p in ("idle", "loaded")),
            flush=True,
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=1))
    args.out.with_suffix(".md").write_text(page(report))


if __name__ == "__main__":
    main()
