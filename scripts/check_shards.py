"""Compares two processes with one for every family: copies (DDP) and shards (FSDP2).

    python scripts/check_shards.py                         # all, into docs/results/shards.md
    python scripts/check_shards.py --only vlm-llava pipeline-flux --out FOLDER

Tiny models of the real classes with random weights train for two iterations, on gloo: samples,
rewards, log-probs, advantages, metrics and all weights. In float64; in float32 where a network
mixes in numbers of its own type. The suite has some of them (tests/train/test_processes.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
KINDS = {"one": (), "copies": (), "shards": ("--sharded",)}


def names() -> list[str]:
    """List the cases: vision-language families and replayed pipelines."""
    from tests.fixtures.replay_cases import CASES
    from tests.policies.vlm.test_vlm_families import NAMES

    pipelines = [f"pipeline-{name}" for name, case in CASES.items() if not case.refused]
    return [f"vlm-{name}" for name in NAMES] + pipelines


def run(case: str, folder: Path, single: bool) -> dict[str, str]:
    """Run one case by one process and by two; return what failed, by the way it was run."""
    from tests.fixtures import warm

    precise = ("--single",) if single else ()
    for kind, words in KINDS.items():
        (folder / kind).mkdir(parents=True)
        start = warm.run if kind == "one" else warm.ranks
        module = ["-m", "tests.fixtures.family_worker", *precise]
        done = start([*module, folder / kind, *words, "--cases", case])
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "Error" in line]
            return {kind: (said or ["no error was printed"])[-1][:160]}
    return {}


def apart(case: str, folder: Path, kind: str) -> tuple[float, float]:
    """Return how far two processes are from one at most, and the norm of the gradient."""
    from safetensors.torch import load_file

    from tests.fixtures.process_worker import NUMBERS

    single, double = (load_file(folder / k / f"{case}.safetensors") for k in ("one", kind))
    single.pop("idle"), double.pop("idle")
    if single.keys() != double.keys():
        raise SystemExit(f"{case}: {kind} wrote other tensors")
    far = [farthest(value, double[name]) for name, value in single.items() if value.numel()]
    return max(far), float(single["1/metrics"][NUMBERS.index("grad_norm")])


def farthest(single: Any, double: Any) -> float:
    """Return the largest difference of two tensors of one shape; what is nan in one only is
    infinitely far."""
    difference = (single.double() - double.double()).abs()
    difference[single.isnan() & double.isnan()] = 0.0
    return float(difference.nan_to_num(float("inf")).max())


def compare(case: str) -> dict[str, Any]:
    """Compare one case, in float32 where float64 does not run or gives nan."""
    for single in (False, True):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            failed = run(case, folder, single)
            if failed and not single:
                continue
            result: dict[str, Any] = {"case": case, "type": "float32" if single else "float64"}
            if failed:
                return result | {"failed": failed}
            for kind in ("copies", "shards"):
                result[kind], result["gradient"] = apart(case, folder, kind)
            if single or result["gradient"] == result["gradient"]:
                return result
    raise AssertionError("both were tried")


def row(result: dict[str, Any]) -> str:
    """Write a row of the table."""
    if "failed" in result:
        ((kind, why),) = result["failed"].items()
        return f"| {result['case']} | {result['type']} | failed as {kind}: {why} | | |"
    numbers = [f"{result[name]:.1e}" for name in ("copies", "shards")]
    learnt = f"{result['gradient']:.2g}"
    return f"| {result['case']} | {result['type']} | {' | '.join(numbers)} | {learnt} |"


def page(results: list[dict[str, Any]]) -> str:
    """Write the page."""
    from mmrl.utils.machine import machine

    about = machine()
    libraries = ", ".join(
        f"{name} {about['versions'][name]}" for name in ("torch", "transformers", "diffusers")
    )
    ran = sum("failed" not in result for result in results)
    return "\n".join(
        [
            "# Two processes beside one, by family",
            "",
            f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}: "
            f"{about['cpu']}, {libraries}. Tiny models of the real classes",
            "with random weights, two iterations on gloo; the largest difference of samples,",
            "rewards, log-probs, advantages, metrics and weights from those of one process. A",
            "gradient of 0: all rewards were equal, so only sampling and scoring were compared;",
            "nan: no step was taken, since rewards failed or the gradient was not finite.",
            "",
            f"{ran} of {len(results)} ran.",
            "",
            "| case | in | copies (DDP) | shards (FSDP2) | norm of the gradient |",
            "|---|---|---|---|---|",
            *map(row, results),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="names of cases")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    arguments = parser.parse_args()
    known = names()
    strangers = sorted(set(arguments.only or ()) - set(known))
    if strangers:
        parser.error(f"--only: {', '.join(strangers)}: choose from {', '.join(known)}")
    results = []
    for case in arguments.only or known:
        results.append(compare(case))
        print(row(results[-1]), flush=True)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "shards.md").write_text(page(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
